"""From tensors to a plan: the planner's parameters, the work of matrices, and the machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .algorithms import algorithm_of
from .comm.agreement import PlanReport, digest_of
from .comm.report import Carried
from .features import check_plan
from .options import HYPERPARAMETERS, SHARED, Machine, MuonOptions, OptionError
from .orthogonalize import Dispatch, Iteration, Method, kernels_for, measured_choices
from .plan.planner import make_plan
from .plan.program import collective_ranks
from .plan.search.state import with_state_ranks
from .plan.terms.layout import Geometries
from .plan.terms.machine import MachineRates, machine_of
from .plan.terms.pieces import components
from .plan.terms.types import Layout, Plan, teams_in
from .plan.terms.work import FLOAT32_COST, ElementwiseCost, Work, WorkOf, traffic
from .state.groups import iteration_of
from .state.momentum import kept_by
from .state.plan_context import PlanContext
from .step.foreach import WIDE_BYTES, chunk_bytes
from .step.rounding import BYTES as CHUNK_BYTES
from .tensors.dtensor import mesh_axes, step_device, storage_device
from .tensors.matrices import planned
from .tensors.storage import TrainedParam, storage_fault


def plan_of(params: Sequence[TrainedParam], options: MuonOptions, separate: Mapping[str, Layout]) -> Plan:
    """The plan of a step. `separate`: from `separate_layouts`."""
    if not params:
        # For example a pipeline stage with the embedding alone.
        return Plan((), (), (), (), 1, options.wire_bytes, ())
    check_devices(params)
    iterations = tuple(iteration_of(trained.group) for trained in params)
    named = [(trained.fqn, trained.param) for trained in params]
    kept = {trained.fqn: ranks for trained in params if (ranks := kept_by(trained))}
    dispatch = dispatch_of(device_of(params), options)
    return plan_step(named, iterations, dispatch, options, separate, kept)


def check_devices(params: Sequence[TrainedParam]) -> None:
    """Raise ValueError for parameters on several devices, or on a device without streams."""
    first = params[0]
    if problem := missing_streams(device_of(params).type):
        raise ValueError(f"{first.fqn}: {problem}")
    for trained in params:
        if step_device(trained.param) != step_device(first.param):
            raise ValueError(
                f"{trained.fqn}: is on {step_device(trained.param)}, and {first.fqn} on {step_device(first.param)}; "
                "move all parameters of a Muon to one device, or build a Muon for each device"
            )


def missing_streams(kind: str) -> str:
    """The problem of a device type without streams, and a remedy; empty for other types."""
    # PyTorch has no module for `meta`, where nothing runs.
    if hasattr(getattr(torch, kind, torch), "Stream"):
        return ""
    return (
        f"PyTorch {torch.__version__} has no streams on {kind}, and a step needs them; install PyTorch 2.15 or newer, "
        "or move the model to the CPU"
    )


def device_of(params: Sequence[TrainedParam]) -> torch.device:
    """The device for orthogonalization."""
    return step_device(params[0].param) if params else torch.device("cpu")


def dispatch_of(device: torch.device, options: MuonOptions) -> Dispatch:
    """The choice of algorithms."""
    machine = planning_machine(options.machine, device.type)
    kernels, choices = kernels_for(options.ns_kernel, device), measured_choices(device)
    return Dispatch.of(options, device.type, kernels, machine, float16=choices.float16)


def methods_of(plan: Plan, iterations: Sequence[Iteration], dispatch: Dispatch) -> tuple[Method, ...]:
    """The algorithm of each work."""
    first = {matrix.work: matrix for matrix in reversed(plan.matrices)}
    methods = []
    for matrix in (first[work] for work in range(len(plan.works))):
        count = 1 if matrix.slice is None else matrix.slice.count
        methods.append(dispatch.choose(*matrix.whole_shape, iterations[matrix.parameter].steps, count))
    return tuple(methods)


def plan_step(
    named: Sequence[tuple[str, Tensor]],
    iterations: Sequence[Iteration],
    dispatch: Dispatch,
    options: MuonOptions,
    separate: Mapping[str, Layout] = MappingProxyType({}),
    kept: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Plan:
    """The plan of a step on (name, parameter) pairs, each with a Newton-Schulz iteration.

    `separate`: from `separate_layouts`. `kept`: present state ranks by name, if not all holders. Never communicates:
    parameters may be on the meta device and the fake process group. Raises ValueError for a parameter without matrices,
    and for a split with a mismatched shape.
    """
    if options.fused == "auto":
        from .algorithms.fused import with_fused

        options = with_fused(options, torch.device(dispatch.device), [tensor for _, tensor in named])
    parameters = [planned(fqn, tensor, options.split, separate.get(fqn)) for fqn, tensor in named]
    dtypes = frozenset(tensor.dtype for _, tensor in named)
    passes, machine = passes_of(dtypes, options, dispatch.device), planning_machine(options.machine, dispatch.device)
    work_of = _work_of(iterations, dispatch, options.wire_bytes)
    plan = make_plan(with_state_ranks(parameters, options, work_of, kept), work_of, options, machine, passes)
    check_plan(PlanContext(options, parameters, plan, named, iterations, dispatch.device), algorithm_of(options))
    return plan


def passes_of(dtypes: Collection[torch.dtype], options: MuonOptions, device: str) -> ElementwiseCost:
    """Temporary memory and traffic of the element-wise stages. Gradients have the dtypes of the weights."""
    algorithm, limit = algorithm_of(options), chunk_bytes(device)
    state_bytes = 2 if options.state_dtype == "bfloat16" else 4
    advance, apply, drawn = [0], [0], False
    # A step on an accelerator may have to keep the values, because its norm is not finite.
    undone = options.skips + (device != "cpu" and not options.fused)
    for dtype in dtypes:
        wide = max(state_bytes, dtype.itemsize)
        # The nesterov blend (or the wide gradient that becomes the blend), and the wide momentum.
        kept = options.skips * state_bytes
        if not options.fused:
            kept += wide * (1 + (state_bytes < wide) + (device != "cpu"))
        advance.append(kept)
        stochastic = options.rounding == "stochastic" and dtype == torch.bfloat16
        drawn = drawn or stochastic
        scratch = CHUNK_BYTES if stochastic else dtype.itemsize if dtype.itemsize > options.wire_bytes else 0
        temporary = scratch + (max(WIDE_BYTES, dtype.itemsize) if options.cautious else 0)
        apply.append((0 if options.fused else temporary) + undone * dtype.itemsize)
    passes = (
        traffic(
            dtype.itemsize,
            state_bytes,
            options.wire_bytes,
            stochastic=options.rounding == "stochastic" and dtype == torch.bfloat16,
            cautious=options.cautious,
            fused=options.fused is True,
        )
        for dtype in dtypes
    )
    return ElementwiseCost(
        advance_elements=limit // WIDE_BYTES,
        advance_bytes=max(advance),
        apply_elements=limit // (CHUNK_BYTES if drawn else WIDE_BYTES),
        apply_bytes=max(apply),
        finish_bytes=algorithm.temporary_bytes,
        traffic=max(passes, key=lambda moved: moved.advance + moved.apply, default=FLOAT32_COST.traffic),
    )


def planning_machine(options: Machine, device: str) -> MachineRates:
    """The rates for a device type. Raises OptionError for an unreadable or invalid file."""
    measured = None
    if options.file is not None:
        try:
            measured = Path(options.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"= {options.file!r} cannot be read ({error}); name the machine.json that `make gpu` wrote"
            raise OptionError("machine.file", problem) from error
    return machine_of(options, device, measured)


def _work_of(iterations: Sequence[Iteration], dispatch: Dispatch, wire_bytes: int) -> WorkOf:
    def work(index: int, rows: int, cols: int, slices: int = 1, /) -> Work:
        steps = iterations[index].steps
        method = dispatch.choose(rows, cols, steps, slices)
        # So that equal digests imply equal computations.
        return Work(
            method=f"{method}; {iterations[index]}",
            flops=method.flops(rows, cols, steps),
            reason=method.reason,
            batch=method.batch,
            bytes=method.work_bytes(rows, cols, dispatch.device, wire_bytes),
            dtype=method.dtype,
            team=method.team(rows, cols, steps),
        )

    return work


def checked_plan(
    params: Sequence[TrainedParam], options: MuonOptions, separate: Mapping[str, Layout], rank: int
) -> tuple[Plan, Geometries]:
    """The plan, and the pieces of the parameters."""
    plan = plan_of(params, options, separate)
    geometries = Geometries(plan.parameters)
    check_storage(params, geometries, options, rank)
    return plan, geometries


def check_storage(params: Sequence[TrainedParam], geometries: Geometries, options: MuonOptions, rank: int) -> None:
    """Raise ValueError if storage on this rank differs from the plan."""
    for index, trained in enumerate(params):
        device = storage_device(trained.param)
        if options.offload == "parameters" and trained.on_mesh and device.type != "cpu":
            raise ValueError(
                f"{trained.fqn}: is on {device}, and offload = 'parameters' takes what is on the host; keep all of "
                "Muon's parameters there, or none"
            )
        fault = storage_fault(trained.fqn, trained.param, geometries[index], rank)
        if fault is not None:
            raise ValueError(fault)


LOCAL_OPTIONS = (
    "orthogonalize",
    "ns_dtype",
    "ns_kernel",
    "release_grads",
    "keep_buffers",
    "split",
    "buffer_bytes",
    "machine",
    "offload",
)
"""Options that may differ between ranks, for example `machine.file` between nodes."""


def report_of(
    plan: Plan,
    geometries: Geometries,
    params: Sequence[TrainedParam],
    options: MuonOptions,
    groups: Sequence[Mapping[str, Any]],
    carried: Mapping[str, Carried],
    all_ranks: tuple[int, ...],
    *,
    optional: bool = False,
) -> PlanReport:
    """The part of a plan to agree on before the first step. `all_ranks`: of the process group."""
    # A learning rate in a tensor prints its device, which differs between ranks.
    hyperparameters = [
        {key: group[key].item() if isinstance(group[key], Tensor) else group[key] for key in HYPERPARAMETERS}
        for group in groups
    ]
    parts = {
        "parameters": [(p.fqn, p.layout.shape, p.layout.placements, p.layout.mesh.ranks) for p in plan.parameters],
        "hyperparameters": hyperparameters,
        "options": {name: getattr(options, name) for name in SHARED if name not in LOCAL_OPTIONS},
        "others": [(name, other.names(), len(other.param_groups)) for name, other in carried.items()],
        "plan": plan.digest(),
    }
    teams = {team for bucket in plan.buckets for team in teams_in(bucket, plan.matrices).values()}
    travelling, replica_groups = collective_ranks(plan, geometries)
    exclusive = travelling if options.overlap == "backward" else set()
    buckets = tuple(sorted({*(travelling - exclusive), *teams, *replica_groups}))
    sharing = tuple(sorted(set(components(_sharing(plan, every=options.missing_grad == "skip")).values())))
    # From layouts, because all ranks, also outside a mesh, must create equal groups.
    existing = {all_ranks}
    for trained, parameter in zip(params, plan.parameters, strict=True):
        existing.update(mesh_axes(trained.param, parameter.layout))
    return PlanReport(
        ranks=tuple(sorted({rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks})),
        buckets=buckets,
        groups=tuple(sorted({*buckets, *sharing} - existing)),
        exclusive=tuple(sorted(exclusive)),
        sharing=sharing,
        parts=tuple((name, digest_of(part)) for name, part in parts.items()),
        optional=optional,
    )


def _sharing(plan: Plan, *, every: bool) -> Iterator[tuple[int, ...]]:
    """Sets of ranks that decide together about missing gradients."""
    yield from (bucket.group for bucket in plan.buckets)
    # Replicas of a plain tensor may get a gradient only on some ranks. Replicas of a DTensor get all or none.
    for index, ranks in enumerate(plan.local):
        if len(ranks) > 1 and (every or plan.parameters[plan.matrices[index].parameter].plain):
            yield ranks
