"""The engine: from tensors to a plan, and this rank's steps of the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..options import MuonOptions, OptionError
from .exchange.agreement import Agreement
from .exchange.exchange import Buffers, Collectives, Exchange, fragmentation, wire_dtypes
from .faults.faults import ALLOWED, STORAGE_FAULTS, Fault, check_faults, warn_of_skipped
from .faults.report import FaultReport, Reported
from .faults.skip import Scaling
from .layout.intervals import Geometries
from .layout.types import Layout, Plan, StackOf
from .layout.work import ElementKind, Elements
from .orthogonalize import Methods
from .planning import Planner, PlanRequest
from .program.program import make_program, replicated_plain
from .state.states import MatrixStates, kept_by
from .step.algorithm import Algorithm, PlanContext, work_of
from .step.feature import BuiltStep, FeaturesOf
from .step.foreach import Rounding, StepContext, methods_of
from .step.gradients import ITERATION_KEYS, SeenInputs, StepGradients, checked_inputs, nonfinite
from .step.muon import highest_rate
from .step.step import LateUpdates, MuonStep, trace_range
from .step.views import build_views
from .tensors.dtensor import is_host, on_device, planned, storage_device
from .tensors.names import listed, warn
from .tensors.process_groups import check_node
from .tensors.storage import (
    TrainedParam,
    check_devices,
    device_of,
    iteration_changed,
    iteration_of,
    storage_fault,
    storage_of,
    with_momentum,
)

# --- from tensors to a plan ---


@dataclass(frozen=True)
class Selection:
    """The parts that options select, which the engine does not know by name.

    Attributes:
        options: without choices that are still automatic.
        algorithm: of the trained parameters.
        dispatch: the method of Newton-Schulz by shape.
        planner: the owners and the rounds.
        stack_of: the matrices of a parameter, by name and shape.
        features_of: the features that are on.
        rounding: of weights. None: to the nearest number.
        note: for the plan.
    """

    options: MuonOptions
    algorithm: Algorithm
    dispatch: Methods
    planner: Planner
    stack_of: StackOf
    features_of: FeaturesOf
    rounding: Rounding | None
    note: str = ""


def checked_plan(
    params: Sequence[TrainedParam], selected: Selection, separate: Mapping[str, Layout], rank: int
) -> tuple[Plan, Geometries]:
    """The plan of a step, and the pieces of the parameters. `separate`: from `separate_layouts`.

    Raises ValueError as `check_devices` and `plan_step`, and if storage on this rank differs from the plan.
    """
    if not params:
        # For example a pipeline stage with only the embedding.
        return Plan((), (), (), (), 1, ()), Geometries(())
    check_devices(params)
    named, groups = [(trained.fqn, trained.param) for trained in params], [trained.group for trained in params]
    kept = {trained.fqn: ranks for trained in params if (ranks := kept_by(trained))}
    plan = plan_step(named, groups, selected, separate, kept)
    geometries = Geometries(plan.parameters)
    for index, trained in enumerate(params):
        device = storage_device(trained.param)
        if selected.options.offload == "parameters" and trained.on_mesh and not is_host(device):
            raise ValueError(
                f"{trained.fqn}: is on {device}, and offload = 'parameters' takes what is on the host; keep all of "
                "Muon's parameters there, or none"
            )
        if fault := storage_fault(trained.fqn, trained.param, geometries[index], rank):
            raise ValueError(fault)
    check_node(plan.ranks_per_node, rank)
    return plan, geometries


def plan_step(
    named: Sequence[tuple[str, Tensor]],
    groups: Sequence[Mapping[str, Any]],
    selected: Selection,
    separate: Mapping[str, Layout] = MappingProxyType({}),
    kept: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Plan:
    """The plan of a step on (name, parameter) pairs, each with a parameter group.

    `separate`: from `separate_layouts`. `kept`: present state ranks by name, if not all holders. Never communicates:
    parameters may be on the meta device and the fake process group. Raises ValueError for a parameter without matrices,
    and for a split with a mismatched shape.
    """
    options, algorithm, dispatch = selected.options, selected.algorithm, selected.dispatch
    iterations = tuple(map(iteration_of, groups))
    stacks = [selected.stack_of(fqn, tensor.shape) for fqn, tensor in named]
    parameters = [planned(*pair, stack, separate.get(pair[0])) for pair, stack in zip(named, stacks, strict=True)]
    context = PlanContext(options, algorithm, parameters, named, dispatch.device)
    check_parts(context, selected.features_of)
    wire_bytes = [algorithm.for_parameter(number).wire_bytes for number in range(len(named))]
    works = work_of(iterations, dispatch, algorithm)
    plan = selected.planner(PlanRequest(parameters, works, options, elements_of(named, selected), kept))
    travelling = {plan.matrices[number].parameter for bucket in plan.buckets for number in bucket.matrices}
    notes = [plan.reason, selected.note]
    if wide := [named[number][0] for number in sorted(travelling) if wire_bytes[number] > options.wire_bytes]:
        notes.append(f"{listed(wide, 2)} travel in float32, because their algorithm needs this")
    plan = replace(plan, reason="; ".join(filter(None, notes)))
    check_travels(context, plan)
    return plan


def elements_of(named: Sequence[tuple[str, Tensor]], selected: Selection) -> Elements:
    """The elements of (name, parameter) pairs on the device of a step."""
    kinds = (
        ElementKind(tensor.dtype.itemsize, own.wire_bytes, tensor.dtype == torch.bfloat16)
        for (_, tensor), own in ((pair, selected.algorithm.for_parameter(n)) for n, pair in enumerate(named))
    )
    # A dict keeps the order of parameters.
    return Elements(tuple(dict.fromkeys(kinds)), selected.dispatch.device, selected.algorithm.temporary_bytes)


def check_parts(context: PlanContext, features_of: FeaturesOf) -> None:
    """Raise OptionError if options, features or an algorithm cannot train the parameters. Equal on all ranks."""
    parts: dict[Algorithm, list[int]] = {}
    for number in range(len(context.named)):
        parts.setdefault(context.algorithm.for_parameter(number), []).append(number)
    for part, numbers in parts.items():
        own = context.part(part, numbers)
        features = (feature.check for feature in features_of(own.options, part))
        for check in (*features, part.check):
            check(own)


def check_travels(context: PlanContext, plan: Plan) -> None:
    """Raise OptionError for options of the exchange if owned parameters leave nothing to exchange."""
    owned = context.owned()
    for name in ("overlap", "exchange") if owned and not plan.buckets else ():
        value, default = getattr(context.options, name), getattr(MuonOptions(), name)
        if value != default:
            raise OptionError(
                name,
                f"= {value!r} has no effect: the owner of an owned parameter stores the whole matrix "
                f"({', '.join(owned[:5])}), and no other matrix travels; set {default!r}",
            )


# --- the steps of a plan ---


def engine_of(
    plan: Plan,
    geometries: Geometries,
    params: Sequence[TrainedParam],
    selected: Selection,
    collectives: Collectives,
    agreement: Agreement,
    states: MatrixStates,
    overlap: LateUpdates | None,
    *,
    muon: Optimizer,
    others: Mapping[str, Reported],
) -> Engine:
    """The engine of a plan. `overlap`: of the engine before. `others`: optimizers in Muon's report, by name."""
    options = selected.options
    program = make_program(plan, agreement.rank, geometries)
    buffers = Buffers(program, device_of(params), wire_dtypes(plan, program), kept=options.keep_buffers)
    names = [trained.fqn for trained in params]
    iterations = tuple(iteration_of(trained.group) for trained in params)
    rank = StepContext(
        plan,
        program,
        tuple(params),
        tuple(map(storage_of, params, plan.parameters)),
        iterations,
        tuple(methods_of(plan, iterations, selected.dispatch)),
        buffers,
        Exchange(program, buffers, collectives, agreement),
        FaultReport(names, {"muon": muon}, others, buffers.device, agreement, replicated_plain(plan)),
        agreement,
        options,
        buffers.device,
        selected.rounding,
    )
    if overlap is None:
        # Else the overlap of the engine before, because hooks in the model hold it.
        made = (feature.overlap() for feature in selected.features_of(options, selected.algorithm))
        overlap = next((late for late in made if late is not None), None)
    engine = Engine(rank, selected, states, overlap)
    allocated = 0 if options.keep_buffers else buffers.memory.nbytes + engine.workspace.nbytes
    if warning := fragmentation(buffers.device.type, allocated, os.environ):
        warn(warning)
    # Now, because a rank without enough memory must fail before the others communicate.
    if not is_host(buffers.device):
        buffers.memory.take()
    return engine


class Engine:
    """This rank's steps of a plan.

    Attributes:
        rank: what this rank has of the plan.
        step: of gradients without a scale.
        features_of: the features that are on.
        overlap: what ends the late buckets of a step. None: the step.
        orthogonalized: number of matrices that a step orthogonalizes on this rank.
    """

    def __init__(
        self, rank: StepContext, selected: Selection, states: MatrixStates, overlap: LateUpdates | None
    ) -> None:
        self._algorithm, self.features_of, self.overlap = selected.algorithm, selected.features_of, overlap
        # Copies, because a list may change in place.
        self._iterations = [deepcopy(tuple(map(param.group.get, ITERATION_KEYS))) for param in rank.params]
        self._make(rank, states, None)

    def _make(self, rank: StepContext, states: MatrixStates, before: BuiltStep | None) -> None:
        if before is not None:
            before.runner.release()
        self.rank, self._states = rank, states
        self._seen: SeenInputs | None = None
        features = self.features_of(rank.options, self._algorithm)
        self._parts = parts = BuiltStep(rank, self._algorithm, states)
        for feature in features:
            feature.decorate(parts)
        parts.views, parts.workspace, flags = build_views(rank, self._algorithm.whole, parts.states)
        for feature in features:
            feature.build(parts, before)
        rank.report.watch(flags)
        seams = parts.algorithm, parts.mask, self.overlap, parts.offload, parts.hooks, parts.passes
        parts.step = MuonStep(rank.program, parts.views, rank.exchange, *seams)
        runners = (feature.runner(parts) for feature in features)
        parts.runner = next((runner for runner in runners if runner is not None), parts.step)
        self.step, self.workspace, self.offload = parts.step, parts.workspace, parts.offload
        self.orthogonalized = sum(len(batch.matrices) for views in self.step.views for _, batch, _ in views.batches)

    def gradients(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> StepGradients:
        """The gradients of the next step. Raises ValueError on all ranks together, before anything changes."""
        rank, overlap = self.rank, self.overlap
        if rank.buffers.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "Muon.step cannot be captured in a CUDA graph, because the host reads the faults of the last step; "
                "capture forward and backward only, and call step(), with expert.cuda_graph = True one launch, after it"
            )
        # Asking the peers would block the host. So the step leaves out matrices with faults on every rank, and all
        # ranks raise in the next step.
        alone = rank.agreement.peers is None
        if not (alone or dist.is_initialized()):
            raise ValueError(
                "the process group of Muon was destroyed, and ranks can exchange no matrices; take no step after "
                "destroy_process_group(), or build a new optimizer in a new process group"
            )
        if overlap is not None:
            self.finish()
            overlap.ready()
        with trace_range("check"):
            faults, grads, moved, self._seen = checked_inputs(rank, self._iterations, groups, state, self._seen)
            if rank.options.decay_follows_lr:
                unknown = (highest_rate(trained.group) is None for trained in rank.params)
                pairs = zip(unknown, faults, strict=True)
                faults = [Fault.HIGHEST_RATE_UNKNOWN if is_unknown else fault for is_unknown, fault in pairs]
        if any(faults) or not rank.report.is_clean():
            self.raise_pending(faults if alone else ())
        excluded = frozenset[int]()
        missing = self._agreed_missing(faults) if rank.options.skips_missing else frozenset[int]()
        if any(faults) or missing:
            # The owner, which gets no piece, must not report a matrix that is not finite.
            if not alone or missing:
                rank.report.add(faults)
            allowed = Fault.NONE, Fault.NO_GRADIENT
            excluded = missing | frozenset(i for i, fault in enumerate(faults) if fault not in allowed)
            grads = [None if index in excluded else grad for index, grad in enumerate(grads)]
        if moved and STORAGE_FAULTS.isdisjoint(faults):
            # For example after `param.data = ...`.
            params = [with_momentum(param, state[param.param]["momentum_buffer"]) for param in rank.params]
            self.rebuild(params, rank.options)
        dtypes = {None if g is None else g.dtype for g, p in zip(grads, rank.params, strict=True) if p.on_mesh}
        return StepGradients(grads, excluded, None not in dtypes and len(dtypes) <= 1, rank.params)

    def _agreed_missing(self, faults: Sequence[Fault]) -> frozenset[int]:
        """The parameters without a gradient on some rank that shares matrices. The host waits."""
        missing = torch.tensor([fault is Fault.NO_GRADIENT for fault in faults], dtype=torch.int32, device="cpu")
        missing = on_device(missing, self.rank.device)
        if work := self.rank.agreement.start_max_over_peers(missing):
            work.wait()
        return frozenset(missing.nonzero().flatten().tolist())

    def bad_gradients(self, gradients: StepGradients, *, scaled: bool) -> Tensor:
        """Whether a gradient on this rank is missing or not finite, () bool on the device. Adds both to the report.

        `scaled`: a GradScaler looks for gradients that are not finite.
        """
        rank = self.rank
        pairs = zip(gradients.grads, rank.params, strict=True)
        if any(grad is None and param.on_mesh for grad, param in pairs):
            return torch.ones((), dtype=torch.bool, device=rank.device)
        # Newton-Schulz cannot normalize by a norm that overflows.
        numbers, broken = ([], None) if scaled else nonfinite(gradients.grads, 2, rank.device)
        if not numbers or broken is None:
            return torch.zeros((), dtype=torch.bool, device=rank.device)
        rank.report.add_where(rank.numbers(numbers), broken, Fault.NOT_FINITE)
        return broken.any()

    def run(self, gradients: StepGradients, scaling: Scaling | None = None) -> None:
        """Run a step. `scaling`: the flag of a step that may change nothing."""
        rank, parts = self.rank, self._parts
        if scaling is not None:
            rank.report.add_skipped(scaling.skipped, scaling.differs)
            if parts.passes is not None:
                gradients = replace(gradients, scaling=scaling)
            elif scaling.skipped:  # The host waits for the flag, because no kernels read the flag.
                gradients.release(range(len(gradients.grads)) if rank.options.release_grads else ())
                rank.report.begin([None] * len(gradients.grads))
                return rank.report.send()
            else:
                gradients = replace(gradients, inverse=scaling.inverse)
        rank.buffers.memory.take()
        self.workspace.take()
        rank.report.begin(gradients.grads)
        try:
            parts.runner.run(gradients)
        except RuntimeError as error:
            rank.agreement.locate(error, rank.report.steps)
            raise
        with trace_range("tell"):
            rank.report.send()
        self.workspace.free()
        if self.overlap is None or not self.overlap.holds_memory:
            rank.buffers.memory.free()

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
            faults = report.unsent()
        else:
            report.clear()
        reported = [max(pair) for pair in zip_longest(reported, faults, fillvalue=Fault.NONE)]
        if not any(reported):
            return
        own = reported[: len(self.rank.params)]
        if self.offload is not None:
            # Momentum on the host is healed next.
            self.offload.synchronize()
        # Non-finite momentum would keep later updates zero.
        for fault, storage in zip(own, self.rank.storage, strict=True):
            if fault in (Fault.NOT_FINITE, Fault.NO_GRADIENT):
                storage.momentum.nan_to_num_(0.0, 0.0, 0.0)
        names, options = report.names[: len(own)], self.rank.options
        check_faults(names, own, ALLOWED[options.on_bad_gradient], "" if alone else report.details(reported))
        report.tell_others(reported)
        if options.skips_step:
            warn_of_skipped(names, own)

    def finish(self) -> None:
        """End what the last step left to a forward."""
        if self.overlap is not None:
            self.overlap.finish()

    def synchronize(self) -> None:
        """End the last step, and wait for transfers."""
        self.finish()
        if self.offload is not None:
            self.offload.synchronize()

    def attach(self) -> None:
        """Let the overlap run this engine. Once all ranks have an engine, because an earlier one may stay in use."""
        if self.overlap is not None:
            self.overlap.attach(self.rank)

    def free(self) -> None:
        """End the last step, and free the buffers until the next, also with `keep_buffers`."""
        self.finish()
        # First, because a captured step repeats addresses and collectives.
        self._parts.runner.release()
        self.rank.buffers.memory.free(kept=True)
        self.workspace.free(kept=True)

    def warm_up(self) -> None:
        """Run the exchange once, without a step, in the allocated buffers. Collective."""
        if not is_host(self.rank.device):
            self.rank.exchange.warm_up(self.rank.plan)
            self.rank.buffers.memory.free()

    def is_plan_for(self, params: Sequence[TrainedParam]) -> bool:
        """Whether these parameters are the planned ones."""
        # Names too, because parameters are frozen and thawed between checkpoints.
        if [param.fqn for param in params] != [param.fqn for param in self.rank.params]:
            return False
        pairs = zip(params, self.rank.params, self.rank.iterations, strict=True)
        return all(new.param is old.param and not iteration_changed(new.group, i) for new, old, i in pairs)

    def check(self, options: MuonOptions) -> None:
        """Raise OptionError if the parts of this engine cannot take the options."""
        named = [(trained.fqn, trained.param) for trained in self.rank.params]
        parameters, device = self.rank.plan.parameters, self.rank.device.type
        check_parts(PlanContext(options, self._algorithm, parameters, named, device), self.features_of)

    def rebuild(self, params: Sequence[TrainedParam], options: MuonOptions, states: MatrixStates | None = None) -> None:
        """The same plan and buffers for new storage, momentum, `offload` or states of matrices."""
        storage = tuple(map(storage_of, params, self.rank.plan.parameters))
        rank = replace(self.rank, params=tuple(params), storage=storage, options=options)
        self._make(rank, self._states if states is None else states, self._parts)
        self.attach()
