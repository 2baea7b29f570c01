"""An exchange in two hops: over the network into the owner's node, then inside the node to the owner, and back."""

# [Note: rail first]
# - The ranks of a local index on all nodes are a rail. For the owners of a node, a rank sends to the node's rank on the
#   same rail, which passes the elements on inside the node. Results return the same way.
# - So a matrix enters the owner's node by all network links of the node. An all-to-all squeezes the matrix through the
#   owner's link, and so does a first hop inside the node, as NCCL takes it (PXN).
# - A rank has at most one peer on each other node in a hop, and the other ranks of its node in the other hop.
# - The last node may lack ranks if it owns nothing: the ranks there send over their rails.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..layout.intervals import Amounts, Pieces, Ranks
from ..layout.types import Bucket
from .all_to_all import (
    AllToAll,
    BucketTotals,
    Flows,
    LinkTraffic,
    Members,
    counts_by_rank,
    members_of_nodes,
    owners_by_kind,
)
from .phases import BucketProgram, Hop


def grid_of(group: Ranks, ranks_per_node: int) -> tuple[Ranks, ...]:
    """The ranks of each node: equal local indices, several of them, on several nodes, of which the last may lack some.

    Empty for other groups.
    """
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    *first, last = ([rank % ranks_per_node for rank in ranks] for ranks in nodes.values())
    regular = bool(first) and len(first[0]) > 1 and all(indices == first[0] for indices in first)
    fits = regular and (last == first[0] or (len(first) > 1 and set(first[0]) > set(last)))
    return tuple(map(tuple, nodes.values())) if fits else ()


def owning_ranks(group: Ranks, ranks_per_node: int) -> Ranks:
    """The ranks of the group that may own: those of nodes with all local indices; all without a grid."""
    nodes = grid_of(group, ranks_per_node)
    return tuple(rank for ranks in nodes if len(ranks) == len(nodes[0]) for rank in ranks) if nodes else group


class TwoHops(AllToAll):
    """Over the rail, then inside the node, [Note: rail first]. For buckets without a `fallback`."""

    name = "two_hops"
    knows_nodes = True

    def fallback(self, kind: int, group: Ranks, pieces: Pieces) -> str:
        if len(pieces.replicas(kind, group)) > 1:
            return "replicas"
        if grid_of(group, pieces.ranks_per_node):
            return ""
        ranks_on = Counter(map(pieces.node, group))
        if len(ranks_on) == 1:
            return "ranks of a single node"
        return "one rank a node" if max(ranks_on.values()) == 1 else "different ranks from node to node"

    def groups(self, bucket: Bucket, pieces: Pieces) -> tuple[Iterable[Ranks], Iterable[Ranks]]:
        nodes = grid_of(bucket.group, pieces.ranks_per_node)
        return [*nodes, *(_rail(bucket.group, rank, pieces) for rank in nodes[0])], ()

    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        run, width = super().program(bucket, rank, pieces), pieces.ranks_per_node
        rail = _rail(bucket.group, rank, pieces)
        node = tuple(peer for peer in bucket.group if peer // width == rank // width)
        owned = counts_by_rank(owners_by_kind(bucket, pieces))

        def passed(holder: int, owner: int) -> int:
            counts = owned.get(owner, ()) if holder != owner else ()
            return sum(count * pieces.holders(kind, bucket.group).get(holder, 0) for kind, count in counts)

        phase, to_node, by_rail = run.gathering, Counter[int](), Counter[int]()
        for peer, sent, received in zip(bucket.group, phase.home_splits, phase.owned_splits, strict=True):
            to_node[peer // width] += sent
            by_rail[peer % width] += received
        phase = replace(
            phase,
            home_splits=tuple(to_node[peer // width] for peer in rail),
            owned_splits=tuple(by_rail[peer % width] for peer in node),
            hop=Hop(rail, node, tuple(tuple(passed(holder, owner) for owner in node) for holder in rail)),
        )
        return replace(run, gathering=phase, returning=phase)

    def arrival(self, group: Ranks, pieces: Pieces) -> Sequence[int]:
        # Over one rail after the other, from node to node.
        return sorted(group, key=lambda peer: (peer % pieces.ranks_per_node, peer))

    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        owners, width = owners_by_kind(bucket, pieces), pieces.ranks_per_node
        kinds = [_Kind(pieces.holders(kind, bucket.group), counts, width) for kind, counts in owners.items()]
        over_rail = [Flows([(kind.on_rail[index], kind.taken) for kind in kinds]) for index in range(width)]
        known, result = dict[Members, list[BucketTotals]](), dict[int, BucketTotals]()
        nodes = members_of_nodes(bucket, counts_by_rank(owners), pieces)
        for ranks, members in nodes:
            if members not in known:
                owners_in = [{r % width: kind.owners[r] for r in ranks if r in kind.owners} for kind in kinds]
                in_node = Flows([(k.rails, k.rails.like(owned)) for k, owned in zip(kinds, owners_in, strict=True)])
                firsts = [over_rail[rank % width].of_rank(rank // width) for rank in ranks]
                # The hop inside the node waits for the node's slowest rail.
                slowest = LinkTraffic(*map(max, zip(*firsts, strict=True)))
                assert slowest.far_peers < len(nodes), f"a rank has {slowest.far_peers} peers on a rail"
                known[members] = []
                for rank, (_, owned), first in zip(ranks, members, firsts, strict=True):
                    second = in_node.of_rank(rank % width)
                    assert second.near_peers < width, f"rank {rank} has {second.near_peers} peers in its node"
                    own = sum(kind.stored.get(rank, 0) * kind.owners.get(rank, 0) for kind in kinds)
                    home, passed = first.sent + first.kept, first.received + first.kept - own
                    moved = first.sent + first.received + second.sent + second.received
                    ways = slowest, second, second.reversed(), slowest.reversed()
                    buffers = home, second.received + second.kept - own, 0, 0, passed, passed
                    known[members].append(BucketTotals(owned, home, moved, moved, buffers, ways, 4, hops=2))
            result.update(zip(ranks, known[members], strict=True))
        return result


class _Kind:
    """The matrices of a kind: elements by node of each rail, and by rail; matrices by node, and by owner."""

    def __init__(self, stored: Mapping[int, int], owners: Mapping[int, int], width: int) -> None:
        self.stored, self.owners = stored, owners
        taken, on_rail = Counter[int](), [dict[int, int]() for _ in range(width)]
        for owner, count in owners.items():
            taken[owner // width] += count
        for rank, elements in stored.items():
            on_rail[rank % width][rank // width] = elements
        self.taken, self.on_rail = Amounts(taken, 1), [Amounts(rail, 1) for rail in on_rail]
        self.rails = Amounts({index: sum(rail.values()) for index, rail in enumerate(on_rail) if rail}, width)


def _rail(group: Ranks, rank: int, pieces: Pieces) -> Ranks:
    """The ranks with the local index of a rank."""
    return tuple(peer for peer in group if (peer - rank) % pieces.ranks_per_node == 0)
