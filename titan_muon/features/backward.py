"""`overlap="backward"`: backward sends the input of Newton-Schulz, as soon as the gradients of a bucket are reduced."""

# [Note: gathers in backward]
# - All ranks launch gathers in the plan's order. A ready bucket waits for earlier buckets, and the step launches the
#   remaining gathers. Backward launches only the gathers at the start of a step, before any return.
# - These gathers have separate process groups, because their order among FSDP's collectives differs between ranks.
# - Backward packs the input without changing the momentum, so that a failed backward changes nothing, and no bucket is
#   suspended in it.
# - If a backward is abandoned, ranks may have launched different numbers of gathers. Each rank therefore launches the
#   rest and waits, before buffers are used again.

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.faults import Fault, norm_dtype
from ..options import OptionError
from ..plan.exchange.phases import Act
from ..plan.program import replicated_plain
from ..step.algorithm import PlanContext
from ..step.gradients import StepGradients
from ..step.rank import Rank
from ..step.step import Bucket, MuonStep, trace_range, with_gradients
from ..step.views import BucketViews
from ..tensors.dtensor import local
from ..tensors.storage import TrainedParam, placement_key
from .overlap import PassOverlap


class SentGradient(NamedTuple):
    """The gradient of a parameter when backward packed it."""

    grad: Tensor
    version: int
    momentum: float
    nesterov: bool

    @classmethod
    def of(cls, trained: TrainedParam) -> SentGradient | None:
        # Not the version of the local gradient, which all gradients of an FSDP module share.
        grad = trained.param.grad
        return None if grad is None else cls(grad, grad._version, trained.group["momentum"], trained.group["nesterov"])

    def is_current(self, trained: TrainedParam) -> bool:
        current = SentGradient.of(trained)
        return current is not None and current.grad is self.grad and current[1:] == self[1:]


def check(context: PlanContext) -> None:
    """Raise OptionError for momentum on one replica, for plain tensors, and for an unsafe order of launches."""
    if context.options.state != "replicated":
        problem = "= 'backward' needs the momentum on each replica; set 'none', or state = 'replicated'"
        raise OptionError("overlap", problem)
    plain = [context.plan.parameters[index].fqn for index in replicated_plain(context.plan)]
    if plain:
        raise OptionError(
            "overlap",
            f"= 'backward' takes DTensors, and {', '.join(plain[:5])} are plain tensors, whose hooks run before "
            "DistributedDataParallel reduces the gradients; shard the model by fully_shard, or set 'none'",
        )
    check_launch_order(context.device, os.environ)


def check_launch_order(device: str, environ: Mapping[str, str]) -> None:
    """Raise OptionError for settings by which a GPU runs collectives of different groups in the order of launches.

    This order differs between ranks, see [Note: gathers in backward], so ranks would wait for each other.
    """
    if device != "cuda":
        return
    for name in ("NCCL_LAUNCH_ORDER_IMPLICIT", "CUDA_DEVICE_MAX_CONNECTIONS"):
        if environ.get(name) == "1":
            raise OptionError(
                "overlap",
                f"= 'backward' may deadlock with {name}=1: the GPU then runs gathers and reductions of gradients "
                "in the order of their launches, which differs between ranks; unset the variable on every rank, or set "
                "'none'",
            )


def _first_rows(stored: Sequence[Tensor | None], parameters: Sequence[int]) -> Tensor | None:
    """(count,) float32 norms; None if a gradient is missing."""
    rows = [grad[:1] for index in parameters if (grad := stored[index]) is not None]
    if not rows or len(rows) < len(parameters):
        return None
    return torch.stack(torch._foreach_norm(rows, 2, dtype=norm_dtype(rows)))


class BackwardGathers(PassOverlap):
    """The first gathers of a step, launched in the backward before it.

    Attributes:
        first: buckets of these gathers, in order.
        needed: for each of them, the parameters with a shard on this rank, ascending.
        launched: how many are in flight.
        sent: by parameter, what backward has packed. The record of the first bucket with the parameter stays, so that
            the step detects a change between two buckets.
        accumulated: parameters with a further gradient after they were packed.
    """

    def __init__(self) -> None:
        self.launched = 0
        self.sent: dict[int, SentGradient] = {}
        self.accumulated: set[int] = set()
        self._rows: list[Tensor | None] = []
        # Whether backward was entered since the last step, and whether its gathers are dropped.
        self._entered = self._abandoned = False
        self.stream: Any = None

    def attach(self, rank: Rank, views: Sequence[BucketViews]) -> None:
        acts, buckets = rank.program.acts, rank.program.buckets
        self.rank = rank
        self.first = [i for _, i in takewhile(lambda a: a[0] is Act.GATHER and not buckets[a[1]].local, acts)]
        self.needed = [sorted(rank.parameters_of(index)) for index in self.first]
        self._numbers = [rank.numbers(needed) for needed in self.needed]
        self._unpacked = {
            index: replace(views[index], gathers=tuple(replace(call, packed=()) for call in views[index].gathers))
            for index in self.first
        }
        self.module: Any = torch.get_device_module(rank.device)
        # On the gradients' stream, packing would delay the next reduction.
        self.stream = self.stream or self.module.Stream()

    def start(self, muon: MuonStep, views: BucketViews, gradients: StepGradients) -> Bucket:
        if views.index not in self.first[: self.launched]:
            return muon.bucket(views, gradients)
        place = self.first.index(views.index)
        # Foreach calls and FSDP's accumulation do not change a DTensor's version. Clipping scales every row.
        before, now = self._rows[place], _first_rows(gradients.grads, self.needed[place])
        if before is not None and now is not None:
            changed = before.nan_to_num(-1) != now.nan_to_num(-1)
            muon.report.add_where(self._numbers[place], changed, Fault.GRADIENT_CHANGED)
        # The send buffer is in use, so nothing is packed.
        return muon.bucket(self._unpacked[views.index], gradients, gathered=True)

    @contextmanager
    def backward(self, muon: MuonStep) -> Iterator[None]:
        """Launch gathers, dropped after an exception. Collective."""
        self.drop(muon)
        if not self.first:
            yield
            return
        self._entered = self._abandoned = True
        run, current = _Backward(self, muon), self.module.current_stream()
        with ExitStack() as hooks:
            for index in sorted(set[int]().union(*self.needed)):
                # FSDP calls the hook after the reduction, on the stream of the reduced gradient.
                hook = self.rank.params[index].param.register_post_accumulate_grad_hook(partial(run.ready, index))
                hooks.callback(hook.remove)
            try:
                yield
                self._abandoned = False
            finally:
                # The user may now free gradients during packing.
                current.wait_stream(self.stream)

    def launch(self, muon: MuonStep) -> None:
        """Pack and send the next bucket."""
        index, parameters, params = self.first[self.launched], self.needed[self.launched], self.rank.params
        views, grads = muon.views[index], list[Tensor | None]([None]) * len(params)
        for number in parameters:
            if (grad := params[number].param.grad) is not None:
                grads[number] = local(grad).reshape(self.rank.storage[number].param.shape)
        uniform = len({grad.dtype for grad in grads if grad is not None}) <= 1
        gradients = StepGradients(grads, frozenset(), uniform)
        self.stream.wait_stream(self.module.current_stream())
        with trace_range("gather", index), self.module.stream(self.stream):
            for call in with_gradients([call for call in views.gathers if call.packed], gradients):
                # Copies, because the backward that sends the input may still fail.
                copies = [torch.empty_like(momentum) for momentum in call.momentum]
                torch._foreach_copy_(copies, call.momentum)
                muon.algorithm.before_gather(call, copies, call.grads(gradients))
            muon.exchange.gather(index)
            self._rows.append(_first_rows(grads, parameters))
        self.launched += 1
        records = {number: sent for number in parameters if (sent := SentGradient.of(params[number])) is not None}
        self.sent = records | self.sent

    def check_scaler(self) -> None:
        raise OptionError("overlap", "= 'backward' would send gradients with a GradScaler's scale; set 'none'")

    def ready(self, muon: MuonStep) -> None:
        """Complete abandoned gathers. Collective."""
        if not self._abandoned:
            return
        self.rank.buffers.memory.take()
        for index in self.first[self.launched :]:
            muon.exchange.gather(index)
        for index in self.first:
            muon.exchange.wait(index)
        self.rank.buffers.memory.free()
        self.end()

    def on_faults(self) -> None:
        """Abandon the gathers, in case the step raises."""
        self._abandoned = self._entered

    def drop(self, muon: MuonStep) -> None:
        """Abandon the gathers of a backward, and complete them. Collective."""
        self._abandoned = self._entered
        self.ready(muon)

    def faults(self, faults: list[Fault]) -> list[Fault]:
        params = self.rank.params
        changed = self.accumulated | {i for i, sent in self.sent.items() if not sent.is_current(params[i])}
        # The records would keep released gradients alive.
        self.sent = {}
        removed = {index for index in changed if params[index].param.grad is None}
        return [
            Fault.GRADIENT_REMOVED if i in removed else Fault.GRADIENT_CHANGED if i in changed else fault
            for i, fault in enumerate(faults)
        ]

    def end(self) -> None:
        """Forget the gathers of this step."""
        self.launched, self.sent, self.accumulated, self._rows = 0, {}, set(), []
        self._entered = self._abandoned = False


class _Backward:
    def __init__(self, gathers: BackwardGathers, muon: MuonStep) -> None:
        self._gathers, self._muon, self._rank = gathers, muon, gathers.rank
        self._missing = [set(parameters) for parameters in gathers.needed]
        self._computing = gathers.module.current_stream()
        self._begun = self._off = False

    @torch.no_grad()
    def ready(self, index: int, _: Tensor) -> None:
        gathers, rank = self._gathers, self._rank
        if not self._begun:
            self._begin()
        if index in gathers.sent:
            gathers.accumulated.add(index)
        trained = rank.params[index]
        assert trained.param.grad is not None, "the hook runs once the gradient is accumulated"
        as_planned = rank.storage[index].is_of(trained) and placement_key(trained.param.grad) == trained.key
        # The step reports a fault.
        if self._off or not as_planned:
            return
        for missing in self._missing:
            missing.discard(index)
        while gathers.launched < len(gathers.first) and not self._missing[gathers.launched]:
            gathers.launch(self._muon)

    def _begin(self) -> None:
        # Not earlier, because reading the report waits for the last step, and buffers add to the peak memory.
        self._begun = True
        # After a fault the step raises, or heals the momentum before packing.
        self._off = any(self._rank.report.read())
        if not self._off:
            with self._gathers.module.stream(self._computing):
                self._rank.buffers.memory.take()
                self._muon.mask.reset()
            self._gathers.stream.wait_stream(self._computing)
