"""What owned parameters cost in a training step, and which of several ways to own them costs least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..search.search import WORTH_OF_GIB
from ..terms.machine import Link, Machine
from .space import OwnedSpace

Way = TypeVar("Way")


@dataclass(frozen=True)
class Passes:
    """The forward and backward passes of a training step.

    Attributes:
        count: passes before the optimizer's step, of accumulated batches and of a pipeline's microbatches.
        gathers: times that each of them gathers a layer: for forward alone, or for backward again.
        gathered: bytes of an element on its way to compute.
        reduced: bytes of an element of a gradient on its way to its owner.
    """

    count: int
    gathers: int
    gathered: int
    reduced: int


@dataclass(frozen=True)
class TrainingCost:
    """What owned parameters cost in a training step.

    Attributes:
        step: seconds of Muon's step, by the timeline.
        passes: seconds of the links in forward and backward.
        bytes: what the fullest rank holds between steps, gradients and momentum with the weights.
    """

    step: float
    passes: float
    bytes: float

    @property
    def seconds(self) -> float:
        """Of both, as if nothing of the passes were hidden behind what computes."""
        # How much is hidden depends on the model's own speed, which no planner here knows. To count all of it keeps
        # from what sends more in each pass to save a step that may cost less.
        return self.step + self.passes


def cheapest(costs: Mapping[Way, TrainingCost]) -> Way:
    """The way that takes least time, with what its memory beyond the smallest is worth; of equal ones the first."""
    least = min(cost.bytes for cost in costs.values())

    def price(way: Way) -> float:
        return costs[way].seconds * (1 + WORTH_OF_GIB * (costs[way].bytes - least) / 2**30)

    return min(costs, key=price)


def rest_bytes(spaces: Iterable[OwnedSpace], states: float) -> float:
    """What the fullest rank holds between steps; `states` bytes of gradients and momentum for each of weights."""
    held = Counter[int]()
    for space in spaces:
        for rank, size in space.held_bytes():
            held[rank] += size
    return max(held.values()) * (1 + states)


def pass_seconds(space: OwnedSpace, passes: Passes, machine: Machine) -> float:
    """Seconds that links are at work in the passes of a training step, layer after layer.

    With S the bytes of a layer that a rank computes with, B the bytes per second of the slowest group and n its ranks,
    a broadcast takes S / B, a reduction S / B, and an all-reduce of the owner with most 2 (n - 1) / n S / B
    (NVIDIA/nccl-tests, PERFORMANCE.md), each and its collective's latency. Pieces between a holder and its peers take
    the bytes that the busiest of them sends or receives, by its own link.
    """
    replicas, shards, _ = space.mesh.shape
    between, among, peers = (_link(space.lines(axis), machine, joined=axis < 2) for axis in range(3))
    seconds = 0.0
    for layer in space.layers():
        gather = reduce = all_reduce = 0.0
        if shards > 1:
            gather = layer.gathered * passes.gathered / among.bandwidth + among.latency
            reduce = layer.gathered * passes.reduced / among.bandwidth + among.latency
        if layer.of_holder > 0:
            gather += layer.of_holder * passes.gathered / peers.bandwidth + peers.latency
            reduce += layer.of_holder * passes.reduced / peers.bandwidth + peers.latency
        if replicas > 1:
            share = 2 * (replicas - 1) / replicas
            all_reduce = share * layer.of_owner * passes.reduced / between.bandwidth + between.latency
        seconds += passes.gathers * gather + reduce + all_reduce
    return passes.count * seconds


def _link(groups: Iterable[tuple[int, ...]], machine: Machine, *, joined: bool) -> Link:
    """What the slowest of some groups has for each of its ranks; `joined` if all of them carry what passes through."""
    links = []
    for group in groups:
        on_node = Counter(rank // machine.ranks_per_node for rank in group)
        if len(on_node) == 1:
            links.append(machine.node)
            continue
        # NCCL opens as many rings as a node's ranks have ways out of it, and a ring has the node's links besides.
        ways = min(on_node.values()) if joined else 1
        bandwidth = min(machine.node.bandwidth, ways * machine.network.bandwidth)
        links.append(Link(bandwidth, machine.network.latency))
    return min(links, key=lambda link: (link.bandwidth, -link.latency))
