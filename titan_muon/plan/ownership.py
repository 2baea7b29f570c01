"""Where whole matrices rest: which rank of a group owns which parameter, and what that costs each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .owners import BYTES_OVER_MEAN


@dataclass(frozen=True)
class Item:
    """A parameter that wants an owner: its layer, what orthogonalizing it costs, and the bytes of its elements."""

    fqn: str
    layer: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class Load:
    """What one rank of the group owns."""

    matrices: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class Ownership:
    """The owner of each item, a rank of a group of `size` ranks; `items` and `owners` are in the same order."""

    size: int
    items: tuple[Item, ...]
    owners: tuple[int, ...]

    def loads(self) -> tuple[Load, ...]:
        """What each rank of the group owns; zeros for a rank that owns nothing."""
        matrices, held, flops = ([0] * self.size for _ in range(3))
        for item, owner in zip(self.items, self.owners, strict=True):
            matrices[owner] += 1
            held[owner] += item.bytes
            flops[owner] += item.flops
        return tuple(Load(*load) for load in zip(matrices, held, flops, strict=True))


def assign_owners(items: Sequence[Item], size: int) -> Ownership:
    """Longest processing time first over all items, by FLOPs, within a limit of bytes. Deterministic.

    A rank takes at most 1.3 x the mean of bytes, or the largest item, as long as another rank has room. The last item
    of a layer does not go to the rank that owns all others of it, so that no rank sends a whole layer.
    """
    load, held = [0] * size, [0] * size
    limit = max([BYTES_OVER_MEAN * sum(item.bytes for item in items) / size, *(item.bytes for item in items)])
    left = Counter(item.layer for item in items)
    in_layer: dict[str, set[int]] = {item.layer: set() for item in items}
    owner_of: dict[str, int] = {}
    for item in sorted(items, key=lambda i: (-i.flops, -i.bytes, i.fqn)):
        alone = in_layer[item.layer] if left[item.layer] == 1 and len(in_layer[item.layer]) == 1 else set()
        owner = min(
            range(size),
            key=lambda rank: (rank in alone, held[rank] + item.bytes > limit, load[rank], held[rank], rank),
        )
        owner_of[item.fqn] = owner
        load[owner] += item.flops
        held[owner] += item.bytes
        left[item.layer] -= 1
        in_layer[item.layer].add(owner)
    return Ownership(size, tuple(items), tuple(owner_of[item.fqn] for item in items))


def load_lines(loads: Mapping[int, Load]) -> Iterator[str]:
    """A table of what each rank owns; neighbours that own equally much share a line."""
    runs: list[tuple[int, int, Load]] = []
    for rank, load in loads.items():
        if runs and runs[-1][2] == load:
            runs[-1] = (runs[-1][0], rank, load)
        else:
            runs.append((rank, rank, load))
    yield f"{'owner':>11}  {'matrices':>8}  {'MiB':>10}  {'GFLOP':>10}"
    for first, last, load in runs:
        ranks = str(first) if first == last else f"{first}-{last}"
        yield f"{ranks:>11}  {load.matrices:>8,}  {load.bytes / 2**20:>10,.1f}  {load.flops / 1e9:>10,.1f}"
