"""Parameters with their owners on one mesh: how they rest, and what each layer of them sends in a pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..terms.types import Layout, MatrixStack, Mesh, Parameter, Placement, Replicate, Shard
from .ownership import OwnedItem, Ownership


@dataclass(frozen=True)
class OwnedTensor:
    """A parameter that is to be owned.

    Attributes:
        shape: of the whole.
        itemsize: bytes of an element at rest.
        stack: its matrices, or None if no Muon takes it.
        cut: how tensor or expert parallelism cuts it.
    """

    shape: tuple[int, ...]
    itemsize: int
    stack: MatrixStack | None
    cut: Placement


@dataclass(frozen=True)
class LayerSends:
    """Elements of a layer that go to where it computes, and as many of gradients that come back.

    Attributes:
        gathered: what a rank computes with.
        of_owner: of that, what the owner with most of it has.
        of_holder: what the busiest rank sends its peers, or receives from them, where one of them holds for all.
    """

    gathered: float
    of_owner: float
    of_holder: float


@dataclass(frozen=True)
class OwnedSpace:
    """Parameters with their owners.

    Attributes:
        mesh: (replicas, shards, peers): copies with an owner each, ranks one of which is the owner, and ranks of tensor
            or expert parallelism.
        tensors: what is owned, by name.
        whole: the names of those that one of the peers holds for all.
        ownership: owners among the shards; with any of `whole` among shards and peers, the latter counting fastest.
    """

    mesh: Mesh
    tensors: Mapping[str, OwnedTensor]
    whole: frozenset[str]
    ownership: Ownership

    def parameters(self) -> Iterator[Parameter]:
        """What Muon takes of them, placed as `owned.param.owner_mesh` places it."""
        for item, owners in self._owned():
            stack = self.tensors[item.fqn].stack
            if stack is not None:
                yield Parameter(item.fqn, item.layer, self._layout(item.fqn, owners), stack)

    def held_bytes(self) -> Iterator[tuple[int, int]]:
        """Each rank with the bytes of the weights that it holds."""
        replicas, shards, peers = self.mesh.shape
        loads = self.ownership.loads()
        for replica, shard, peer in product(range(replicas), range(shards), range(peers)):
            yield self._rank(replica, shard, peer), loads[shard * peers + peer if self.whole else shard].bytes

    def lines(self, axis: int) -> Iterator[tuple[int, ...]]:
        """The groups of ranks along an axis of the mesh."""
        sizes = [range(size) for size in self.mesh.shape]
        places = [list(product(*sizes[:axis], [one], *sizes[axis + 1 :])) for one in sizes[axis]]
        for line in zip(*places, strict=True):
            yield tuple(self._rank(*place) for place in line)

    def layers(self) -> list[LayerSends]:
        """What each layer sends."""
        found: dict[str, list[tuple[OwnedItem, tuple[int, ...]]]] = {}
        for item, owners in self._owned():
            found.setdefault(item.layer, []).append((item, owners))
        return [self._sends(owned) for owned in found.values()]

    def _owned(self) -> Iterator[tuple[OwnedItem, tuple[int, ...]]]:
        return zip(self.ownership.items, self.ownership.owners, strict=True)

    def _rank(self, replica: int, shard: int, peer: int) -> int:
        _, shards, peers = self.mesh.shape
        return self.mesh.ranks[(replica * shards + shard) * peers + peer]

    def _places(self, fqn: str, owners: Sequence[int]) -> list[tuple[int, int]]:
        """The shard of each owner, and the peer that holds all; 0 where each peer has its own."""
        places = [divmod(owner, self.mesh.shape[2] if self.whole else 1) for owner in owners]
        return places if fqn in self.whole else [(shard, 0) for shard, _ in places]

    def _layout(self, fqn: str, owners: Sequence[int]) -> Layout:
        tensor, places = self.tensors[fqn], self._places(fqn, owners)
        replicas, inner = self.mesh.shape[0], 1 if fqn in self.whole else self.mesh.shape[2]
        ranks = [self._rank(r, s, peer + p) for r, p in product(range(replicas), range(inner)) for s, peer in places]
        divided = Shard(0) if len(places) > 1 else Replicate()
        cut = Replicate() if fqn in self.whole else tensor.cut
        return Layout(tensor.shape, Mesh((replicas, inner, len(places)), tuple(ranks)), (Replicate(), cut, divided))

    def _sends(self, layer: Sequence[tuple[OwnedItem, tuple[int, ...]]]) -> LayerSends:
        peers, gathered = self.mesh.shape[2], 0.0
        of_shard, sent, received = defaultdict[int, float](float), *(defaultdict[int, float](float) for _ in range(2))
        for item, owners in layer:
            holders = peers if item.fqn in self.whole else 1
            part = item.bytes / self.tensors[item.fqn].itemsize / holders / len(owners)
            gathered += part * len(owners)
            for shard, holder in self._places(item.fqn, owners):
                of_shard[shard] += part
                # Of each part that one peer holds the others get their pieces, one message for each.
                sent[shard * peers + holder] += part * (holders - 1)
                for other in set(range(holders)) - {holder}:
                    received[shard * peers + other] += part
        return LayerSends(gathered, max(of_shard.values()), max([*sent.values(), *received.values()]))
