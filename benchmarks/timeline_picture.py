"""Draws the modelled step of a model by our plan and by the strategies of other systems: docs/timeline.png.

    python benchmarks/timeline_picture.py --model qwen3_8b --ranks 64

The strategies differ in owners. They keep the rounds and the bytes of our plan, so the padding of stacks is left out.
In the last strategy every rank gathers and orthogonalizes all matrices.
"""

import sys
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tyro
from matplotlib.patches import Patch

# As a script, only this folder is on the path.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import models as families  # noqa: E402, F401
from titan_muon.trainer.torchtitan import compat  # noqa: E402

compat.install()

from benchmarks.owners import owned_by, per_layer, round_robin  # noqa: E402
from titan_muon.engine.layout.types import Bucket, Plan  # noqa: E402
from titan_muon.planner.machine import planning_machine  # noqa: E402
from titan_muon.planner.timeline import spans  # noqa: E402
from titan_muon.trainer.dry_run.meta_model import build_meta_model  # noqa: E402
from titan_muon.trainer.recipe import load  # noqa: E402

COLORS = {
    "advance": "#e5a93c",
    "gather": "#6aa5d8",
    "copy": "#8bb8a2",
    "orthogonalize": "#3a7d5c",
    "send_back": "#9a7fd1",
    "apply": "#d36f4c",
}
LINKS = ("gather", "send_back")


def by_shape(plan: Plan, bucket: Bucket, matrix: int) -> int:
    """The matrices of each shape take the ranks in turn from the first rank on, as in stacks padded to the ranks."""
    of = plan.matrices[matrix]
    matrices = sorted(
        number
        for other in plan.buckets
        if other.group == bucket.group
        for number in other.matrices
        if (plan.matrices[number].rows, plan.matrices[number].cols) == (of.rows, of.cols)
    )
    return matrices.index(matrix) % len(bucket.group)


def strategies(model: str, ranks: int) -> dict[str, Plan]:
    """Our plan of a recipe, and the same matrices by other strategies."""

    def planned(*words: str) -> Plan:
        recipe = load(ROOT / f"configs/{model}_muon.toml", ["--qk_clip.mode", "off", *words])
        plan = build_meta_model(recipe, ranks, "cuda").plan
        assert plan is not None, f"{model} has matrices"
        return plan

    ours = planned()
    return {
        "Titan Muon: search over owners and rounds": ours,
        "round robin": owned_by(ours, round_robin),
        "stacks of a shape, padded to the ranks": owned_by(ours, by_shape),
        "a layer for each rank": owned_by(ours, per_layer),
        "redundant: every rank gathers and orthogonalizes all": planned("--muon.expert.exchange", "all_gather"),
    }


def main(model: str = "qwen3_8b", ranks: int = 64, out: Path = ROOT / "docs" / "timeline.png") -> dict[str, float]:
    """Draw the picture. Returns the modelled milliseconds of each strategy.

    Args:
        model: name of a recipe, without `_muon.toml`.
        ranks: number of GPUs.
        out: PNG file.
    """
    machine = planning_machine(replace(load(ROOT / f"configs/{model}_muon.toml").machine, name="h100x8"), "cuda")
    timelines = {name: spans(plan, machine) for name, plan in strategies(model, ranks).items()}
    ends = {name: 1e3 * max(span.stop for span in timeline) for name, timeline in timelines.items()}
    shown = 4 * min(ends.values())
    figure, panels = plt.subplots(len(timelines), 1, figsize=(10, 8.5), sharex=True)
    for panel, (name, timeline) in zip(panels, timelines.items(), strict=True):
        for stage, color in COLORS.items():
            # Links lie behind computing: a wait shows its transfer.
            look = {"alpha": 0.45, "zorder": 1} if stage in LINKS else {"zorder": 2}
            for span in timeline:
                if span.stage == stage and 1e3 * span.start < shown:
                    width = 1e3 * (span.stop - span.start)
                    panel.broken_barh([(1e3 * span.start, width)], (span.rank, 1), color=color, lw=0, **look)
        panel.set_title(f"{name}: {ends[name]:,.0f} ms", loc="left", fontsize=10)
        panel.set_ylim(ranks, 0)
        panel.set_xlim(0, shown)
        panel.set_ylabel("rank", fontsize=8)
    panels[-1].set_xlabel(f"ms of Muon's step, {model} on {ranks} H100s, modelled")
    handles = [Patch(color=color, label=stage.replace("_", " ")) for stage, color in COLORS.items()]
    figure.legend(handles=handles, loc="upper right", ncols=6, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(out, dpi=110)
    plt.close(figure)
    for name, end in ends.items():
        print(f"{end:10,.1f} ms  {name}")
    return ends


if __name__ == "__main__":
    tyro.cli(main)
