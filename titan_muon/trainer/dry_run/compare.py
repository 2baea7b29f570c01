"""`--compare`: estimates of alternative recipes in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan_muon.trainer.dry_run.verdict import StageReport, dry_run
from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.recipe.command_line import Alternative

COLUMNS = ("", "fits", "peak GiB", "Muon ms", "AdamW ms", "over AdamW", "sent in Muon's step MiB", "idle ranks")


def compare(alternatives: Sequence[Alternative], world_size: int | None, device: str | None) -> Iterator[str]:
    """A table of modelled times, then a line for each refused alternative."""
    rows: list[tuple[bool, float, list[str]]] = []
    refused: list[str] = []
    machine = ""
    for alternative in alternatives:
        try:
            parts = dry_run(alternative.load(), world_size, device)
        except RecipeError as error:
            refused.append(f"  {alternative.name}: refused: {error}")
            continue
        machine = parts[0].estimate.machine.name
        fits, seconds = all(part.verdict.fits for part in parts), max(part.verdict.optimizers for part in parts)
        rows.append((not fits, seconds, _row(alternative.name, parts)))
    yield f"alternatives on {machine}, modelled; the shortest step of the optimizers that fits first"
    yield from table(COLUMNS, [row for *_, row in sorted(rows, key=lambda item: item[:2])])
    yield from refused


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: the first column to the left, the others to the right. None without rows."""
    cells = [columns, *rows] if rows else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *numbers in cells:
        yield "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])])


def _row(name: str, parts: Sequence[StageReport]) -> list[str]:
    slowest = max((part.verdict for part in parts), key=lambda verdict: verdict.optimizers)
    summaries = [summary for part in parts if (summary := part.estimate.summary) is not None]
    sent = max((summary.bytes_sent_max for summary in summaries), default=0)
    idle = sum(cost.matrices == 0 for summary in summaries for cost in summary.ranks)
    return [
        name,
        "yes" if all(part.verdict.fits for part in parts) else "no",
        f"{max(part.verdict.peak for part in parts) / 2**30:,.1f}",
        f"{1e3 * slowest.optimizers:,.2f}",
        f"{1e3 * slowest.adamw:,.2f}",
        f"{100 * slowest.overhead:+.2f} %",
        f"{sent / 2**20:,.1f}",
        f"{idle:,}",
    ]
