"""An exchange in two hops: over the network into the owner's node, then inside the node to the owner, and back."""

# [Note: rail first]
# - The ranks of one local index on all nodes are a rail. A rank sends over its rail what belongs to owners of a node:
#   to the node's rank of its own local index, which passes it on inside the node. Results return the same way.
# - So a matrix enters its owner's node by all network links of the node. An all-to-all squeezes it through the owner's
#   link, and so does a first hop inside the node, which NCCL takes by itself (PXN).
# - A rank has at most one peer on each other node in a hop, and the other ranks of its node in the other hop.
# - The last node may lack ranks if it owns nothing: its ranks send over the rails that they are on.

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from ..layout.intervals import Pieces, Ranks
from ..layout.types import Bucket
from .all_to_all import AllToAll, BucketTotals, KindCounts, LinkTraffic, counts_by_rank, owners_by_kind
from .phases import BucketProgram, Hop


def grid_of(group: Ranks, ranks_per_node: int) -> tuple[Ranks, ...]:
    """The ranks of each node: equal local indices, several of them, on several nodes, of which the last may lack some.

    Empty for other groups.
    """
    by_node: dict[int, list[int]] = {}
    for rank in group:
        by_node.setdefault(rank // ranks_per_node, []).append(rank)
    *first, last = ([rank % ranks_per_node for rank in ranks] for ranks in by_node.values())
    regular = bool(first) and len(first[0]) > 1 and all(indices == first[0] for indices in first)
    fits = regular and (last == first[0] or (len(first) > 1 and set(first[0]) > set(last)))
    return tuple(map(tuple, by_node.values())) if fits else ()


def owning_ranks(group: Ranks, ranks_per_node: int) -> Ranks:
    """The ranks of the group that may own: those of nodes with all local indices; all without a grid."""
    nodes = grid_of(group, ranks_per_node)
    return tuple(rank for ranks in nodes if len(ranks) == len(nodes[0]) for rank in ranks) if nodes else group


class TwoHops(AllToAll):
    """Over the rail, then inside the node, [Note: rail first]. A bucket with a `fallback` goes by all_to_all."""

    name = "two_hops"
    knows_nodes = True

    def fallback(self, kinds: Iterable[int], group: Ranks, pieces: Pieces) -> str:
        if any(len(pieces.replicas(kind, group)) > 1 for kind in kinds):
            return "replicas"
        if grid_of(group, pieces.ranks_per_node):
            return ""
        ranks_on = Counter(map(pieces.node, group))
        if len(ranks_on) == 1:
            return "ranks of a single node"
        return "one rank a node" if max(ranks_on.values()) == 1 else "different ranks from node to node"

    def _grid(self, bucket: Bucket, pieces: Pieces) -> tuple[Ranks, ...]:
        """The ranks of each node; empty for a bucket that goes by all_to_all."""
        kinds = dict.fromkeys(pieces.kinds[matrix] for matrix in bucket.matrices)
        may_own = set(bucket.owners).issubset(owning_ranks(bucket.group, pieces.ranks_per_node))
        refused = not may_own or self.fallback(kinds, bucket.group, pieces)
        return () if refused else grid_of(bucket.group, pieces.ranks_per_node)

    def groups(self, bucket: Bucket, pieces: Pieces) -> Iterable[Ranks]:
        nodes = self._grid(bucket, pieces)
        return [*nodes, *_rails(nodes, pieces).values()] if nodes else super().groups(bucket, pieces)

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        run, nodes = super().program(bucket, rank, pieces), self._grid(bucket, pieces)
        if not nodes:
            return run
        rails, node = _rails(nodes, pieces), next(ranks for ranks in nodes if rank in ranks)
        rail = rails[rank % pieces.ranks_per_node]
        owned = counts_by_rank(owners_by_kind(bucket, pieces))

        def size(holder: int, owner: int) -> int:
            counts = owned.get(owner, ()) if holder != owner else ()
            return sum(count * pieces.holders(kind, bucket.group).get(holder, 0) for kind, count in counts)

        # What this rank passes on arrives by node and leaves by owner.
        passed = {(holder, owner): size(holder, owner) for holder in rail for owner in node}
        starts = dict(zip(passed, accumulate(passed.values(), initial=0), strict=False))
        leaving = [(starts[holder, owner], passed[holder, owner]) for owner in node for holder in rail]
        peers = [peer for owner in node for peer in rails[owner % pieces.ranks_per_node]]
        to_node = Counter[int]()
        for peer, elements in zip(bucket.group, run.gathering.home_splits, strict=True):
            to_node[pieces.node(peer)] += elements
        hop = Hop(
            rail=rail,
            node=node,
            home_splits=tuple(to_node[pieces.node(peer)] for peer in rail),
            arriving_splits=tuple(sum(passed[holder, owner] for owner in node) for holder in rail),
            departing_splits=tuple(sum(passed[holder, owner] for holder in rail) for owner in node),
            owned_splits=tuple(
                sum(size(holder, rank) for holder in rails[owner % pieces.ranks_per_node]) for owner in node
            ),
            copies=_joined(leaving),
        )
        # An owner receives what came over each rail, from node to node.
        phase = replace(run.gathering.in_order(peers), hop=hop)
        return replace(run, gathering=phase, returning=phase)

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        nodes = self._grid(bucket, pieces)
        if not nodes:
            return super().totals(bucket, pieces)
        counts = _Counts(bucket, nodes, pieces)
        known: dict[tuple[tuple[int, KindCounts], ...], list[BucketTotals]] = {}
        result: dict[int, BucketTotals] = {}
        for ranks, holdings in counts.holdings:
            members = tuple((held, counts.owned.get(rank, ())) for rank, held in zip(ranks, holdings, strict=True))
            if members not in known:
                known[members] = counts.of_node(ranks)
            result.update(zip(ranks, known[members], strict=True))
        return result


def _rails(nodes: Sequence[Ranks], pieces: Pieces) -> dict[int, Ranks]:
    """The ranks of each local index."""
    rails: dict[int, list[int]] = {rank % pieces.ranks_per_node: [] for rank in nodes[0]}
    for ranks in nodes:
        for rank in ranks:
            rails[rank % pieces.ranks_per_node].append(rank)
    return {index: tuple(ranks) for index, ranks in rails.items()}


def _joined(parts: Iterable[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """(start as it arrived, start as it leaves, elements) of (start, elements), in the order of leaving."""
    copies: list[tuple[int, int, int]] = []
    leaves = 0
    for start, elements in parts:
        if copies and sum(copies[-1][::2]) == start:
            first, at, before = copies.pop()
            copies.append((first, at, before + elements))
        elif elements:
            copies.append((start, leaves, elements))
        leaves += elements
    return tuple(copies)


class _Kind:
    """What a bucket's ranks have of the matrices of a kind: elements by rank and by local index, matrices by owner."""

    def __init__(self, kind: int, owners: dict[int, int], bucket: Bucket, pieces: Pieces) -> None:
        self.owners, self.stored = owners, pieces.holders(kind, bucket.group)
        self.count, self.whole = sum(owners.values()), sum(self.stored.values())
        self.taken, self.rails = Counter[int](), Counter[int]()
        for owner, count in owners.items():
            self.taken[pieces.node(owner)] += count
        for rank, elements in self.stored.items():
            self.rails[rank % pieces.ranks_per_node] += elements


class _Counts:
    """The elements that each rank of a bucket exchanges in each hop."""

    def __init__(self, bucket: Bucket, nodes: Sequence[Ranks], pieces: Pieces) -> None:
        owners, self._pieces = owners_by_kind(bucket, pieces), pieces
        self.owned = counts_by_rank(owners)
        self.holdings = pieces.nodes(tuple(sorted(owners)), bucket.group)
        self._kinds = [_Kind(kind, owners[kind], bucket, pieces) for kind in sorted(owners)]
        self._nodes, self._width = len(nodes), len(nodes[0])
        # Nodes and ranks by the kinds that they own or hold, because a message has elements of any kind.
        examples = {number: rank for part in self.holdings for rank, number in zip(*part, strict=True)}
        on_rail = Counter((r % pieces.ranks_per_node, n) for part in self.holdings for r, n in zip(*part, strict=True))
        self._holding = Counter[tuple[int, frozenset[int]]]()
        for (index, number), count in on_rail.items():
            self._holding[index, self._held(examples[number])] += count
        owning = dict.fromkeys(pieces.node(owner) for of_kind in owners.values() for owner in of_kind)
        self._taking = Counter(map(self._taken, owning))

    def _held(self, rank: int) -> frozenset[int]:
        return frozenset(number for number, kind in enumerate(self._kinds) if rank in kind.stored)

    def _taken(self, node: int) -> frozenset[int]:
        return frozenset(number for number, kind in enumerate(self._kinds) if kind.taken[node])

    def of_node(self, ranks: Collection[int]) -> list[BucketTotals]:
        firsts, seconds = [self._over_rail(rank) for rank in ranks], [self._in_node(rank, ranks) for rank in ranks]
        # The hop inside the node waits for the node's slowest rail.
        slowest = LinkTraffic(*map(max, zip(*firsts, strict=True)))
        result = []
        for rank, first, second in zip(ranks, firsts, seconds, strict=True):
            assert first.far_peers < self._nodes, f"rank {rank} has {first.far_peers} peers on a rail"
            assert second.near_peers < self._width, f"rank {rank} has {second.near_peers} peers in its node"
            home = passed = inbox = 0
            for kind in self._kinds:
                mine, own = kind.stored.get(rank, 0), kind.owners.get(rank, 0)
                home += mine * kind.count
                inbox += own * (kind.whole - mine)
                passed += kind.taken[self._pieces.node(rank)] * kind.rails[self._index(rank)] - own * mine
            moved = sum((*first[:4], *second[:4]))
            ways = slowest, second, second.reversed(), slowest.reversed()
            buffers = home, inbox, 0, 0, passed, passed
            travels = any(kind.whole > kind.stored.get(o, 0) for kind in self._kinds for o in kind.owners)
            owned = self.owned.get(rank, ())
            result.append(BucketTotals(owned, home, moved, moved, buffers, ways, 4 * travels, hops=2))
        return result

    def _index(self, rank: int) -> int:
        return rank % self._pieces.ranks_per_node

    def _over_rail(self, rank: int) -> LinkTraffic:
        node, index = self._pieces.node(rank), self._index(rank)
        sent = sum(kind.stored.get(rank, 0) * (kind.count - kind.taken[node]) for kind in self._kinds)
        received = sum(kind.taken[node] * (kind.rails[index] - kind.stored.get(rank, 0)) for kind in self._kinds)
        held, taken = self._held(rank), self._taken(node)
        to = sum(count for kinds, count in self._taking.items() if kinds & held) - bool(taken & held)
        rail = (count for (other, kinds), count in self._holding.items() if other == index and kinds & taken)
        return LinkTraffic(0, sent, 0, received, 0, max(to, sum(rail) - bool(held & taken)))

    def _in_node(self, rank: int, ranks: Collection[int]) -> LinkTraffic:
        def passes(source: int, owner: int) -> int:
            rail = self._index(source)
            # The owner's own pieces stay.
            return sum(
                kind.owners.get(owner, 0) * (kind.rails[rail] - (source == owner) * kind.stored.get(owner, 0))
                for kind in self._kinds
            )

        sent, received = (
            [passes(*pair) for pair in pairs if pair[0] != pair[1]]
            for pairs in ([(rank, owner) for owner in ranks], [(source, rank) for source in ranks])
        )
        peers = max(sum(map(bool, sent)), sum(map(bool, received)))
        return LinkTraffic(sum(sent), 0, sum(received), 0, peers)
