"""What Muon builds before its first step: the plan, this rank's program, buffers, and the executor of both."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import registry
from .comm.agreement import Agreement, PlanReport
from .comm.exchange import Collectives, Exchange
from .comm.faults import Fault, FaultReport, fault_of
from .features.early import Overlap
from .options import Machine as MachineOptions
from .options import MuonOptions, OptionError
from .options import Overlap as OverlapOption
from .orthogonalize import DTYPES, Dispatch, Iteration, Method, kernels_for
from .plan.planner import make_plan
from .plan.program import collective_ranks, make_program
from .plan.search.state import with_state_ranks
from .plan.terms.blocks import blocks_reason
from .plan.terms.groups import components
from .plan.terms.layout import Geometries
from .plan.terms.machine import Machine, machine_of
from .plan.terms.slices import teams_in
from .plan.terms.types import Matrix, Parameter, Plan
from .plan.terms.work import Work, WorkOf
from .state.groups import iteration_changed, iteration_of
from .state.host import check_offload
from .state.momentum import check_not_owned, kept_by
from .step.executor import Executor, RankPlan
from .tensors.dtensor import mesh_axes, step_device, storage_device
from .tensors.matrices import check_splits, planned
from .tensors.mesh import without_groups
from .tensors.storage import TrainedParam, storage_fault


@dataclass(frozen=True)
class Built:
    """A plan with all that runs it on this rank."""

    planned: RankPlan
    exchange: Exchange
    faults: FaultReport
    overlap: Overlap
    executor: Executor


def plan_rank(params: Sequence[TrainedParam], options: MuonOptions, rank: int, own: Collection[str] = ()) -> RankPlan:
    """Plan the step of these parameters. Raises ValueError as `plan_step` does, and for storage that is not as planned.

    `own` are those plain tensors that ranks have each for itself.
    """
    if not params:
        return _nothing(options, rank)
    device = step_device(params[0].param)
    machine = planning_machine(options.machine, device.type)
    dispatch = Dispatch.of(options, device.type, kernels_for(options.ns_kernel, device), machine)
    iterations = tuple(iteration_of(trained.group) for trained in params)
    named = [(trained.fqn, trained.param) for trained in params]
    kept = {trained.fqn: ranks for trained in params if (ranks := kept_by(trained))}
    plan = plan_step(named, iterations, dispatch, options, own, kept)
    geometries = Geometries(plan.parameters)
    first = {matrix.work: matrix for matrix in reversed(plan.matrices)}
    chosen = (first[work] for work in range(len(plan.works)))
    made = RankPlan(
        params=tuple(params),
        iterations=iterations,
        methods=tuple(_method(dispatch, m, iterations[m.parameter]) for m in chosen),
        plan=plan,
        program=make_program(plan, rank, geometries),
        geometries=geometries,
        device=device,
    )
    _check_storage(made, options)
    return made


def _nothing(options: MuonOptions, rank: int) -> RankPlan:
    """The plan of a rank without matrices, such as a pipeline stage that has the embedding alone."""
    plan, geometries = Plan((), (), (), (), 1, options.wire_bytes, ()), Geometries(())
    return RankPlan((), (), (), plan, make_program(plan, rank, geometries), geometries, torch.device("cpu"))


def plan_step(
    named: Sequence[tuple[str, Tensor]],
    iterations: Sequence[Iteration],
    dispatch: Dispatch,
    options: MuonOptions,
    own: Collection[str] = (),
    kept: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Plan:
    """The plan of a Muon step on these (name, parameter) pairs, each with its Newton-Schulz iteration.

    Plain tensors are copies of each other but for those named in `own`. `kept` are the ranks that keep a momentum now,
    by name, where not all that have the parameter do.
    Parameters may be on the meta device and on a mesh of the fake process group: nothing is communicated. Raises
    ValueError for a parameter that is no stack of matrices, and for a split that matches nothing or does not fit.
    """
    check_splits((fqn for fqn, _ in named), options.split)
    parameters = [planned(fqn, tensor, options.split, own=fqn in own) for fqn, tensor in named]
    check_offload(parameters, options)
    check_not_owned(dict(named), options)
    plan = plan_parameters(parameters, iterations, dispatch, options, kept)
    if options.overlap != "none":
        _check_overlap(plan, [fqn for fqn, tensor in named if without_groups(tensor)], options.overlap)
    if said := blocks_reason(options, parameters, plan.parameters):
        warnings.warn(f"{said}; the other modes are exact", stacklevel=7)
    return plan


def plan_parameters(
    parameters: Sequence[Parameter],
    iterations: Sequence[Iteration],
    dispatch: Dispatch,
    options: MuonOptions,
    kept: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Plan:
    """The plan of a Muon step on parameters as the planner sees them. Raises ValueError as `make_plan` does."""
    # Packages register exchanges of their own under other names; the planner knows the patterns that they are run by.
    pattern = registry.exchange_entry(options.exchange).pattern
    machine = planning_machine(options.machine, dispatch.device)
    work_of, options = _work_of(iterations, dispatch, options.wire_bytes), replace(options, exchange=pattern)
    return make_plan(with_state_ranks(parameters, options, work_of, kept), work_of, options, machine)


def planning_machine(options: MachineOptions, device: str) -> Machine:
    """The machine that a step on a type of device is planned for. Raises OptionError for a file that is no machine."""
    measured = None
    if options.file is not None:
        try:
            measured = Path(options.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"= {options.file!r} cannot be read ({error}); name the machine.json that `make gpu` wrote"
            raise OptionError("machine.file", problem) from error
    return machine_of(options, device, measured)


def _method(dispatch: Dispatch, matrix: Matrix, computed: Iteration) -> Method:
    """What orthogonalizes a matrix of a plan."""
    count = 1 if matrix.slice is None else matrix.slice.count
    return dispatch.choose(*matrix.whole_shape, computed.steps, count)


def _work_of(iterations: Sequence[Iteration], dispatch: Dispatch, wire_bytes: int) -> WorkOf:
    """What orthogonalizing a matrix costs by the method that will run."""

    def work(index: int, rows: int, cols: int, slices: int = 1, /) -> Work:
        steps = iterations[index].steps
        method = dispatch.choose(rows, cols, steps, slices)
        # With the method and all that it computes in the plan, its digest also says that ranks compute alike.
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


def plan_changed(planned: RankPlan, params: Sequence[TrainedParam]) -> bool:
    """Whether the step of these parameters is another one than was planned."""
    # What is trained may have changed too: parameters are frozen and thawed between checkpoints.
    if [each.fqn for each in params] != [each.fqn for each in planned.params]:
        return True
    pairs = zip(params, planned.params, planned.iterations, strict=True)
    return any(new.param is not old.param or iteration_changed(new.group, computed) for new, old, computed in pairs)


def faults_here(
    built: Built, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]
) -> tuple[list[Fault], bool]:
    """What is wrong with each parameter on this rank before a step; groups and state are the optimizer's.

    And whether one of them or its momentum is stored elsewhere than the views are of.
    """
    planned = built.planned
    given = {fqn: param for group in groups for fqn, param in zip(group["param_names"], group["params"], strict=True)}
    found: list[Fault] = []
    group, changed, moved = None, False, False
    for trained, storage, computed in zip(planned.params, built.executor.storage, planned.iterations, strict=True):
        # The parameters of a group follow each other: one look at it does for all of them.
        if trained.group is not group:
            group, changed = trained.group, iteration_changed(trained.group, computed)
        average = state.get(trained.param, {}).get("momentum_buffer")
        there = storage.is_of(trained)
        fault = fault_of(trained, given.get(trained.fqn), average, there=there)
        found.append(Fault.NEWTON_SCHULZ_CHANGED if changed else fault)
        moved = moved or not there
    return found, moved


def report_of(planned: RankPlan, options: MuonOptions, groups: Sequence[Mapping[str, Any]]) -> PlanReport:
    """What the ranks that made this plan have to agree on with the others before the first step."""
    plan = planned.plan
    # A learning rate in a tensor prints its device, which differs between ranks.
    hyperparameters = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in groups
    ]
    teams = {team for bucket in plan.buckets for team in teams_in(bucket, plan.matrices).values()}
    travelling, lines = collective_ranks(plan, planned.geometries)
    apart = travelling if options.overlap == "backward" else set()
    buckets = tuple(sorted({*(travelling - apart), *teams, *lines}))
    skips = options.missing_grad == "skip"
    sharing = tuple(sorted(set(components(_sharing(plan, skips=skips)).values())))
    # Groups of mesh axes exist already. By rule and not by looking: all ranks of the world must make the same groups,
    # those outside of a mesh too.
    world = tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
    there = {world, *(axis for trained in planned.params for axis in mesh_axes(trained.param))}
    return PlanReport(
        ranks=tuple(sorted({rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks})),
        buckets=buckets,
        groups=tuple(sorted({*buckets, *sharing} - there)),
        apart=tuple(sorted(apart)),
        sharing=sharing,
        signature=f"{plan.digest()} {options.wire_dtype} {options.rounding} {options.missing_grad} {options.nonfinite} "
        f"{hyperparameters}",
    )


def _check_overlap(plan: Plan, owned: Sequence[str], overlap: OverlapOption) -> None:
    """Raise OptionError for gradients of which nothing tells in backward that they are reduced, and where owned
    parameters, by their names, leave nothing to be gathered."""
    if owned and not plan.buckets:
        raise OptionError(
            "overlap",
            f"= {overlap!r} has nothing to {'gather' if overlap == 'backward' else 'return'} in {overlap}: owned "
            f"parameters are whole where they are orthogonalized ({', '.join(owned[:5])}), and no other matrix "
            "travels; set 'none'",
        )
    plain = [plan.parameters[index].fqn for index in copied(plan)] if overlap == "backward" else []
    if plain:
        raise OptionError(
            "overlap",
            f"= 'backward' takes DTensors, and {', '.join(plain[:5])} are plain tensors, whose gradients "
            "DistributedDataParallel reduces when their hooks have run; shard the model by fully_shard, or set 'none'",
        )


def _check_storage(planned: RankPlan, options: MuonOptions) -> None:
    """Raise ValueError for storage of the parameters on this rank that is not as planned."""
    for index, trained in enumerate(planned.params):
        where = storage_device(trained.param)
        if options.offload == "parameters" and trained.here and where.type != "cpu":
            raise ValueError(
                f"{trained.fqn}: is on {where}, and offload = 'parameters' takes what is on the host; keep all of "
                "Muon's parameters there, or none"
            )
        fault = storage_fault(trained.fqn, trained.param, planned.geometries[index], planned.program.rank)
        if fault is not None:
            raise ValueError(fault)


def _sharing(plan: Plan, *, skips: bool) -> Iterator[tuple[int, ...]]:
    """The sets of ranks that must agree in each step on which gradients there are."""
    yield from (bucket.group for bucket in plan.buckets)
    # Copies of a plain tensor may get a gradient on some ranks and not on others, and a step that may skip must skip on
    # all of them. Copies of a DTensor get theirs from one collective, all or none, so that such a step can be silent.
    for index, ranks in enumerate(plan.home):
        if len(ranks) > 1 and (skips or plan.parameters[plan.matrices[index].parameter].plain):
            yield ranks


def copied(plan: Plan) -> tuple[int, ...]:
    """The plain tensors of which one rank's result goes to all, by index."""
    # A DTensor's gradients come from one collective. A plain one's may not have been reduced, which would go unseen.
    travelling = {plan.matrices[number].parameter for bucket in plan.buckets for number in bucket.matrices}
    return tuple(index for index in sorted(travelling) if plan.parameters[index].plain)


def build(planned: RankPlan, options: MuonOptions, collectives: Collectives, agreement: Agreement) -> Built:
    """Allocate buffers and workspace. The ranks have agreed, so that all process groups are there."""
    wire = DTYPES[options.wire_dtype]
    early = options.overlap == "backward"
    exchange = Exchange(planned.program, planned.device, wire, collectives, agreement, apart=early)
    faults = FaultReport(len(planned.params), planned.device, agreement, copied(planned.plan))
    overlap = Overlap(planned, exchange, faults, active=early)
    return Built(planned, exchange, faults, overlap, executor_of(planned, exchange, faults, overlap, options))


def executor_of(
    planned: RankPlan, exchange: Exchange, faults: FaultReport, overlap: Overlap, options: MuonOptions
) -> Executor:
    """The executor of a plan."""
    # A matrix at home is rounded to what the wire would carry, or layouts would differ in their bits. float16 itself
    # would overflow at home.
    dtype = torch.float32 if options.wire_dtype == "float32" else torch.bfloat16
    zeroes, releases = options.nonfinite != "propagate", options.release_grads
    stochastic = options.rounding == "stochastic"
    return Executor(
        planned,
        exchange,
        faults,
        overlap.memory,
        zeroes=zeroes,
        releases=releases,
        stochastic=stochastic,
        offload=options.offload,
        dtype=dtype,
    )


def rebuild(built: Built, params: Sequence[TrainedParam], options: MuonOptions) -> Built:
    """The same plan and buffers for parameters whose state or hyperparameters were replaced."""
    planned = replace(built.planned, params=tuple(params))
    executor = executor_of(planned, built.exchange, built.faults, built.overlap, options)
    return replace(built, planned=planned, executor=executor)
