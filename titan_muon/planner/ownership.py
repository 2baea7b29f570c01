"""Owners of the parameters of a group of ranks, and the load of each rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal

from ..engine.layout.intervals import chunk
from ..engine.planning import Task
from ..ranges import TEXT, Constraint
from .owners import Balancer

Owner = int | Literal["balanced", "layer"]
"""Holder of owned parameters, see `PlacementRule.owner`."""
OWNER = Constraint(
    '"balanced", "layer", or 0 or more',
    lambda value: value in ("balanced", "layer") or (isinstance(value, int) and value >= 0),
)


@dataclass(frozen=True, kw_only=True)
class PlacementRule:
    """One `[[placement.rule]]`: the placement of matching parameters between steps."""

    match: Annotated[str, TEXT]
    """Glob on fully qualified names; `*` also crosses dots."""

    placement: Literal["owned", "shard0"]
    """`owned`: whole on one rank; a stack of experts as whole experts on several ranks. `shard0`: sharded by FSDP2."""

    owner: Annotated[Owner, OWNER] = "balanced"
    """With `owned`: `balanced` over the ranks, one rank for each `layer`, or the index of a rank."""


@dataclass(frozen=True)
class OwnedItem:
    """A parameter to be owned. A stack of `units` equal matrices along dim 0 may have several owners."""

    fqn: str
    layer: str
    flops: int
    bytes: int
    units: int = 1
    owner: Owner = "balanced"


@dataclass(frozen=True)
class OwnedTotals:
    """Load of a rank."""

    matrices: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class Ownership:
    """The owners of each item, as ranks below `size`, which divide its units in order like torch.chunk."""

    size: int
    items: tuple[OwnedItem, ...]
    owners: tuple[tuple[int, ...], ...]

    def loads(self) -> tuple[OwnedTotals, ...]:
        matrices, held, flops = ([0] * self.size for _ in range(3))
        for item, owners in zip(self.items, self.owners, strict=True):
            for rank, share in zip(owners, _shares(item, len(owners)), strict=True):
                matrices[rank] += share if item.units > 1 else 1
                held[rank] += item.bytes * share // item.units
                flops[rank] += item.flops * share // item.units
        return tuple(OwnedTotals(*totals) for totals in zip(matrices, held, flops, strict=True))


def assign_owners(items: Sequence[OwnedItem], size: int) -> Ownership:
    """Assign longest first by FLOPs, within a limit of bytes: named owners, whole layers, then the rest.

    Deterministic. Raises ValueError for an owner outside the group.
    """
    # A task for each share of an item: `matrix` is the item's index, `group` the share's position along dim 0.
    tasks: list[Task] = []
    for index, item in enumerate(items):
        most = min(item.units, size) if item.owner == "balanced" else 1
        # Chunks of 5 units over 4 ranks are 2, 2, 1, 0.
        for number, units in enumerate(filter(None, _shares(item, most))):
            flops, held = item.flops * units // item.units, item.bytes * units // item.units
            tasks.append(Task(index, number, flops, held, item.layer))
    balancer = Balancer(tasks, range(size), {})
    owners: list[tuple[int, ...]] = [()] * len(items)
    for task, rank in sorted((*_named(tasks, items, balancer, size), *_balanced(tasks, items, balancer, size))):
        owners[task.matrix] += (rank,)
    return Ownership(size, tuple(items), tuple(owners))


def _shares(item: OwnedItem, owners: int) -> list[int]:
    chunks = (chunk(item.units, owners, number) for number in range(owners))
    return [stop - start for start, stop in chunks]


def _named(
    tasks: Sequence[Task], items: Sequence[OwnedItem], balancer: Balancer, size: int
) -> Iterator[tuple[Task, int]]:
    """Owners of items with a named rank, then of each whole layer: the least loaded rank."""
    layers: dict[str, list[Task]] = {}
    for task in tasks:
        item = items[task.matrix]
        if isinstance(item.owner, int):
            if not 0 <= item.owner < size:
                wrong = f"cannot have owner = {item.owner}; 0 to {size - 1} can own it"
                raise ValueError(f"placement.rule: {item.fqn} {wrong}")
            yield task, balancer.add_work(task, item.owner)
        elif item.owner == "layer":
            layers.setdefault(item.layer, []).append(task)
    for _, mine in sorted(layers.items(), key=lambda entry: (-sum(task.flops for task in entry[1]), entry[0])):
        rank = balancer.least()
        yield from ((task, balancer.add_work(task, rank)) for task in mine)


def _balanced(
    tasks: Sequence[Task], items: Sequence[OwnedItem], balancer: Balancer, size: int
) -> Iterator[tuple[Task, int]]:
    tasks = [task for task in tasks if items[task.matrix].owner == "balanced"]
    heap, left = balancer.heap(range(size)), Counter(task.layer for task in tasks)
    in_layers, in_stacks = defaultdict[str, set[int]](set), defaultdict[int, set[int]](set)
    # By name, because the owners must not depend on the order of the list.
    for task in sorted(tasks, key=lambda task: (-task.flops, -task.bytes, items[task.matrix].fqn, task.group)):
        in_layer, in_stack = in_layers[task.layer], in_stacks[task.matrix]
        left[task.layer] -= 1
        # Not all shares of a layer to one rank: before the layer's forward, all ranks would wait for a single link.
        single_owner = left[task.layer] == 0 and len(in_layer) == 1
        # By bytes: by FLOPs all would go to the least loaded rank.
        if task.flops == 0:
            rank = balancer.add_work(task, balancer.lightest())
        else:
            rank = balancer.assign(task, heap, in_layer if single_owner else in_stack)
        in_layer.add(rank)
        in_stack.add(rank)
        yield task, rank


def load_lines(loads: Mapping[int, OwnedTotals]) -> Iterator[str]:
    """A table; neighbours with equal loads share a row."""
    yield f"{'owner':>11}  {'matrices':>8}  {'MiB':>10}  {'GFLOP':>10}"
    for load, same in groupby(loads, key=lambda rank: loads[rank]):
        ranks = list(same)
        label = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        yield f"{label:>11}  {load.matrices:>8,}  {load.bytes / 2**20:>10,.1f}  {load.flops / 1e9:>10,.1f}"
