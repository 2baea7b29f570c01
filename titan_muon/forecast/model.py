"""A model on the meta device with Muon's plan, and the estimate of its step and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..adamw import AdamW
from ..assignment.optimizer_set import OptimizerSet
from ..assignment.rules import Assignment
from ..engine.engine import elements_of, plan_step
from ..engine.layout.types import Plan
from ..engine.tensors.matrices import check_splits
from ..engine.tensors.names import names_in
from ..muon import Muon
from ..options import Machine
from ..planner.machine import MachineRates, planning_machine
from ..planner.ownership import OwnedTotals
from ..planner.planner import passes_of
from ..planner.summary import Summary, summarize
from ..planner.timeline import Timeline, timeline
from ..planner.walk import PlanCost
from ..selection import algorithms_in, check_used, select
from .memory import Memory, mean_elements, memory_per_rank, muon_of, owner_loads

ADAMW_BYTES = 28
"""Bytes per float32 element in a fused step: reads weight, gradient and two averages, writes all but the gradient."""
ADAMW_BYTES_BFLOAT16 = 20
"""With averages in bfloat16."""


@dataclass(frozen=True)
class PlannedModel:
    """A model, or a pipeline stage, on `world_size` ranks."""

    world_size: int
    ranks: range  # of this stage
    device: str  # type of device to plan for, present or not
    parameters: Mapping[str, Tensor]  # by name, with the shards of the first rank, the largest
    optimizers: OptimizerSet
    plan: Plan | None  # None without Muon parameters

    @property
    def assigned(self) -> tuple[Assignment, ...]:
        return self.optimizers.assignments


@dataclass(frozen=True)
class Estimate:
    """Modelled time and memory of a planned model. `loads`: of each rank, if parameters are owned."""

    machine: MachineRates
    summary: Summary | None
    timeline: Timeline | None
    loads: Mapping[int, OwnedTotals]
    memory: Memory
    others: float  # seconds of AdamW outside of Muon's parameters
    adamw: float  # seconds of AdamW for all parameters


def plan_of(muon: Muon | None, device: str, machine: Machine | None = None) -> Plan | None:
    """Muon's plan for a type of device; None without trained parameters. `machine`: instead of Muon's own.

    Raises ValueError as `Muon.build`, except for errors that only several processes have, and also for an option that
    only the algorithm of another pipeline stage reads.
    """
    trained = (
        []
        if muon is None
        else [
            (fqn, parameter, group)
            for group in muon.param_groups
            for fqn, parameter in zip(names_in(group), group["params"], strict=True)
            if parameter.requires_grad
        ]
    )
    if muon is None or not trained:
        return None
    named = [(fqn, parameter) for fqn, parameter, _ in trained]
    check_splits([fqn for fqn, _ in named], muon.options.split)
    check_used(muon.options, algorithms_in(muon.options, muon.param_groups))
    options = muon.options if machine is None else replace(muon.options, machine=machine)
    groups, tensors = [group for _, _, group in trained], [parameter for _, parameter in named]
    selected = select(options, groups, tensors, torch.device(device))
    plan = plan_step(named, groups, selected)
    # A rule needs no passes, but the forecast of memory does.
    return replace(plan, passes=passes_of(elements_of(named, selected), selected.options))


def estimate_of(model: PlannedModel, machine: Machine) -> Estimate:
    """Time and memory of a step. Raises OptionError for an unreadable or invalid file of the machine."""
    plan, muon, rates = model.plan, muon_of(model.optimizers), planning_machine(machine, model.device)
    summary, times = None, None
    if plan is not None and muon is not None:
        cost = PlanCost.from_plan(plan, rates)
        summary, times = summarize(plan, cost), timeline(plan, rates, overlap=muon.options.overlap, cost=cost)
    loads = owner_loads(model.parameters, summary, model.ranks)
    memory = memory_per_rank(model.parameters, model.optimizers, plan, summary, loads, model.device)
    itemsize = max((parameter.element_size() for parameter in model.parameters.values()), default=4)
    adamw = model.optimizers.optimizers.get("adamw")
    in_bfloat16 = isinstance(adamw, AdamW) and adamw.state_dtype == "bfloat16"
    adamw_bytes = ADAMW_BYTES_BFLOAT16 if in_bfloat16 else ADAMW_BYTES * itemsize // 4
    elements = {a.fqn: mean_elements(model.parameters[a.fqn], len(model.ranks)) for a in model.assigned}
    rest = sum(elements[a.fqn] for a in model.assigned if a.optimizer != "muon")
    others, whole = (rates.pass_seconds(count * adamw_bytes) for count in (rest, sum(elements.values())))
    return Estimate(rates, summary, times, loads, memory, others, whole)
