"""The engine: from tensors to a plan, the parts of its step, and the checks before each step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .algorithms import algorithm_of
from .algorithms.muon import highest_rate
from .comm.agreement import Agreement
from .comm.buffers import Buffers, fragmentation
from .comm.collectives import Collectives
from .comm.exchange import Exchange
from .comm.faults import STORAGE_FAULTS, Fault, check_faults, fault_of, names_with
from .comm.report import FaultReport, Reported
from .options import MuonOptions
from .orthogonalize import DTYPES
from .plan.program import make_program, replicated_plain
from .plan.terms.layout import Geometries
from .plan.terms.types import Plan
from .planning import device_of, dispatch_of, methods_of
from .state.groups import iteration_changed, iteration_of
from .state.matrix_states import MatrixStates
from .step.algorithm import Algorithm, Scaling
from .step.build_views import build_views
from .step.gradients import StepGradients, grad_matrix
from .step.ranges import trace_range
from .step.rank import Rank
from .step.step import Hook, MuonStep, UpdateMask
from .tensors.device import is_host
from .tensors.names import names_in
from .tensors.storage import TrainedParam, storage_of, with_momentum
from .tensors.warning import warn

if TYPE_CHECKING:
    from .features.overlap import Overlap


def check_not_captured() -> None:
    """Raise ValueError if a CUDA graph is being captured on the current stream."""
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "Muon.step cannot be captured in a CUDA graph, because the host reads the faults of the last step; capture "
            "forward and backward alone, and call step() after the replay"
        )


def allowed_faults(options: MuonOptions) -> tuple[Fault, ...]:
    """Faults that skip a matrix instead of raising."""
    chosen = {Fault.NOT_FINITE: options.nonfinite, Fault.NO_GRADIENT: options.missing_grad}
    return tuple(fault for fault, choice in chosen.items() if choice == "skip")


class Engine:
    """This rank's steps of a plan.

    Attributes:
        rank: what this rank has of the plan.
        step: of gradients without a scale.
        overlap: who starts and ends buckets, None for the step alone.
        orthogonalized: number of matrices that a step orthogonalizes on this rank.
    """

    def __init__(self, rank: Rank, algorithm: Algorithm, states: MatrixStates, overlap: Overlap | None = None) -> None:
        # The overlap of the engine before, because hooks in the model hold it.
        self.overlap = _overlap(rank.options) if overlap is None else overlap
        self._algorithm = algorithm
        self._allowed = allowed_faults(rank.options)
        self._idle: Any = None
        self._make(rank, states)

    def _make(self, rank: Rank, states: MatrixStates) -> None:
        """Make the step for `rank`: its seams, and the stack of decorators."""
        options, algorithm = rank.options, self._algorithm
        self.rank, self._states = rank, states
        self._names = frozenset(trained.fqn for trained in rank.params)
        # Attributes of groups that a step compares by value.
        keys = ("ns_coefficients", "ns_steps", "eps")
        self._iterations = [tuple(trained.group[key] for key in keys) for trained in rank.params]
        hooks, batch_type = list[Hook](), None
        if options.fused:
            from .algorithms.fused import Fused, Tables

            tables = Tables(rank)
            algorithm = Fused(algorithm, tables)
            hooks.append(tables)
        if algorithm.sums_norms:
            from .features.weight_norms import WeightNorms, WithWeightNorms

            norms = WeightNorms(rank)
            algorithm = WithWeightNorms(algorithm, norms)
            states = {number: {**states.get(number, {}), **norm} for number, norm in norms.states.items()}
            hooks.append(norms)
        if any(matrix.slice is not None for matrix in rank.plan.matrices):
            from .features.slices import SliceBatches

            batch_type = SliceBatches(rank)
        made = build_views(rank, self._algorithm, states, batch_type)
        views, self.workspace, self.offload = made.buckets, made.workspace, None
        if options.offload != "none":
            from .features.offload import HostOffload

            self.offload = HostOffload(rank, views, options.offload)
            views = self.offload.views
            hooks.append(self.offload)
        self._mask, skipped = UpdateMask(rank.report), None
        if self._allowed or options.idle == "hold":
            from .features.mask import GradientMask, IdleSteps

            self._idle = self._idle or IdleSteps(rank.plan, rank.device)
            self._mask = GradientMask(rank, views, self._allowed, self._idle)
            hooks.append(self._mask)
            skipped = self._mask.skipped if self._allowed else None
        if self.overlap is not None:
            hooks.append(self.overlap)
        self.orthogonalized = sum(len(batch.matrices) for of in views for _, batch, _ in of.batches)
        self._undecorated, self._skipped = algorithm, skipped
        seams = self._decorated(), self._mask, self.overlap, self.offload, hooks
        self.step = MuonStep(rank.program, views, rank.exchange, rank.report, *seams)

    def _decorated(self, scaling: Scaling | None = None) -> Algorithm:
        """The stack of decorators, innermost first: keeping, unscaling, and the format of the momentum."""
        algorithm = self._undecorated
        if self._skipped is not None:
            from .algorithms.keeping import Keeping

            algorithm = Keeping(algorithm, self._skipped)
        if scaling is not None:
            from .algorithms.scaling import scaled

            algorithm = algorithm.scaled(scaling) or scaled(algorithm, scaling)
        if self.rank.options.state_dtype == "int8":
            from .algorithms.eight_bit import EightBit

            # Outermost, because restored numbers would not fit restored scales.
            algorithm = EightBit(algorithm, self.rank)
        return algorithm

    def run(self, gradients: StepGradients, scaling: Scaling | None = None) -> None:
        """Run a step. `scaling`: of this step alone."""
        rank, step = self.rank, self.step
        rank.buffers.memory.take()
        self.workspace.take()
        rank.report.begin(gradients.grads)
        if scaling is not None:
            from .algorithms.scaling import SkippedStepMask

            rank.report.add_skipped(scaling.skipped)
            mask = SkippedStepMask(self._mask, scaling.skipped)
            step = replace(step, algorithm=self._decorated(scaling), mask=mask)
        try:
            step.run(gradients)
        except RuntimeError as error:
            rank.agreement.locate(error, rank.report.steps)
            raise
        with trace_range("tell"):
            rank.report.send()
        self.workspace.free()
        if self.overlap is None or not self.overlap.holds_memory:
            rank.buffers.memory.free()

    def gradients(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> StepGradients:
        """The gradients of the next step. Raises ValueError on all ranks together, before anything changes."""
        rank, overlap = self.rank, self.overlap
        if rank.buffers.device.type == "cuda":
            check_not_captured()
        # Asking the peers would block the host. So the step leaves out matrices with faults on every rank, and all
        # ranks raise in the next step.
        alone = rank.agreement.peers is None
        if not dist.is_initialized():
            rank.agreement.check_alive()
        if overlap is not None:
            self.finish()
            overlap.ready(self.step)
        with trace_range("check"):
            faults, grads, moved = self._faults(groups, state)
        if any(faults) or not rank.report.quiet():
            self.raise_pending(faults if alone else ())
        excluded = frozenset[int]()
        if any(faults):
            if not alone:
                rank.report.add(faults)
            excluded = frozenset(i for i, fault in enumerate(faults) if fault not in (Fault.NONE, Fault.NO_GRADIENT))
            grads = [None if index in excluded else grad for index, grad in enumerate(grads)]
        if moved and STORAGE_FAULTS.isdisjoint(faults):
            # For example after `param.data = ...`.
            params = [with_momentum(param, state[param.param]["momentum_buffer"]) for param in rank.params]
            self.rebuild(params, rank.options)
        dtypes = {None if g is None else g.dtype for g, p in zip(grads, rank.params, strict=True) if p.on_mesh}
        return StepGradients(grads, excluded, None not in dtypes and len(dtypes) <= 1, rank.params)

    def _faults(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> tuple[list[Fault], list[Tensor | None], bool]:
        """The fault and (rows, cols) gradient of each parameter before a step, and whether any storage has moved."""
        rank, current, moved = self.rank, dict[str, Tensor](), False
        for group in groups:
            if len(group["param_names"]) != len(group["params"]):
                names_in(group)
            current.update(zip(group["param_names"], group["params"], strict=True))
        faults, grads = [Fault.NONE] * len(rank.params), list[Tensor | None]()
        for index, trained in enumerate(rank.params):
            momentum = state.get(trained.param, {}).get("momentum_buffer")
            if not self._is_unchanged(index, trained, current.get(trained.fqn), momentum):
                in_place = rank.storage[index].is_of(trained)
                faults[index] = fault_of(trained, current.get(trained.fqn), momentum, in_place=in_place)
                moved = moved or not in_place or momentum is not trained.momentum_buffer
                if iteration_changed(trained.group, rank.iterations[index]):
                    faults[index] = Fault.NEWTON_SCHULZ_CHANGED
            if rank.options.decay_follows_lr and highest_rate(trained.group) is None:
                faults[index] = Fault.HIGHEST_RATE_UNKNOWN
            grad = trained.param.grad
            if grad is not None and (not trained.on_mesh or faults[index] is not Fault.NONE):
                grad = None
            elif isinstance(grad, DTensor):
                grad = grad._local_tensor
            if grad is not None and grad.ndim != 2:
                grad = grad_matrix(grad, rank.plan.parameters[index])
            grads.append(grad)
        if faults and any(current[name].requires_grad for name in current.keys() - self._names):
            # A thawed parameter has no place in the report.
            faults[0] = Fault.THAWED
        return (faults if self.overlap is None else self.overlap.faults(faults)), grads, moved

    def _is_unchanged(self, index: int, trained: TrainedParam, param: Tensor | None, momentum: Tensor | None) -> bool:
        """Whether parameter, momentum and iteration are as planned, and the gradient is placed like the parameter.

        A fast test of the common case. `fault_of` finds what has changed.
        """
        storage, group = self.rank.storage[index], trained.group
        if (
            momentum is None
            or momentum is not trained.momentum_buffer
            or param is not trained.param
            or not trained.on_mesh
        ):
            return False
        if (group["ns_coefficients"], group["ns_steps"], group["eps"]) != self._iterations[index]:
            return False
        grad, stored, place = param.grad, param, None
        if isinstance(param, DTensor):
            stored, place = param._local_tensor, (param.device_mesh, param.placements)
        if isinstance(momentum, DTensor):
            momentum = momentum._local_tensor
        if stored is not storage.local or stored.untyped_storage() is not storage.param_storage:
            return False
        if momentum.untyped_storage() is not storage.momentum_storage or grad is None or grad.layout != torch.strided:
            return False
        if isinstance(grad, DTensor):
            return ((grad.device_mesh, grad.placements), tuple(grad._local_tensor.shape)) == trained.key
        return (place, tuple(grad.shape)) == trained.key

    def raise_pending(self, faults: Sequence[Fault] = (), *, alone: bool = False) -> None:
        """Raise ValueError for the last report and `faults`, and warn of faults that the options allow.

        Args:
            faults: of Muon's parameters, equal on all ranks as the report.
            alone: read without the other ranks, also this rank's faults since the report. The next step then raises on
                all ranks.
        """
        report = self.rank.report
        report.uncount_skipped()
        reported = report.read()
        if alone:
            faults = report.late()
        else:
            report.clear()
        reported = [max(pair) for pair in zip_longest(reported, faults, fillvalue=Fault.NONE)]
        if not any(reported):
            return
        own = reported[: len(self.rank.params)]
        if self.overlap is not None:
            self.overlap.on_faults()
        if self.offload is not None:
            # Momentum on the host is healed next.
            self.offload.synchronize()
        self._heal(own)
        names = report.names[: len(own)]
        check_faults(names, own, self._allowed, "" if alone else report.details(reported))
        report.tell_others(reported)
        if broken := names_with(names, own, Fault.NOT_FINITE):
            warn(f"{broken}: not finite; the update of those matrices was zero in a step")

    def _heal(self, faults: Sequence[Fault]) -> None:
        """Zero non-finite momentum of faulty parameters, because later updates would stay zero."""
        for fault, storage in zip(faults, self.rank.storage, strict=True):
            if fault in (Fault.NOT_FINITE, Fault.NO_GRADIENT):
                storage.momentum.nan_to_num_(0.0, 0.0, 0.0)

    def finish(self) -> None:
        """End what the last step left to a forward."""
        if self.overlap is not None:
            self.overlap.finish()
            self.rank.report.add_late()

    def synchronize(self) -> None:
        """End the last step, drop gathers launched in backward, and wait for transfers. Collective."""
        self.finish()
        if self.overlap is not None:
            self.overlap.drop(self.step)
        if self.offload is not None:
            self.offload.synchronize()

    def attach(self) -> None:
        """Let the overlap run this engine. Once all ranks have an engine, because an earlier one may stay in use."""
        if self.overlap is not None:
            self.overlap.attach(self.rank, self.step.views)

    def free(self) -> None:
        """Free the buffers until the next step, also with `keep_buffers`."""
        self.rank.buffers.memory.free(kept=True)
        self.workspace.free(kept=True)

    def allocate(self) -> None:
        """Allocate the buffers, because a rank without enough memory must fail before the others communicate."""
        if warning := fragmentation(self.rank.device.type, self.step_bytes, os.environ):
            warn(warning)
        if not is_host(self.rank.device):
            self.rank.buffers.memory.take()

    @property
    def step_bytes(self) -> int:
        """Memory that each step allocates and frees."""
        return 0 if self.rank.options.keep_buffers else self.rank.buffers.memory.nbytes + self.workspace.nbytes

    def warm_up(self) -> None:
        """Run the exchange once, without a step, in the allocated buffers. Collective."""
        if not is_host(self.rank.device):
            self.rank.exchange.warm_up(self.rank.plan)
            self.rank.buffers.memory.free()

    def plans(self, params: Sequence[TrainedParam]) -> bool:
        """Whether these parameters are the planned ones."""
        # Names too, because parameters are frozen and thawed between checkpoints.
        if [param.fqn for param in params] != [param.fqn for param in self.rank.params]:
            return False
        pairs = zip(params, self.rank.params, self.rank.iterations, strict=True)
        return all(new.param is old.param and not iteration_changed(new.group, i) for new, old, i in pairs)

    def rebuild(self, params: Sequence[TrainedParam], options: MuonOptions, states: MatrixStates | None = None) -> None:
        """The same plan and buffers for new storage, momentum, `offload` or states of matrices."""
        storage = tuple(map(storage_of, params, self.rank.plan.parameters))
        rank = replace(self.rank, params=tuple(params), storage=storage, options=options)
        self._make(rank, self._states if states is None else states)
        self.attach()


def _overlap(options: MuonOptions) -> Overlap | None:
    if options.overlap == "backward":
        from .features.backward import BackwardGathers

        return BackwardGathers()
    if options.overlap == "forward":
        from .features.forward import ForwardUpdates

        return ForwardUpdates()
    return None


def engine_of(
    plan: Plan,
    geometries: Geometries,
    params: Sequence[TrainedParam],
    options: MuonOptions,
    collectives: Collectives,
    agreement: Agreement,
    states: MatrixStates,
    overlap: Overlap | None,
    *,
    muon: Optimizer,
    others: Mapping[str, Reported],
) -> Engine:
    """The engine of a plan. `overlap`: of the engine before. `others`: optimizers in Muon's report, by name."""
    program = make_program(plan, agreement.rank, geometries)
    buffers = Buffers(program, device_of(params), DTYPES[options.wire_dtype], kept=options.keep_buffers)
    exchange = Exchange(program, buffers, collectives, agreement, exclusive=options.overlap == "backward")
    names = [trained.fqn for trained in params]
    report = FaultReport(names, {"muon": muon}, others, buffers.device, agreement, replicated_plain(plan))
    iterations = tuple(iteration_of(trained.group) for trained in params)
    methods = methods_of(plan, iterations, dispatch_of(buffers.device, options))
    storage = tuple(map(storage_of, params, plan.parameters))
    parts = iterations, methods, buffers, exchange, report, agreement, options
    engine = Engine(Rank(plan, program, tuple(params), storage, *parts), algorithm_of(options), states, overlap)
    engine.allocate()
    return engine
