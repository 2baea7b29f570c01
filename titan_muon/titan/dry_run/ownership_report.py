"""What each rank owns, in words and numbers, from a model's parameters at rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_muon.owned import is_owned
from titan_muon.owned.param import held_elements
from titan_muon.plan import Summary
from titan_muon.plan.ownership import OwnedTotals, load_lines

SHOWN = 16
"""Lines of the table unless all are asked for."""


def loads(parameters: Mapping[str, Tensor], summary: Summary, world_size: int) -> dict[int, OwnedTotals]:
    """What each rank owns, and the FLOPs of its Muon step, experts that rest with it included; empty if none does."""
    owned = [parameter for parameter in parameters.values() if isinstance(parameter, DTensor) and is_owned(parameter)]
    matrices, held = dict.fromkeys(range(world_size), 0), dict.fromkeys(range(world_size), 0)
    for parameter in owned:
        for rank, elements in held_elements(parameter).items():
            matrices[rank] += 1
            held[rank] += elements * parameter.element_size()
    flops = {cost.rank: cost.ns_flops for cost in summary.ranks}
    return {rank: OwnedTotals(matrices[rank], held[rank], flops.get(rank, 0)) for rank in matrices} if owned else {}


def ownership_summary(loads: Mapping[int, OwnedTotals]) -> Iterable[str]:
    """How even the owners are, and how many ranks own nothing."""
    if not loads:
        return
    held = [load.bytes for load in loads.values()]
    most, mean = max(held), sum(held) / len(held)
    yield f"owned: {most / 2**20:,.1f} MiB at rest on the fullest of {len(held):,} ranks, {most / mean:.3f} x the mean"
    if idle := sum(1 for load in loads.values() if load.matrices == 0):
        total = sum(load.matrices for load in loads.values())
        yield f"  {idle:,} ranks own nothing: there are {total:,} matrices for {len(held):,} ranks"


def ownership_lines(loads: Mapping[int, OwnedTotals], *, full: bool) -> Iterable[str]:
    """The summary and the table owner -> matrices, bytes, FLOPs of its step."""
    if not loads:
        return
    yield from ownership_summary(loads)
    table = list(load_lines(loads))
    yield from (f"  {line}" for line in (table if full else table[: SHOWN + 1]))
    if not full and len(table) > SHOWN + 1:
        yield f"  ... {len(table) - SHOWN - 1:,} lines more with --full"
