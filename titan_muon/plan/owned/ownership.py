"""Owners of the parameters of a group of ranks, and the load of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...options import Owner
from ..search.owners import Balancer, Task
from ..terms.layout import chunk


@dataclass(frozen=True)
class OwnedItem:
    """A parameter to be owned. A stack of `units` equal matrices along dim 0 may have several owners.

    With `replicas` = R > 1, R neighbouring ranks have the parameter, and the first, a multiple of R, is the owner.
    """

    fqn: str
    layer: str
    flops: int
    bytes: int
    units: int = 1
    owner: Owner = "balanced"
    replicas: int = 1


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
            for first, share in zip(owners, _shares(item, len(owners)), strict=True):
                for rank in range(first, first + item.replicas):
                    matrices[rank] += share if item.units > 1 else 1
                    held[rank] += item.bytes * share // item.units
                    flops[rank] += item.flops * share // item.units
        return tuple(OwnedTotals(*totals) for totals in zip(matrices, held, flops, strict=True))


def assign_owners(items: Sequence[OwnedItem], size: int) -> Ownership:
    """Assign longest first by FLOPs, within a limit of bytes: named owners, whole layers, then the rest.

    Deterministic. Raises ValueError for an owner outside the group.
    """
    pieces = [piece for index, item in enumerate(items) for piece in _pieces(index, item, size)]
    balancer = Balancer([piece.task for piece in pieces], range(size), {})
    owners: dict[tuple[int, int], int] = {}
    _give_named(items, pieces, size, balancer, owners)
    _give_balanced(items, [piece for piece in pieces if items[piece.item].owner == "balanced"], size, balancer, owners)
    counts = Counter(piece.item for piece in pieces)
    item_owners = (tuple(owners[index, number] for number in range(counts[index])) for index in range(len(items)))
    return Ownership(size, tuple(items), tuple(item_owners))


@dataclass(frozen=True)
class _Share:
    item: int
    number: int  # Position along dim 0.
    task: Task


def _shares(item: OwnedItem, owners: int) -> list[int]:
    chunks = (chunk(item.units, owners, number) for number in range(owners))
    return [stop - start for start, stop in chunks]


def _pieces(index: int, item: OwnedItem, size: int) -> Iterator[_Share]:
    # Chunks of 5 units over 4 ranks are 2, 2, 1, 0.
    most = min(item.units, size) if item.owner == "balanced" and item.replicas == 1 else 1
    shares = [share for share in _shares(item, most) if share > 0]
    for number, share in enumerate(shares):
        flops, held = item.flops * share // item.units, item.bytes * share // item.units
        yield _Share(index, number, Task(index, 0, flops, held, item.layer))


def _give_named(
    items: Sequence[OwnedItem],
    pieces: Sequence[_Share],
    size: int,
    balancer: Balancer,
    owners: dict[tuple[int, int], int],
) -> None:
    """Assign items with a named rank, then each whole layer to the least loaded rank."""
    layers: dict[str, list[_Share]] = {}
    for piece in pieces:
        item = items[piece.item]
        if isinstance(item.owner, int):
            if not 0 <= item.owner < size:
                wrong = f"cannot have owner = {item.owner}; 0 to {size - 1} can own it"
                raise ValueError(f"placement.rule: {item.fqn} {wrong}")
            owners[piece.item, piece.number] = _put(piece, items, item.owner, balancer)
        elif item.owner == "layer":
            layers.setdefault(item.layer, []).append(piece)
    for _, mine in sorted(layers.items(), key=lambda entry: (-sum(p.task.flops for p in entry[1]), entry[0])):
        rank = balancer.least()
        for piece in mine:
            owners[piece.item, piece.number] = _put(piece, items, rank, balancer)


def _put(piece: _Share, items: Sequence[OwnedItem], rank: int, balancer: Balancer) -> int:
    """The first rank of the replica block that receives the piece."""
    replicas = items[piece.item].replicas
    first = rank - rank % replicas
    for member in range(first, first + replicas):
        balancer.add_work(piece.task, member)
    return first


def _give_balanced(
    items: Sequence[OwnedItem],
    pieces: Sequence[_Share],
    size: int,
    balancer: Balancer,
    owners: dict[tuple[int, int], int],
) -> None:
    heap = balancer.heap(range(size))
    left = Counter(piece.task.layer for piece in pieces)
    in_layers: dict[str, set[int]] = {layer: set() for layer in left}
    in_stacks: dict[int, set[int]] = {}
    # By name, because the owners must not depend on the order of the list.
    for piece in sorted(pieces, key=lambda p: (-p.task.flops, -p.task.bytes, items[p.item].fqn, p.number)):
        in_layer, in_stack = in_layers[piece.task.layer], in_stacks.setdefault(piece.item, set())
        left[piece.task.layer] -= 1
        # Not all pieces of a layer to one rank: before the layer's forward, all ranks would wait for a single link.
        single_owner = left[piece.task.layer] == 0 and len(in_layer) == 1
        # By bytes: by FLOPs all would go to the least loaded rank.
        if piece.task.flops == 0:
            rank = _put(piece, items, balancer.lightest(), balancer)
        elif items[piece.item].replicas > 1:
            rank = _put(piece, items, balancer.least(), balancer)
        else:
            rank = balancer.assign(piece.task, heap, in_layer if single_owner else in_stack)
        owners[piece.item, piece.number] = rank
        in_layer.add(rank)
        in_stack.add(rank)


def load_lines(loads: Mapping[int, OwnedTotals]) -> Iterator[str]:
    """A table; neighbours with equal loads share a row."""
    yield f"{'owner':>11}  {'matrices':>8}  {'MiB':>10}  {'GFLOP':>10}"
    for load, same in groupby(loads, key=lambda rank: loads[rank]):
        ranks = list(same)
        label = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        yield f"{label:>11}  {load.matrices:>8,}  {load.bytes / 2**20:>10,.1f}  {load.flops / 1e9:>10,.1f}"
