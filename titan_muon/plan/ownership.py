"""Where owned matrices are stored: which rank of a group owns which parameter, and what that costs each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from .owners import Balancer, Task


@dataclass(frozen=True)
class OwnedItem:
    """A parameter that needs an owner: its layer, FLOPs of orthogonalizing it, and bytes of its elements."""

    fqn: str
    layer: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class OwnedTotals:
    """What one rank of the group owns."""

    matrices: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class Ownership:
    """The owner of each item, a rank of a group of `size` ranks; `items` and `owners` are in the same order."""

    size: int
    items: tuple[OwnedItem, ...]
    owners: tuple[int, ...]

    def loads(self) -> tuple[OwnedTotals, ...]:
        """What each rank of the group owns; zeros for a rank that owns nothing."""
        owned: list[list[OwnedItem]] = [[] for _ in range(self.size)]
        for item, owner in zip(self.items, self.owners, strict=True):
            owned[owner].append(item)
        return tuple(OwnedTotals(len(m), sum(i.bytes for i in m), sum(i.flops for i in m)) for m in owned)


def assign_owners(items: Sequence[OwnedItem], size: int) -> Ownership:
    """Longest processing time first over all items, by FLOPs, within a limit of bytes. Deterministic."""
    tasks = [Task(index, 0, item.flops, item.bytes, item.layer) for index, item in enumerate(items)]
    balancer = Balancer(tasks, range(size), {})
    heap, owners = balancer.heap(range(size)), [0] * len(items)
    left = Counter(item.layer for item in items)
    owners_of: dict[str, set[int]] = {layer: set() for layer in left}
    # By name, not by place in the list: every rank must find the same owners, however it came by its list.
    for task in sorted(tasks, key=lambda t: (-t.flops, -t.bytes, items[t.matrix].fqn)):
        in_layer = owners_of[task.layer]
        left[task.layer] -= 1
        # The last of a layer never goes to the rank that owns all others of it: that rank alone would send the whole
        # layer before its forward, and all others would wait for one link.
        alone = left[task.layer] == 0 and len(in_layer) == 1
        owners[task.matrix] = balancer.give(task, heap, in_layer if alone else ())
        in_layer.add(owners[task.matrix])
    return Ownership(size, tuple(items), tuple(owners))


def load_lines(loads: Mapping[int, OwnedTotals]) -> Iterator[str]:
    """A table of what each rank owns; neighbours that own equally much share a line."""
    yield f"{'owner':>11}  {'matrices':>8}  {'MiB':>10}  {'GFLOP':>10}"
    for load, same in groupby(loads, key=lambda rank: loads[rank]):
        ranks = list(same)
        label = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        yield f"{label:>11}  {load.matrices:>8,}  {load.bytes / 2**20:>10,.1f}  {load.flops / 1e9:>10,.1f}"
