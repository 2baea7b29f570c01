"""With `state = "owner"`: which ranks keep the momentum of a matrix, and which of them may orthogonalize it."""

# [Note: state ranks]
# - A single replica (a rank, or under HSDP all ranks that shard the parameter) keeps the momentum, placed like the
#   parameter, so that a checkpoint contains the momentum once and loads under any placement.
# - The owner of a matrix is a rank of this replica, because the owner needs all of the matrix's momentum.
# - Several ranks keep the momentum of a stack of experts whole on each rank, in chunks of experts like torch.chunk, to
#   balance memory.

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ...options import MuonOptions, OptionError
from ..exchange.patterns import PATTERNS
from ..terms.layout import Geometries, Geometry, chunk
from ..terms.pieces import Ranks
from ..terms.types import Parameter, Plan, Replicate
from ..terms.work import WorkOf

BYTES_OVER_MEAN = 1.3
"""Most bytes of a rank, relative to the mean."""


def check_state(options: MuonOptions) -> None:
    """Raise OptionError if the options need the momentum of every replica."""
    if options.state == "replicated":
        return
    if not PATTERNS[options.exchange].one_replica:
        fault = f"exchange = {options.exchange!r} needs the momentum of every replica; choose 'all_to_all'"
    elif options.replicas != "split":
        fault = f"replicas = {options.replicas!r} needs the momentum of every replica; choose 'split'"
    else:
        return
    raise OptionError("state", f"= 'owner': {fault}, or state = 'replicated'")


def with_state_ranks(
    parameters: Sequence[Parameter], options: MuonOptions, work_of: WorkOf, kept: Mapping[str, Ranks]
) -> list[Parameter]:
    """Parameters with state ranks, balanced by FLOPs and elements; `kept`: present ranks by name, which cannot move.

    Raises OptionError like `check_state`.
    """
    check_state(options)
    if options.state == "replicated":
        return list(parameters)
    geometries = Geometries(parameters)
    shared = [n for n, p in enumerate(parameters) if not p.separate and len(_replicas(geometries[n])) > 1]
    sizes = {number: prod(parameters[number].layout.shape) for number in shared}
    flops = dict[int, int]()
    for number in shared:
        shapes = Counter(map(geometries[number].shape, range(len(parameters[number].stack.matrices))))
        flops[number] = sum(count * work_of(number, *shape).flops for shape, count in shapes.items())
    chooser = _Chooser(geometries, sum(sizes.values()))
    result = list(parameters)
    for number in sorted(shared, key=lambda n: (parameters[n].fqn not in kept, -flops[n], -sizes[n], n)):
        parameter = parameters[number]
        ranks = chooser.choose(parameter, geometries[number], flops[number], sizes[number], kept.get(parameter.fqn))
        result[number] = replace(parameter, state_ranks=ranks)
    return result


class _Chooser:
    """Assigns the momentum of each parameter to the replica with the least load."""

    def __init__(self, geometries: Geometries, elements: int) -> None:
        ranks = {rank for geometry in geometries.shared for rank in geometry.layout.mesh.ranks}
        self._flops, self._elements = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        self._most = BYTES_OVER_MEAN * elements / max(1, len(ranks))

    def choose(self, parameter: Parameter, geometry: Geometry, flops: int, size: int, kept: Ranks | None) -> Ranks:
        replicas, units = _replicas(geometry), _units_of(parameter)
        count = min(units, len(replicas)) if _is_whole(parameter) else 1
        shares = [stop - start for start, stop in (chunk(units, count, n) for n in range(count)) if stop > start]
        if kept is None:
            share = size * shares[0] // units
            chosen = heapq.nsmallest(len(shares), replicas, key=lambda ranks: self._load(ranks, share))
        else:
            chosen = [(rank,) for rank in kept] if _is_whole(parameter) else [kept]
        for ranks, share in zip(chosen, shares, strict=True):
            for rank in ranks:
                self._flops[rank] += flops * share // (units * len(ranks))
                self._elements[rank] += size * share // (units * len(ranks))
        return tuple(rank for ranks in chosen for rank in ranks)

    def _load(self, ranks: Ranks, size: int) -> tuple[bool, int, int]:
        elements = sum(self._elements[rank] for rank in ranks)
        full = elements + size > self._most * len(ranks)
        return full, sum(self._flops[rank] for rank in ranks), elements


def _replicas(geometry: Geometry) -> tuple[Ranks, ...]:
    return geometry.by_replica(geometry.layout.mesh.ranks)


def _is_whole(parameter: Parameter) -> bool:
    """Whether every rank of the mesh has all of the parameter."""
    return all(isinstance(placement, Replicate) for placement in parameter.layout.placements)


def _units_of(parameter: Parameter) -> int:
    """Number of separable parts along dim 0."""
    shape = parameter.layout.shape
    return shape[0] if parameter.stack.is_separable(shape) else 1


def momentum_ranks(parameter: Parameter, index: int) -> Ranks:
    """The possible owners of matrix number `index` by its momentum; empty if every holder keeps momentum."""
    kept = parameter.state_ranks
    if len(kept) < 2 or not _is_whole(parameter):
        return kept
    shape, stack = parameter.layout.shape, parameter.stack
    unit = stack.matrices[index].rows[0].start // prod(shape[1 : stack.row_dims])
    return (kept[unit // chunk(shape[0], len(kept), 0).stop],)


def state_elements(plan: Plan) -> dict[int, dict[int, int]]:
    """Elements of momentum by rank and parameter."""
    geometries = Geometries(plan.parameters)
    elements: dict[int, dict[int, int]] = {}
    for number, parameter in enumerate(plan.parameters):
        for rank, shape in geometries[number].local_shape.items():
            elements.setdefault(rank, {})[number] = _kept_elements(parameter, rank, prod(shape))
    return elements


def _kept_elements(parameter: Parameter, rank: int, stored: int) -> int:
    kept = parameter.state_ranks
    if not kept or not _is_whole(parameter):
        return stored if not kept or rank in kept else 0
    if rank not in kept:
        return 0
    first = parameter.layout.shape[0]
    start, stop = chunk(first, len(kept), kept.index(rank))
    return stored * (stop - start) // first
