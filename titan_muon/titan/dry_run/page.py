"""`--html`: a self-contained page with the verdict, the modelled timeline, the parameters and the recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from titan_muon.assignment.table import HEADER, parameter_rows
from titan_muon.plan.cost.timeline import STAGES, spans
from titan_muon.titan.dry_run.stages import StageReport
from titan_muon.titan.dry_run.verdict import verdict_lines
from titan_muon.titan.recipe import Recipe, to_toml

TEMPLATE = Path(__file__).with_name("page.html")
MARK = "/*DATA*/null"


def page_text(parts: Sequence[StageReport], recipe: Recipe) -> str:
    """The page as HTML."""
    data = {
        "recipe": to_toml(recipe),
        "name": recipe.name,
        "columns": HEADER,
        "stages": STAGES,
        "parts": [_part(part, recipe) for part in parts],
    }
    # "</script>" would end the page's script element, and "<!--<script>" would hide its end.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(MARK, text)


def _part(part: StageReport, recipe: Recipe) -> dict[str, object]:
    meta, plan = part.meta, part.meta.plan
    steps = [] if plan is None else spans(plan, part.estimate.machine, overlap=recipe.muon.overlap)
    return {
        "ranks": list(meta.ranks),
        "verdict": "\n".join(verdict_lines(part.verdict, meta, part.estimate.machine)),
        # Microseconds as integers: a step of 1,024 ranks has tens of thousands of spans.
        "spans": [
            [s.rank, STAGES.index(s.stage), s.bucket, round(1e6 * s.start), max(1, round(1e6 * (s.stop - s.start)))]
            for s in steps
        ],
        # A line for equal parameters of all layers.
        "parameters": parameter_rows(meta.assigned, meta.parameters, plan, full=False),
    }
