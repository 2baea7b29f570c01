"""`--html`: a self-contained page with the modelled timeline, balance, memory, parameters and the recipe."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from titan_muon.assignment.table import HEADER, parameter_rows
from titan_muon.plan import Plan
from titan_muon.plan.cost.timeline import LOCAL, STAGES, spans
from titan_muon.titan.dry_run.stages import StageReport
from titan_muon.titan.dry_run.verdict import memory_parts, verdict_lines
from titan_muon.titan.recipe import Recipe, to_toml

TEMPLATE = Path(__file__).with_name("page.html")
MARK = "/*DATA*/null"


def page_text(parts: Sequence[StageReport], recipe: Recipe) -> str:
    """The page as HTML."""
    data = {
        "recipe": to_toml(recipe),
        "name": recipe.name,
        "columns": HEADER,
        "parts": [_part(part, recipe) for part in parts],
    }
    # "</script>" would end the page's script element, and "<!--<script>" would hide its end.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(MARK, text)


def _part(part: StageReport, recipe: Recipe) -> dict[str, object]:
    meta, plan = part.meta, part.meta.plan
    steps = [] if plan is None else spans(plan, part.machine, overlap=recipe.muon.overlap)
    return {
        "ranks": list(meta.ranks),
        "machine": part.machine.name,
        "verdict": "\n".join(verdict_lines(part.verdict, meta, recipe, part.machine)),
        "stages": STAGES,
        # Microseconds as integers: a step of 1,024 ranks has tens of thousands of spans.
        "spans": [
            [s.rank, STAGES.index(s.stage), s.bucket, round(1e6 * s.start), max(1, round(1e6 * (s.stop - s.start)))]
            for s in steps
        ],
        "buckets": [] if plan is None else _buckets(plan),
        "local": {} if plan is None else Counter(rank for ranks in plan.local for rank in ranks),
        "balance": [
            [time.rank, round(1e6 * time.orthogonalize), round(1e6 * time.passes), round(1e6 * time.waits)]
            for time in (() if part.timeline is None else part.timeline.ranks)
        ],
        "memory": memory_parts(part.verdict),
        "peak": part.verdict.peak,
        "capacity": part.verdict.capacity,
        # A line for equal parameters of all layers.
        "parameters": parameter_rows(meta.assigned, meta.parameters, plan, full=False),
    }


def _buckets(plan: Plan) -> list[dict[str, object]]:
    return [
        {
            "exchange": bucket.exchange,
            "matrices": [_name(plan, number) for number in bucket.matrices],
            "owners": list(bucket.owners),
        }
        for bucket in plan.buckets
    ]


def _name(plan: Plan, number: int) -> str:
    matrix = plan.matrices[number]
    label = plan.parameters[matrix.parameter].stack.matrices[matrix.index].label
    rows, cols = matrix.whole_shape
    return f"{plan.parameters[matrix.parameter].fqn}{f' {label}' if label else ''} {rows}x{cols}"


assert LOCAL == -1, "the page marks local matrices so"
