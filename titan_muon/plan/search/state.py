"""Which ranks keep the momentum of copies where not all of them do, and which can therefore own its matrices."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ...options import MuonOptions, OptionError
from ..exchange.all_gather import PATTERNS
from ..terms.layout import Geometries, Geometry, chunk
from ..terms.types import Parameter, Plan, Replicate
from ..terms.work import WorkOf
from .owners import BYTES_OVER_MEAN

Ranks = tuple[int, ...]

# [Note: state ranks]
# - A copy is a replica: one rank where a parameter is whole on each, all ranks that shard it together under HSDP. One
#   of them keeps the momentum, and what it keeps is placed there as the parameter is, so that a checkpoint has it once
#   and loads it under any other placement.
# - The owner of a matrix needs all of its momentum and gets none of another copy, so it is a rank of that replica.
# - A stack of experts that are whole on each rank is kept in chunks of experts by several ranks, as torch.chunk cuts;
#   one rank with the momentum of all experts would hold up the others, and have no room for it.


def check_state(options: MuonOptions) -> None:
    """Raise OptionError where the owner of a matrix does not do with the momentum of one copy."""
    if options.state == "replicated":
        return
    if not PATTERNS[options.exchange].one_replica:
        fault = f"exchange = {options.exchange!r} takes the momentum of every copy; choose 'all_to_all'"
    elif options.replicas != "split":
        fault = f"replicas = {options.replicas!r} lets every copy need its momentum; choose 'split'"
    else:
        return
    raise OptionError("state", f"= 'owner': {fault}, or state = 'replicated'")


def with_state_ranks(
    parameters: Sequence[Parameter], options: MuonOptions, work_of: WorkOf, kept: Mapping[str, Ranks]
) -> list[Parameter]:
    """The parameters with the ranks that keep their momentum, by FLOPs and bytes; `kept` are those that do already.

    Raises OptionError for options that leave no rank to do so.
    """
    check_state(options)
    if options.state == "replicated":
        return list(parameters)
    geometries = Geometries(parameters)
    shared = [
        number for number, each in enumerate(parameters) if not each.own and len(replica_ranks(geometries[number])) > 1
    ]
    flops = {number: _flops(number, geometries[number], work_of) for number in shared}
    sizes = {number: prod(parameters[number].layout.shape) for number in shared}
    chooser = _Chooser(geometries, sum(sizes.values()))
    found = list(parameters)
    # What is kept cannot move, and counts first.
    for number in sorted(shared, key=lambda n: (parameters[n].fqn not in kept, -flops[n], -sizes[n], n)):
        parameter = parameters[number]
        ranks = chooser.choose(parameter, geometries[number], flops[number], sizes[number], kept.get(parameter.fqn))
        found[number] = replace(parameter, state_ranks=ranks)
    return found


def _flops(number: int, geometry: Geometry, work_of: WorkOf) -> int:
    shapes = [geometry.shape(index) for index in range(len(geometry.stack.matrices))]
    each = {shape: work_of(number, *shape).flops for shape in set(shapes)}
    return sum(each[shape] for shape in shapes)


class _Chooser:
    """Gives the momentum of one parameter after the other to the copy with the least to do."""

    def __init__(self, geometries: Geometries, elements: int) -> None:
        ranks = {rank for geometry in geometries.shared for rank in geometry.layout.mesh.ranks}
        self._flops, self._elements = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        # FLOPs alone would give a rank without large matrices a great many small ones, which take more memory.
        self._most = BYTES_OVER_MEAN * elements / max(1, len(ranks))

    def choose(self, parameter: Parameter, geometry: Geometry, flops: int, size: int, kept: Ranks | None) -> Ranks:
        replicas, units = replica_ranks(geometry), units_of(parameter)
        count = min(units, len(replicas)) if is_whole(parameter) else 1
        shares = [stop - start for start, stop in (chunk(units, count, part) for part in range(count)) if stop > start]
        if kept is None:
            share = size * shares[0] // units
            chosen = heapq.nsmallest(len(shares), replicas, key=lambda ranks: self._load(ranks, share))
        else:
            chosen = [(rank,) for rank in kept] if is_whole(parameter) else [kept]
        for ranks, share in zip(chosen, shares, strict=True):
            for rank in ranks:
                self._flops[rank] += flops * share // (units * len(ranks))
                self._elements[rank] += size * share // (units * len(ranks))
        return tuple(rank for ranks in chosen for rank in ranks)

    def _load(self, ranks: Ranks, size: int) -> tuple[bool, int, int]:
        elements = sum(self._elements[rank] for rank in ranks)
        full = elements + size > self._most * len(ranks)
        return full, sum(self._flops[rank] for rank in ranks), elements


def replica_ranks(geometry: Geometry) -> list[Ranks]:
    """The ranks of each copy of a parameter, in the order of its mesh."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in geometry.layout.mesh.ranks:
        found.setdefault(geometry.replica[rank], []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def is_whole(parameter: Parameter) -> bool:
    """Whether every rank of its mesh has all of a parameter, by its placements."""
    return all(isinstance(placement, Replicate) for placement in parameter.layout.placements)


def units_of(parameter: Parameter) -> int:
    """Parts along dim 0 that can be kept apart: as many as it is long if no matrix is in two of them, else one."""
    height = _unit_rows(parameter)
    for matrix in parameter.stack.matrices:
        if matrix.rows[0].start // height != (matrix.rows[-1].stop - 1) // height:
            return 1
    return parameter.layout.shape[0]


def _unit_rows(parameter: Parameter) -> int:
    """Rows of the (rows, cols) view that one index of dim 0 has."""
    return prod(parameter.layout.shape[1 : parameter.stack.row_dims])


def able_owners(parameter: Parameter, index: int) -> Ranks:
    """The ranks that can own matrix number `index`, by where its momentum is; empty if that does not matter."""
    kept = parameter.state_ranks
    if len(kept) < 2 or not is_whole(parameter):
        return kept
    unit = parameter.stack.matrices[index].rows[0].start // _unit_rows(parameter)
    return (kept[unit // chunk(parameter.layout.shape[0], len(kept), 0).stop],)


def state_elements(plan: Plan) -> dict[int, dict[int, int]]:
    """For each rank the elements of momentum that it keeps of each parameter that it has, by number."""
    geometries = Geometries(plan.parameters)
    found: dict[int, dict[int, int]] = {}
    for number, parameter in enumerate(plan.parameters):
        for rank, shape in geometries[number].local_shape.items():
            found.setdefault(rank, {})[number] = _kept_elements(parameter, rank, prod(shape))
    return found


def _kept_elements(parameter: Parameter, rank: int, stored: int) -> int:
    """Elements of its momentum on a rank that stores so many of the parameter itself."""
    kept = parameter.state_ranks
    if not kept or not is_whole(parameter):
        return stored if not kept or rank in kept else 0
    if rank not in kept:
        return 0
    first = parameter.layout.shape[0]
    start, stop = chunk(first, len(kept), kept.index(rank))
    return stored * (stop - start) // first
