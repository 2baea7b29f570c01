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
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..layout.intervals import Pieces, Ranks
from ..layout.types import Bucket
from .all_to_all import AllToAll, owners_by_kind
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
        kinds = [(pieces.holders(k, bucket.group), counts) for k, counts in owners_by_kind(bucket, pieces).items()]

        def passed(holder: int, owner: int) -> int:
            return 0 if holder == owner else sum(held.get(holder, 0) * counts.get(owner, 0) for held, counts in kinds)

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


def _rail(group: Ranks, rank: int, pieces: Pieces) -> Ranks:
    """The ranks with the local index of a rank."""
    return tuple(peer for peer in group if (peer - rank) % pieces.ranks_per_node == 0)
