"""The elements that a bucket moves on every rank, by its exchange, without the programs of the ranks."""

# Totals add up elements by place, in time holders plus owners instead of holders times owners, because programs of
# 1,024 ranks for each candidate would take minutes. tests/unit/plan/test_summary.py compares both. Ranks with equal
# pieces and matrices on equal nodes have equal totals, counted on one of them: of 16,384 ranks some fifty differ.

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from itertools import repeat
from typing import NamedTuple

from ..engine.layout.intervals import Pieces, Ranks
from ..engine.layout.types import Bucket
from ..engine.program.all_to_all import owners_by_kind
from ..engine.program.patterns import owned_within, replicas_in

KindCounts = tuple[tuple[int, int], ...]
"""(kind, number of matrices), in ascending order."""


class LinkTraffic(NamedTuple):
    """Elements exchanged by a rank in a collective, within the node (near) and beyond (far).

    `*_peers`: ranks with a message in either direction. `kept`: elements for the rank itself.
    """

    sent_near: int
    sent_far: int
    received_near: int
    received_far: int
    near_peers: int = 0
    far_peers: int = 0
    kept: int = 0

    @property
    def sent(self) -> int:
        return self.sent_near + self.sent_far

    @property
    def received(self) -> int:
        return self.received_near + self.received_far

    def reversed(self) -> LinkTraffic:
        """The traffic of the way back."""
        return LinkTraffic(*self[2:4], *self[:2], *self[4:])


class BucketTotals(NamedTuple):
    """A rank's cost of a bucket, in elements.

    Attributes:
        owned: matrices of each kind to orthogonalize.
        stored: of the rank's pieces.
        buffers: home buffer, inbox, outbox; the buffer of an all-gather over replicas; what hops receive, and send on.
        phases: traffic of the gather, of the return and of the all-gather over replicas.
        collectives: number of phases with traffic on any rank; all ranks skip a phase without traffic.
        hops: phases of the gather.
    """

    owned: KindCounts
    stored: int
    sent: int
    received: int
    buffers: tuple[int, ...]
    phases: tuple[LinkTraffic, ...]
    collectives: int
    hops: int = 1


class Amounts:
    """Amounts by rank, with sums: the elements of holders, or the matrices of owners.

    `replica`: of each rank, if ranks of other replicas do not count.
    """

    def __init__(
        self, by_rank: Mapping[int, int], ranks_per_node: int, replica: Mapping[int, Hashable] | None = None
    ) -> None:
        self.by_rank, self._ranks_per_node, self._replica = by_rank, ranks_per_node, replica
        self._at: dict[Hashable, tuple[int, int]] = {}
        for rank, amount in by_rank.items():
            for place in self._places(rank):
                total, ranks = self._at.get(place, (0, 0))
                self._at[place] = total + amount, ranks + 1

    def like(self, by_rank: Mapping[int, int]) -> Amounts:
        """Other amounts on the same nodes and replicas."""
        return Amounts(by_rank, self._ranks_per_node, self._replica)

    def around(self, rank: int) -> list[tuple[int, int]]:
        """(sum, number of ranks) everywhere, and on the node of a rank."""
        return [self._at.get(place, (0, 0)) for place in self._places(rank)]

    def _places(self, rank: int) -> tuple[Hashable, Hashable]:
        key = None if self._replica is None else self._replica[rank]
        return key, (key, rank // self._ranks_per_node if self._ranks_per_node else 0)


class Flows:
    """The elements that ranks send to owners. `kinds`: elements by holder and matrices by owner of each kind."""

    def __init__(self, kinds: Sequence[tuple[Amounts, Amounts]]) -> None:
        self._kinds = kinds
        # Kinds of a bucket nearly always have equal replicas.
        owners = {owner: 1 for _, matrices in kinds for owner in matrices.by_rank}
        self._owners = kinds[-1][1].like(owners) if kinds else Amounts({}, 0)

    @property
    def travels(self) -> bool:
        """Whether any owner lacks elements."""
        kinds = ((elements, owner) for elements, matrices in self._kinds for owner in matrices.by_rank)
        return any(elements.around(owner)[0][1] > (owner in elements.by_rank) for elements, owner in kinds)

    def of_rank(self, rank: int) -> LinkTraffic:
        sent, received, peers, kept = [0, 0], [0, 0], [0, 0], 0
        for elements, matrices in self._kinds:
            mine, own = elements.by_rank.get(rank, 0), matrices.by_rank.get(rank, 0)
            kept += mine * own
            around = zip(elements.around(rank), matrices.around(rank), strict=True) if mine or own else ()
            for scope, ((stored, holders), (taken, _)) in enumerate(around):
                sent[scope] += mine * (taken - own)
                received[scope] += own * (stored - mine)
                peers[scope] = max(peers[scope], holders - (mine > 0) if own else 0)
        for scope, (_, count) in enumerate(self._owners.around(rank) if sent[0] + kept else ()):
            peers[scope] = max(peers[scope], count - (rank in self._owners.by_rank))
        sides = [(near, everywhere - near) for everywhere, near in (sent, received, peers)]
        return LinkTraffic(*sides[0], *sides[1], *sides[2], kept)


Members = tuple[tuple[int, KindCounts], ...]
"""What each rank of a node holds, as a number, and the matrices that it owns."""


class Totals:
    """The cost of buckets on each rank of their groups. `by_exchange`: the counting function of each pattern."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        # Kept, because a search deals the same matrices hundreds of times.
        self.amounts, self._nodes_of = cache(self._amounts), cache(self._nodes)
        self.by_exchange = {
            "all_to_all": self._all_to_all,
            "hierarchical": self._hierarchical,
            "two_hops": self._two_hops,
            "all_gather": self._all_gather,
            "all_gather_reduce_scatter": self._all_gather,
        }

    def of(self, bucket: Bucket) -> dict[int, BucketTotals]:
        """The totals by rank."""
        return self.by_exchange[bucket.exchange](bucket)

    def _all_to_all(self, bucket: Bucket) -> dict[int, BucketTotals]:
        owners = owners_by_kind(bucket, self.pieces)
        mine, result = _by_rank(owners), dict[int, BucketTotals]()
        # The pieces of the owner's replica suffice, but without the result other replicas would diverge.
        ways = []
        for by_replica in (True, False):
            held = {kind: self.amounts(kind, bucket.group, by_replica) for kind in owners}
            ways.append(Flows([(held[kind], held[kind].like(counts)) for kind, counts in owners.items()]))
        alike, calls = self._alike(bucket, mine), sum(flows.travels for flows in ways)
        for rank in dict.fromkeys(alike.values()):
            gather, back = (flows.of_rank(rank) for flows in ways)
            homes, inbox, outbox = [way.sent + way.kept for way in (gather, back)], gather.received, back.received
            mirrored = homes[0] == homes[1] and inbox == outbox
            result[rank] = BucketTotals(
                owned=mine.get(rank, ()),
                stored=homes[1],
                sent=gather.sent + outbox,
                received=back.sent + inbox,
                buffers=(max(homes), inbox, 0 if mirrored else outbox),
                phases=(gather, back.reversed()),
                collectives=calls,
            )
        return {rank: result[alike[rank]] for rank in bucket.group}

    def _hierarchical(self, bucket: Bucket) -> dict[int, BucketTotals]:
        if not (replicas := replicas_in(bucket, self.pieces)):
            return self._all_to_all(bucket)
        in_replica, result = dict[int, BucketTotals](), dict[int, BucketTotals]()
        for ranks in replicas:
            in_replica |= self._all_to_all(owned_within(bucket, ranks))
        for replica_group in zip(*replicas, strict=True):
            stored = {rank: in_replica[rank].stored for rank in sorted(replica_group)}
            whole, flows = sum(stored.values()), self._ring(stored)
            for rank, kept in stored.items():
                own = in_replica[rank]
                result[rank] = own._replace(
                    stored=whole,
                    sent=own.sent + kept * (len(replica_group) - 1),
                    received=own.received + whole - kept,
                    buffers=(*own.buffers, whole),
                    phases=(*own.phases, flows[rank]),
                    collectives=own.collectives + bool(whole),
                )
        return result

    def _two_hops(self, bucket: Bucket) -> dict[int, BucketTotals]:
        pieces, owners, width = self.pieces, owners_by_kind(bucket, self.pieces), self.pieces.ranks_per_node
        kinds = [_Kind(pieces.holders(kind, bucket.group), counts, width) for kind, counts in owners.items()]
        over_rail = [Flows([(kind.on_rail[index], kind.taken) for kind in kinds]) for index in range(width)]
        known, result = dict[Members, list[BucketTotals]](), dict[int, BucketTotals]()
        nodes = self._members(bucket, _by_rank(owners))
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

    def _all_gather(self, bucket: Bucket) -> dict[int, BucketTotals]:
        """Of an all-gather, and of its reduce-scatter if the bucket has owners."""
        stored, held = dict.fromkeys(bucket.group, 0), dict[int, Counter[int]]()
        kinds = (self.pieces.kinds[matrix] for matrix in bucket.matrices)
        for (kind, owner), count in Counter(zip(kinds, bucket.owners or repeat(None), strict=False)).items():
            holders = self.pieces.holders(kind, bucket.group)
            for rank, elements in holders.items():
                stored[rank] += count * elements
            ranks = holders if owner is None else (owner,)
            held.setdefault(kind, Counter()).update(dict.fromkeys(ranks, count))
        whole, flows, calls = sum(stored.values()), self._ring(stored), 2 if bucket.owners else 1
        mine, result = _by_rank(held), dict[int, BucketTotals]()
        for rank, kept in stored.items():
            sent, received = kept * (len(bucket.group) - 1), whole - kept
            if calls == 2:
                sent = received = sent + received
            buffers = (kept, whole, whole * (calls - 1))
            flow = (flows[rank],) * calls
            result[rank] = BucketTotals(mine.get(rank, ()), kept, sent, received, buffers, flow, calls)
        return result

    def _ring(self, stored: Mapping[int, int]) -> dict[int, LinkTraffic]:
        """Traffic of each rank in an all-gather, or in the reverse direction in a reduce-scatter."""
        # A ring: within a node every rank passes on all received elements; elements from outside enter the node once,
        # spread over its network links.
        members, inside, whole = Counter[int](), Counter[int](), sum(stored.values())
        for rank, elements in stored.items():
            members[self.pieces.node(rank)] += 1
            inside[self.pieces.node(rank)] += elements
        flows = {}
        for rank, elements in stored.items():
            node = self.pieces.node(rank)
            inner = whole - elements if members[node] > 1 else 0
            outer = -(-(whole - inside[node]) // members[node])
            flows[rank] = LinkTraffic(inner, outer, inner, outer, members[node] - 1, len(members) - 1)
        return flows

    def _amounts(self, kind: int, group: Ranks, by_replica: bool) -> Amounts:
        """The elements of a matrix of the kind; with `by_replica` summed by replica."""
        replica = self.pieces.geometry(self.pieces.examples[kind]).replica if by_replica else None
        return Amounts(self.pieces.holders(kind, group), self.pieces.ranks_per_node, replica)

    def _members(self, bucket: Bucket, owned: Mapping[int, KindCounts]) -> list[tuple[list[int], Members]]:
        """The ranks of each node of a bucket."""
        kinds = tuple(sorted({self.pieces.kinds[matrix] for matrix in bucket.matrices}))
        return [
            (ranks, tuple([(held, owned.get(rank, ())) for rank, held in zip(ranks, holdings, strict=True)]))
            for ranks, holdings in self._nodes_of(kinds, bucket.group)
        ]

    def _nodes(self, kinds: tuple[int, ...], group: Ranks) -> list[tuple[list[int], list[int]]]:
        """The ranks of each node, and their holdings: equal numbers hold equal pieces of these kinds, as replicas."""
        pieces, numbers = self.pieces, dict[tuple[object, ...], int]()
        of_kinds = [(pieces.holders(kind, group), pieces.geometry(pieces.examples[kind]).replica) for kind in kinds]
        nodes: dict[int, tuple[list[int], list[int]]] = {}
        for rank in group:
            held = tuple([(stored.get(rank), replica.get(rank)) for stored, replica in of_kinds])
            ranks, holdings = nodes.setdefault(pieces.node(rank), ([], []))
            ranks.append(rank)
            holdings.append(numbers.setdefault(held, len(numbers)))
        return list(nodes.values())

    def _alike(self, bucket: Bucket, owned: Mapping[int, KindCounts]) -> dict[int, int]:
        """For each rank of the group, the first rank with equal pieces and matrices on a node with equal ranks."""
        nodes, first, alike = dict[Members, int](), dict[tuple[int, KindCounts, int], int](), dict[int, int]()
        for ranks, members in self._members(bucket, owned):
            node = nodes.setdefault(tuple(sorted(members)), len(nodes))
            for rank, member in zip(ranks, members, strict=True):
                alike[rank] = first.setdefault((*member, node), rank)
        return alike


def _by_rank(owned: Mapping[int, Mapping[int, int]]) -> dict[int, KindCounts]:
    """(kind, count) pairs of every rank, from counts by kind and rank."""
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for kind in sorted(owned):
        for rank, count in owned[kind].items():
            by_rank.setdefault(rank, []).append((kind, count))
    return {rank: tuple(of_kinds) for rank, of_kinds in by_rank.items()}


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
