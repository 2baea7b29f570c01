"""A model on the meta device: its plan, and the time and memory of its step, without activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..adamw import AVERAGES, AdamW
from ..assignment.optimizer_set import OptimizerSet
from ..assignment.rules import Assignment
from ..engine.engine import elements_of, plan_step
from ..engine.layout.intervals import Geometries
from ..engine.layout.types import Plan
from ..engine.state.states import state_bytes
from ..engine.step.algorithm import Algorithm
from ..engine.tensors.dtensor import local
from ..engine.tensors.names import named_parameters
from ..features.eight_bit import SCALE_BLOCK
from ..features.offload import TRANSFERS_AT_ONCE
from ..kernels.tables import BLOCK
from ..matrices.stacks import check_splits
from ..muon import Muon
from ..options import Machine, MuonOptions, Offload
from ..owned import is_owned
from ..owned.param import held_elements
from ..planner.machine import MachineRates, planning_machine
from ..planner.owners import state_elements, state_totals
from ..planner.ownership import OwnedTotals
from ..planner.planner import passes_of
from ..planner.summary import Summary, summarize
from ..planner.timeline import Timeline, timeline
from ..planner.walk import PlanCost
from ..selection import algorithm_of, algorithms_in, check_used, select

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


DEVICE_SIZES = ("parameters", "gradients", "optimizer_states", "exchange_buffers", "orthogonalization")
HOST_SIZES = ("host_parameters", "host_gradients", "host_states")


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank with the largest shards and the fullest owner's parameters."""

    parameters: int  # on the device between steps; 0 if offloaded
    gradients: int
    optimizer_states: int  # on the device between steps; if offloaded: the peak of all transfers in a step
    exchange_buffers: int
    orthogonalization: int  # whole matrices and temporary memory, `StepBytes.work`, and the kernels' tables
    host_parameters: int  # pinned, like the next two
    host_gradients: int
    host_states: int
    uncounted: tuple[str, ...]  # optimizers of other packages, with unknown states
    keeps_buffers: bool = False  # whether exchange buffers and whole matrices stay between steps

    @property
    def kept(self) -> int:
        """Bytes of a step that stay between steps, beside the activations."""
        return self.keeps_buffers * (self.exchange_buffers + self.orthogonalization)

    @property
    def sizes(self) -> dict[str, int]:
        counted = {name: getattr(self, name) for name in DEVICE_SIZES}
        return {**counted, "total": sum(counted.values())}

    @property
    def host_sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in HOST_SIZES}


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
    every = [] if muon is None else [(pair, group) for group in muon.param_groups for pair in named_parameters([group])]
    trained = [(pair, group) for pair, group in every if pair[1].requires_grad]
    if muon is None or not trained:
        return None
    named, groups = [pair for pair, _ in trained], [group for _, group in trained]
    check_splits([fqn for fqn, _ in named], muon.options.split)
    check_used(muon.options, algorithms_in(muon.options, muon.param_groups))
    options = muon.options if machine is None else replace(muon.options, machine=machine)
    selected = select(options, groups, [parameter for _, parameter in named], torch.device(device))
    plan = plan_step(named, groups, selected)
    # A rule needs no passes, but the forecast of memory does.
    return replace(plan, passes=passes_of(elements_of(named, selected), selected.options))


def estimate_of(model: PlannedModel, machine: Machine) -> Estimate:
    """Time and memory of a step. Raises OptionError for an unreadable or invalid file of the machine."""
    plan, muon, rates = model.plan, model.optimizers.muon, planning_machine(machine, model.device)
    summary, times = None, None
    if plan is not None and muon is not None:
        cost = PlanCost.from_plan(plan, rates)
        summary, times = summarize(plan, cost), timeline(plan, rates, overlap=muon.options.overlap, cost=cost)
    loads = owner_loads(model.parameters, summary, model.ranks)
    memory = memory_per_rank(model, summary, loads)
    itemsize = max((parameter.element_size() for parameter in model.parameters.values()), default=4)
    adamw = model.optimizers.optimizers.get("adamw")
    in_bfloat16 = isinstance(adamw, AdamW) and adamw.state_dtype == "bfloat16"
    adamw_bytes = ADAMW_BYTES_BFLOAT16 if in_bfloat16 else ADAMW_BYTES * itemsize // 4
    elements = {a.fqn: mean_elements(model.parameters[a.fqn], len(model.ranks)) for a in model.assigned}
    rest = sum(elements[a.fqn] for a in model.assigned if a.optimizer != "muon")
    others, whole = (rates.pass_seconds(count * adamw_bytes) for count in (rest, sum(elements.values())))
    return Estimate(rates, summary, times, loads, memory, others, whole)


def owner_loads(
    parameters: Mapping[str, Tensor], summary: Summary | None, ranks: Iterable[int]
) -> dict[int, OwnedTotals]:
    """Owned matrices, bytes and Muon FLOPs of each rank; empty without owned parameters."""
    owned = [parameter for parameter in parameters.values() if is_owned(parameter)]
    if summary is None or not owned:
        return {}
    matrices, sizes = Counter[int](), Counter[int]()
    for parameter in owned:
        for rank, elements in held_elements(parameter).items():
            matrices[rank] += 1 if parameter.ndim < 3 else -(-elements * len(parameter) // parameter.numel())
            sizes[rank] += elements * parameter.element_size()
    # From the plan: ranks without owned parameters may orthogonalize sharded experts.
    flops = {cost.rank: cost.ns_flops for cost in summary.ranks}
    return {rank: OwnedTotals(matrices[rank], sizes[rank], flops.get(rank, 0)) for rank in ranks}


def memory_per_rank(model: PlannedModel, summary: Summary | None, loads: Mapping[int, OwnedTotals]) -> Memory:
    """Upper bound of the fullest rank's memory."""
    muon, plan, device = model.optimizers.muon, model.plan, model.device
    options = MuonOptions() if muon is None else muon.options
    groups = {fqn: group for group in (muon.param_groups if muon else ()) for fqn in group["param_names"]}
    algorithm = algorithm_of(options, [] if plan is None else [groups.get(p.fqn, {}) for p in plan.parameters])
    # The fullest owner may be another rank than the first, with the largest shards.
    fullest = max(loads, key=lambda rank: loads[rank].bytes, default=0)
    elements = {name: _elements(parameter, fullest) for name, parameter in model.parameters.items()}
    momentum = {} if plan is None else _momentum_elements(plan, elements, options, algorithm)
    optimizer_of = {a.fqn: a.optimizer for a in model.assigned}
    size, moved = Counter[str](), 0
    for fqn, parameter in model.parameters.items():
        optimizer, itemsize = optimizer_of.get(fqn, ""), parameter.element_size()
        # FSDP2's gradients have the dtype and the shards of the parameters.
        held, gradient = elements[fqn] * itemsize, elements[fqn] * itemsize * (optimizer != "")
        # Parameters are on the host together.
        offload: Offload = "parameters" if options.offload == "parameters" else "none"
        states: tuple[int, ...] = ()
        if optimizer == "muon":
            offload, states = options.offload, (momentum_bytes(momentum[fqn], options.state_dtype),)
        elif isinstance(adamw := model.optimizers.optimizers.get(optimizer), AdamW):
            offload = adamw.offloaded
            states = (elements[fqn] * (2 if adamw.state_dtype == "bfloat16" else itemsize),) * len(AVERAGES)
            # AdamW moves everything at once, also parameters and gradients on the host.
            moved += sum(states) * (offload != "none") + 2 * held * (offload == "parameters")
        if offload == "parameters":
            size["host_parameters"] += host_bytes(held, device)
            size["host_gradients"] += host_bytes(gradient, device)
        else:
            size["parameters"] += held
            size["gradients"] += gradient
        if offload == "none":
            size["optimizer_states"] += sum(states)
        else:
            size["host_states"] += sum(host_bytes(state, device) for state in states)
    if plan is not None and summary is not None:
        size["exchange_buffers"] = summary.buffer_bytes_max
        size["orthogonalization"] = summary.work_bytes_max + _table_bytes(plan, summary)
        size["optimizer_states"] += max(state_bytes(plan, algorithm.for_parameter).values(), default=0)
        itemsizes = [model.parameters[fqn].element_size() for fqn in momentum]
        moved = max(moved, _transferred_bytes(summary, options, max(itemsizes)))
    # Optimizers step in turn.
    size["optimizer_states"] += moved
    return Memory(
        **{name: size[name] for name in (*DEVICE_SIZES, *HOST_SIZES)},
        uncounted=tuple(sorted({a.optimizer for a in model.assigned} - {"muon", "adamw"})),
        keeps_buffers=options.keep_buffers or options.cuda_graph is True,
    )


def _momentum_elements(
    plan: Plan, elements: Mapping[str, int], options: MuonOptions, algorithm: Algorithm
) -> dict[str, int]:
    """Elements of each parameter's momentum, on the rank with most."""
    numbered, geometries = list(enumerate(plan.parameters)), Geometries(plan.parameters)
    held = {p.fqn: elements[p.fqn] for _, p in numbered}
    if options.state != "replicated":
        totals = state_totals(plan, geometries)
        rank = max(totals, key=totals.__getitem__)
        on_rank = ((n, p) for n, p in numbered if rank in p.layout.mesh.ranks)
        held = {p.fqn: state_elements(geometries[n], p.state_ranks, rank) for n, p in on_rank}
    return held | {p.fqn: 0 for n, p in numbered if not algorithm.for_parameter(n).momentum}


def _transferred_bytes(summary: Summary, options: MuonOptions, itemsize: int) -> int:
    """Peak of Muon's offloaded bytes on the device. `itemsize`: of the gradients."""
    if options.offload == "none":
        return 0
    # Momentum and gradient share a transfer; the parameter's is smaller.
    with_parameters = options.offload == "parameters"
    element_bytes = momentum_bytes(1, options.state_dtype) + itemsize * with_parameters
    buckets = 2 if with_parameters else 1
    held = max(min(TRANSFERS_AT_ONCE, buckets * cost.buckets) * cost.bucket_elements for cost in summary.ranks)
    return held * element_bytes


def _table_bytes(plan: Plan, summary: Summary) -> int:
    """Bytes of the kernels' tables, without a few for each piece: a word for each program of four launches."""
    if not plan.passes.traffic.fused:
        return 0
    return max(4 * 2 * (cost.state_elements + cost.owned_elements) // BLOCK for cost in summary.ranks)


def mean_elements(parameter: Tensor, ranks: int) -> float:
    """Elements on the first rank, or the mean over `ranks` if owned."""
    if is_owned(parameter):
        return sum(held_elements(parameter).values()) / ranks
    return local(parameter).numel()


def _elements(parameter: Tensor, owner: int) -> int:
    return held_elements(parameter).get(owner, 0) if is_owned(parameter) else local(parameter).numel()


def momentum_bytes(elements: int, state_dtype: str) -> int:
    """Bytes of the momentum, with the scales of whole blocks."""
    if state_dtype == "int8":
        return elements + 4 * -(-elements // SCALE_BLOCK)
    return elements * int(getattr(torch, state_dtype).itemsize)


def host_bytes(size: int, device: str) -> int:
    """Host memory for a tensor. PyTorch pins memory for a GPU in powers of two."""
    return 1 << (size - 1).bit_length() if size > 0 and device != "cpu" else size
