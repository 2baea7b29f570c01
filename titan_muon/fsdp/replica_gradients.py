"""HSDP whose gradients are summed over the replicas where their momentum is, and not on all of them.

FSDP2 reduce-scatters the gradients of a module within each replica, and all-reduces the parts over replicas. Where one
replica alone keeps the momentum of a matrix (`state = "owner"`) the others do nothing with its gradient, and half of
what an all-reduce sends is for nothing.
"""

# [Note: gradients over replicas]
# - FSDP2 hands the reduce-scattered gradients of a module, one flat tensor, to a hook before they become `.grad`, on
#   the stream of its all-reduce. It all-reduces them first where the module's mesh has replicas. So the module is told
#   that its mesh has none, and the hook sums over them: a reduce-scatter, whose parts are Muon's parameters by the
#   replica that keeps their momentum, and an all-reduce of what other optimizers train.
# - The parameters keep their mesh and placements. The gradient of a Muon parameter is zero on ranks that do not keep
#   its momentum, of other replicas or with another of tensor parallelism's copies: what adds up or scales gradients
#   must not meet one replica's part of a sum there.
# - FSDP2 divides by the ranks of one replica then. Unless it was given a factor, which stands for all ranks, the hook
#   divides by the number of replicas.
# - Which replica keeps what is asked of the plan in each backward: a checkpoint that thaws parameters changes it.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..comm.exchange import Collectives
from ..muon import Muon
from ..plan.terms.types import Plan
from .private import FlatGradient, HSDPGroup, hsdp_groups

ALL = -1
"""In place of a replica: every one of them needs the sum."""
NONE = -2
"""In place of a replica: none of those that this rank's part is summed over keeps the momentum."""


@dataclass(frozen=True)
class Segment:
    """Consecutive gradients in the flat tensor, and the replica that needs their sum: its place, ALL or NONE."""

    start: int
    stop: int
    replica: int

    def of(self, flat: Tensor) -> Tensor:
        """Its part of the flat tensor."""
        return flat[self.start : self.stop]


def segments(found: Iterable[tuple[int, int, int]]) -> tuple[Segment, ...]:
    """(elements, elements with padding, replica) of each gradient, in order; those of one replica that follow each
    other without padding are one segment."""
    joined: list[Segment] = []
    start = 0
    for elements, padded, replica in found:
        if joined and (joined[-1].stop, joined[-1].replica) == (start, replica):
            joined[-1] = Segment(joined[-1].start, start + elements, replica)
        elif elements:
            joined.append(Segment(start, start + elements, replica))
        start += padded
    return tuple(joined)


class _Reduction:
    """The hook of one of FSDP2's groups of parameters: sums their gradients over replicas."""

    def __init__(self, group: HSDPGroup, muon: Muon, collectives: Collectives) -> None:
        self._group, self._muon, self._collectives = group, muon, collectives
        self._line = group.replicate_group
        self._place, self._count = dist.get_rank(self._line), dist.get_world_size(self._line)
        self._plan: Plan | None = None
        self._trained: Sequence[FlatGradient] = ()
        self._segments: tuple[Segment, ...] = ()
        self._size = 0

    def __call__(self, reduced: Tensor) -> None:
        """Sum `reduced`, the (elements,) gradients of this rank's shards, over replicas, in place."""
        self._follow_plan()
        self._check(reduced)
        self._group.hold(reduced)
        if not self._group.has_divide_factor:
            reduced.div_(self._count)
        self._reduce_scatter(reduced)
        self._all_reduce([segment.of(reduced) for segment in self._segments if segment.replica == ALL])

    def _follow_plan(self) -> None:
        plan, trained = self._muon.plan, tuple(self._group.trained())
        # What other optimizers train is frozen and thawed without a new plan.
        same = len(trained) == len(self._trained)
        if plan is self._plan and same and all(a.param is b.param for a, b in zip(trained, self._trained, strict=True)):
            return
        line = dist.get_process_group_ranks(self._line)
        kept = keepers(self._muon)
        self._segments = segments((g.elements, g.padded, _replica(kept.get(g.param), line)) for g in trained)
        self._size = sum(gradient.padded for gradient in trained)
        self._plan, self._trained = plan, trained

    def _check(self, reduced: Tensor) -> None:
        name, size = self._group.name, self._size
        if not self._group.all_reduces:
            raise ValueError(
                f"{name}: set_requires_all_reduce(False) leaves gradients unreduced, and reduce_scatter_replicas "
                "reduces them in each backward; call neither, or accumulate by set_requires_gradient_sync(False)"
            )
        if reduced.numel() != size:
            raise ValueError(
                f"{name}: gradients of {reduced.numel():,} elements of its {size:,}: a trained parameter has none, and "
                "the parts of replicas cannot be told apart; use it in the loss, freeze it, or do without "
                "reduce_scatter_replicas"
            )

    def _reduce_scatter(self, reduced: Tensor) -> None:
        """The sums of what one replica needs to that replica, and zero to the others."""
        cut = sorted((s for s in self._segments if s.replica >= 0), key=lambda segment: segment.replica)
        sizes = [0] * self._count
        for segment in cut:
            sizes[segment.replica] += segment.stop - segment.start
        mine = [segment.of(reduced) for segment in cut if segment.replica == self._place]
        summed = reduced.new_empty(sizes[self._place])
        if cut:
            packed = torch.cat([segment.of(reduced) for segment in cut])
            for work in self._collectives.reduce_scatter(summed, sizes, packed, self._line):
                work.wait()
        # Where all of a module is kept here, nothing is.
        if elsewhere := [s.of(reduced) for s in self._segments if s.replica not in (ALL, self._place)]:
            torch._foreach_zero_(elsewhere)
        for view, part in zip(mine, summed.split([view.numel() for view in mine]), strict=True):
            view.copy_(part)

    def _all_reduce(self, views: Sequence[Tensor]) -> None:
        if not views:
            return
        packed = torch.cat(list(views))
        for work in self._collectives.all_reduce(packed, self._line):
            work.wait()
        for view, part in zip(views, packed.split([view.numel() for view in views]), strict=True):
            view.copy_(part)


def _replica(kept: tuple[int, ...] | None, line: Sequence[int]) -> int:
    """Which of a line of replicas keeps the momentum of a parameter, by its place; `kept` is None if Muon has none."""
    if kept is None:
        return ALL
    places = [place for place, rank in enumerate(line) if rank in kept]
    assert len(places) <= 1, f"the momentum of one shard is on several replicas, {places}"
    return places[0] if places else NONE


def keepers(muon: Muon) -> Mapping[Tensor, tuple[int, ...]]:
    """The ranks that keep the momentum of each parameter that Muon trains."""
    planned = {parameter.fqn: parameter.state_ranks for parameter in muon.plan.parameters}
    return {parameter: planned[fqn] for fqn, parameter in _named(muon) if fqn in planned}


def _named(muon: Muon) -> Iterator[tuple[str, Tensor]]:
    for group in muon.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def reduce_scatter_replicas(model: nn.Module, muon: Muon) -> dict[Tensor, int]:
    """Have gradients of Muon's parameters summed over HSDP's replicas only where their momentum is.

    Half of what FSDP2's all-reduce over replicas sends, at the same place of backward. The gradient of such a parameter
    is then zero on all ranks but those of the one copy that keeps its momentum. Parameters of other optimizers are
    all-reduced as before. All ranks call it together, once, after `fully_shard` and after Muon is built with
    `state = "owner"`.

    Args:
        model: sharded by `fully_shard` over meshes of (replicate, shard).
        muon: optimizer of its matrices.

    Returns:
        For each parameter whose gradients are summed so the number of its copies, over replicas and tensor parallelism.

    Raises:
        ValueError: if no parameter of Muon is in an FSDP module with replicas, or another all-reduce hook is there.
    """
    kept, found = keepers(muon), dict[Tensor, int]()
    collectives = Collectives()
    for name, module in model.named_modules():
        for group in hsdp_groups(module, name) if isinstance(module, FSDPModule) else ():
            ours = [gradient.param for gradient in group.trained() if kept.get(gradient.param)]
            if not ours:
                continue
            found |= {param: param.device_mesh.size() // len(kept[param]) for param in ours}
            group.replace_all_reduce(_Reduction(group, muon, collectives))
    if not found:
        raise ValueError(
            "reduce_scatter_replicas: no parameter of Muon is in an FSDP module with replicas and has its momentum on "
            "one of them, or this was called before; shard the model by fully_shard over a mesh of (replicate, shard), "
            'build Muon with state = "owner", and call it once'
        )
    return found
