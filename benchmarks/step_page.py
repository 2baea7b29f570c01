"""The page and the picture of a comparison by bench_step.py."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

BARS: dict[str, Callable[[dict[str, Any]], float]] = {
    "CPU ms of all ranks": lambda row: row["cpu_ms"],
    "MB sent by a rank": lambda row: row["counts"]["bytes_sent"] / 1e6,
    "collectives": lambda row: row["counts"]["calls"],
    "GFLOP of matrix products on a rank": lambda row: row["counts"]["ns_flops"] / 1e9,
    "MB beyond the momentum": lambda row: (row["counts"]["bytes_kept"] + row["counts"]["bytes_new"]) / 1e6,
}
OURS = ("all_gather", "all_to_all")
"""Names of Titan Muon's exchanges begin with these."""
PAGE = """# One optimizer step on the CPU

    {command}

Measured on {date} with torch {torch}, commit {commit}, {machine}: {nproc} gloo ranks with one thread each, medians of
{repeats} interleaved steps. Other programs ran on the machine, so read CPU time, not ms, and counts before either. The
products are in bfloat16, which this CPU computes slowly; `auto` computes in float32, and AdamW has no products.

![CPU time, bytes, calls, products and memory]({picture})

- **torch.optim.Muon, gathered**: every rank gathers and orthogonalizes every matrix.
- **padded stacks**: an all-to-all for each round of one matrix a rank, as dion's Muon exchanges them; written for this
  comparison in `benchmarks/contenders.py`, and not dion's code. The rounds follow from the ranks.
- **all_gather**, **all_to_all**, **all_gather_reduce_scatter**: Titan Muon's exchanges, with the rounds of its planner.
- **DistMuon**: TorchTitan's, a round for each layer, as its recipes have it; with null streams on a CPU.
- **calls**: collectives of matrices and the all-reduce of Titan Muon's report.
- **extra MB**: memory beyond the momentum, kept or new in a step.
- **update error**: beside torch.optim.Muon after three steps.

{table}

No bar of the picture is cut.
"""


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each quantity, all from zero."""
    figure = Figure(figsize=(15, 3.2), dpi=100, layout="constrained")
    names = [row["name"] for row in rows]
    colors = ["#009E73" if name.startswith(OURS) else "#999999" for name in names]
    for place, (axes, (title, value)) in enumerate(zip(figure.subplots(1, len(BARS)), BARS.items(), strict=True)):
        bars = axes.barh(names, [value(row) for row in rows], color=colors)
        axes.bar_label(bars, [f"{value(row):,.{0 if value(row) >= 10 else 2}f}" for row in rows], padding=2, fontsize=7)
        axes.set(title=title, xlim=(0, 1.2 * max(value(row) for row in rows)))
        axes.title.set_fontsize(9)
        axes.tick_params(labelsize=8, labelleft=place == 0)
        axes.invert_yaxis()
    return figure


def write(page: Path, rows: Sequence[dict[str, Any]], table: str, **facts: object) -> None:
    """Write the page, and beside it the picture with the page's name."""
    image = page.with_suffix(".png")
    picture(rows).savefig(image)
    page.write_text(PAGE.format(table=table, picture=image.name, **facts), encoding="utf-8")
