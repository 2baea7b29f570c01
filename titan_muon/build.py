"""What Muon builds before its first step: the plan, this rank's program, buffers, and the executor of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import registry
from .agreement import Agreement, RankReport
from .dtensor import local
from .exchange import Collectives, Exchange
from .executor import Executor, RankPlan
from .faults import NonfiniteCounter
from .matrices import check_splits, planned
from .options import MuonOptions
from .orthogonalize import DTYPES, Dispatch, Iteration, iteration, kernels_for
from .params import TrainedParam, storage_fault
from .plan.cost import Work
from .plan.groups import connected
from .plan.layout import Geometries
from .plan.planner import make_plan
from .plan.program import make_program
from .plan.types import Plan


@dataclass(frozen=True)
class Built:
    """A plan with all that runs it on this rank."""

    planned: RankPlan
    exchange: Exchange
    counter: NonfiniteCounter | None
    executor: Executor


def plan_rank(params: Sequence[TrainedParam], options: MuonOptions, rank: int) -> RankPlan:
    """Plan the step of these parameters. Raises ValueError as `plan_step` does."""
    if not params:
        raise ValueError("Muon has no parameter to train: it was given none, or all of them are frozen")
    device = local(params[0].param).device
    dispatch = Dispatch.of(options, device.type, kernels_for(options.ns_kernel, device))
    iterations = tuple(iteration_of(trained.group) for trained in params)
    plan = plan_step([(trained.fqn, trained.param) for trained in params], iterations, dispatch, options)
    geometries = Geometries(plan.parameters)
    first = {matrix.work: matrix for matrix in reversed(plan.matrices)}
    chosen = (first[work] for work in range(len(plan.works)))
    return RankPlan(
        params=tuple(params),
        iterations=iterations,
        methods=tuple(dispatch.choose(m.rows, m.cols, iterations[m.parameter].steps) for m in chosen),
        plan=plan,
        program=make_program(plan, rank, geometries),
        geometries=geometries,
        device=device,
    )


def plan_step(
    named: Sequence[tuple[str, Tensor]], iterations: Sequence[Iteration], dispatch: Dispatch, options: MuonOptions
) -> Plan:
    """The plan of a Muon step on these (name, parameter) pairs, each with its Newton-Schulz iteration.

    Parameters may be on the meta device and on a mesh of the fake process group: nothing is communicated. Raises
    ValueError for a parameter that is no stack of matrices, and for a split that matches nothing or does not fit.
    """
    check_splits((fqn for fqn, _ in named), options.split)
    parameters = [planned(fqn, tensor, options.split) for fqn, tensor in named]
    # Packages register exchanges of their own under other names; the planner knows the patterns that they are run by.
    pattern = registry.exchange_entry(options.exchange).pattern
    return make_plan(parameters, _work_of(iterations, dispatch), replace(options, exchange=pattern))


def _work_of(iterations: Sequence[Iteration], dispatch: Dispatch) -> Callable[[int, int, int], Work]:
    """What orthogonalizing a matrix costs by the method that will run."""

    def work(index: int, rows: int, cols: int) -> Work:
        steps = iterations[index].steps
        method = dispatch.choose(rows, cols, steps)
        # With the method and all that it computes in the plan, its digest also says that ranks compute alike.
        return Work(
            method=f"{method}; {iterations[index]}",
            flops=method.flops(rows, cols, steps),
            reason=method.reason,
            batch=method.batch,
            bytes=method.work_bytes(rows, cols, dispatch.device),
        )

    return work


def iteration_of(group: Mapping[str, Any]) -> Iteration:
    """The Newton-Schulz iteration of a parameter group. Raises ValueError for coefficients that are none."""
    return iteration(group["ns_coefficients"], group["ns_steps"], group["eps"])


def report_of(planned: RankPlan, options: MuonOptions, groups: Sequence[Mapping[str, Any]]) -> RankReport:
    """What this rank has to say to the others before the first step."""
    plan, rank = planned.plan, planned.program.rank
    hyperparameters = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    faults = (
        storage_fault(trained.fqn, trained.param, planned.geometries[index], rank)
        for index, trained in enumerate(planned.params)
    )
    return RankReport(
        ranks=tuple(sorted({rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks})),
        groups=tuple(dict.fromkeys(run.bucket.group for run in planned.program.buckets)),
        peers=connected(rank, _sharing(plan, skips=options.missing_grad == "skip")),
        signature=f"{plan.digest()} {options.wire_dtype} {options.missing_grad} {options.nonfinite} {hyperparameters}",
        fault=next((fault for fault in faults if fault is not None), None),
    )


def _sharing(plan: Plan, *, skips: bool) -> Iterator[tuple[int, ...]]:
    """The sets of ranks that must agree in each step on which gradients there are."""
    yield from (bucket.group for bucket in plan.buckets)
    # Copies of a plain tensor may get a gradient on some ranks and not on others, and a step that may skip must skip on
    # all of them. Copies of a DTensor get theirs from one collective, all or none, so that such a step can be silent.
    for index, ranks in enumerate(plan.home):
        if len(ranks) > 1 and (skips or plan.parameters[plan.matrices[index].parameter].plain):
            yield ranks


def build(planned: RankPlan, options: MuonOptions, collectives: Collectives, agreement: Agreement) -> Built:
    """Allocate buffers and workspace. The ranks have agreed, so that all process groups are there."""
    wire = DTYPES[options.wire_dtype]
    exchange = Exchange(planned.program, planned.device, wire, collectives, agreement)
    counter = None
    if options.nonfinite != "propagate":
        counter = NonfiniteCounter(len(planned.params), planned.device)
    # A matrix at home is rounded to what the wire would carry, or layouts would differ in their bits. float16 itself
    # would overflow at home.
    whole = torch.float32 if wire == torch.float32 else torch.bfloat16
    executor = Executor(planned, exchange, counter, releases=options.release_grads, dtype=whole)
    return Built(planned, exchange, counter, executor)
