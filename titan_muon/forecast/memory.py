"""Memory of a rank by purpose, between steps and in a step, without activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..adamw import AVERAGES, AdamW
from ..assignment.optimizer_set import OptimizerSet
from ..engine.layout.intervals import Geometries
from ..engine.layout.types import Plan
from ..engine.state.states import state_bytes
from ..engine.step.algorithm import Algorithm
from ..engine.tensors.dtensor import local
from ..features.eight_bit import SCALE_BLOCK
from ..features.offload import TRANSFERS_AT_ONCE
from ..kernels.tables import BLOCK
from ..muon import Muon
from ..options import MuonOptions, Offload
from ..owned import is_owned
from ..owned.param import held_elements
from ..planner.owners import state_elements, state_totals
from ..planner.ownership import OwnedTotals
from ..planner.summary import Summary
from ..selection import algorithm_of


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
        names = ("parameters", "gradients", "optimizer_states", "exchange_buffers", "orthogonalization")
        counted = {name: getattr(self, name) for name in names}
        return {**counted, "total": sum(counted.values())}

    @property
    def host_sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("host_parameters", "host_gradients", "host_states")}


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes of a parameter and of its states on a rank. `optimizer`: empty for a frozen parameter."""

    optimizer: str
    offload: Offload
    bytes: int
    itemsize: int
    states: tuple[int, ...]


def muon_of(optimizers: OptimizerSet) -> Muon | None:
    """The Muon among the optimizers."""
    return next((part for part in optimizers.optimizers.values() if isinstance(part, Muon)), None)


def owner_loads(
    parameters: Mapping[str, Tensor], summary: Summary | None, ranks: Iterable[int]
) -> dict[int, OwnedTotals]:
    """Owned matrices, bytes and Muon FLOPs of each rank; empty without owned parameters."""
    owned = [parameter for parameter in parameters.values() if isinstance(parameter, DTensor) and is_owned(parameter)]
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


def memory_per_rank(
    parameters: Mapping[str, Tensor],
    optimizers: OptimizerSet,
    plan: Plan | None,
    summary: Summary | None,
    loads: Mapping[int, OwnedTotals],
    device: str,
) -> Memory:
    """Upper bound of the fullest rank's memory. `device`: type of device to plan for."""
    muon = muon_of(optimizers)
    options = MuonOptions() if muon is None else muon.options
    groups = {fqn: group for group in (muon.param_groups if muon else ()) for fqn in group["param_names"]}
    algorithm = algorithm_of(options, [] if plan is None else [groups.get(p.fqn, {}) for p in plan.parameters])
    items = list(_items(parameters, optimizers, plan, loads, options, algorithm))
    on_device = [item.bytes for item in items if item.offload != "parameters"]
    trained = [item.bytes for item in items if item.offload != "parameters" and item.optimizer]
    on_host = [item for item in items if item.offload == "parameters"]
    states_on_device = sum(size for item in items if item.offload == "none" for size in item.states)
    work = 0 if summary is None else summary.work_bytes_max
    states_on_device += _window_bytes(items, summary, options)
    if plan is not None:
        work += _table_bytes(plan, summary)
        states_on_device += max(state_bytes(plan, algorithm.for_parameter).values(), default=0)
    return Memory(
        parameters=sum(on_device),
        # FSDP2's gradients have the dtype and the shards of the parameters.
        gradients=sum(trained),
        optimizer_states=states_on_device,
        exchange_buffers=0 if summary is None else summary.buffer_bytes_max,
        orthogonalization=work,
        host_parameters=sum(host_bytes(item.bytes, device) for item in on_host),
        host_gradients=sum(host_bytes(item.bytes, device) for item in on_host if item.optimizer),
        host_states=sum(host_bytes(size, device) for item in items if item.offload != "none" for size in item.states),
        uncounted=tuple(sorted({a.optimizer for a in optimizers.assignments} - {"muon", "adamw"})),
        keeps_buffers=options.keep_buffers or options.cuda_graph is True,
    )


def _items(
    parameters: Mapping[str, Tensor],
    optimizers: OptimizerSet,
    plan: Plan | None,
    loads: Mapping[int, OwnedTotals],
    options: MuonOptions,
    algorithm: Algorithm,
) -> Iterator[ParameterMemory]:
    # The fullest owner may be another rank than the first, with the largest shards.
    fullest = max(loads, key=lambda rank: loads[rank].bytes, default=0)
    elements = {name: _elements(parameter, fullest) for name, parameter in parameters.items()}
    momentum: Mapping[str, int] = elements
    if plan is not None and options.state != "replicated":
        geometries = Geometries(plan.parameters)
        totals = state_totals(plan, geometries)
        rank = max(totals, key=totals.__getitem__)
        held = [(number, p) for number, p in enumerate(plan.parameters) if rank in p.layout.mesh.ranks]
        momentum = {p.fqn: state_elements(p, geometries[number], rank) for number, p in held}
    planned = () if plan is None else plan.parameters
    empty = {p.fqn for number, p in enumerate(planned) if not algorithm.for_parameter(number).momentum}
    optimizer_of = {a.fqn: a.optimizer for a in optimizers.assignments}
    for fqn, parameter in parameters.items():
        optimizer, itemsize = optimizer_of.get(fqn, ""), parameter.element_size()
        # Parameters are on the host together.
        offload: Offload = "parameters" if options.offload == "parameters" else "none"
        states: tuple[int, ...] = ()
        if optimizer == "muon":
            offload = options.offload
            states = (momentum_bytes(momentum[fqn], options.state_dtype),) if fqn not in empty else ()
        elif isinstance(adamw := optimizers.optimizers.get(optimizer), AdamW):
            offload = adamw.offloaded
            states = (elements[fqn] * (2 if adamw.state_dtype == "bfloat16" else itemsize),) * len(AVERAGES)
        yield ParameterMemory(optimizer, offload, elements[fqn] * itemsize, itemsize, states)


def _window_bytes(items: list[ParameterMemory], summary: Summary | None, options: MuonOptions) -> int:
    """Peak of offloaded bytes on the device; optimizers step in turn."""
    # AdamW moves everything at once, also parameters and gradients on the host.
    of_adamw = (item for item in items if item.optimizer == "adamw" and item.offload != "none")
    moved = (sum(item.states) + 2 * item.bytes * (item.offload == "parameters") for item in of_adamw)
    most = sum(moved)
    if summary is None or options.offload == "none":
        return most
    element_bytes, stages = momentum_bytes(1, options.state_dtype), 1
    if options.offload == "parameters":
        # Momentum and gradient share a transfer; the parameter's is smaller.
        element_bytes += max(item.itemsize for item in items if item.optimizer == "muon")
        stages = 2
    held = max(min(TRANSFERS_AT_ONCE, stages * cost.buckets) * cost.bucket_elements for cost in summary.ranks)
    return max(most, held * element_bytes)


def _table_bytes(plan: Plan, summary: Summary | None) -> int:
    """Bytes of the kernels' tables, without a few for each piece: a word for each program of four launches."""
    if summary is None or not plan.passes.traffic.fused:
        return 0
    return max(4 * 2 * (cost.state_elements + cost.owned_elements) // BLOCK for cost in summary.ranks)


def mean_elements(parameter: Tensor, ranks: int) -> float:
    """Elements on the first rank, or the mean over `ranks` if owned."""
    if isinstance(parameter, DTensor) and is_owned(parameter):
        return sum(held_elements(parameter).values()) / ranks
    return local(parameter).numel()


def _elements(parameter: Tensor, owner: int) -> int:
    if isinstance(parameter, DTensor) and is_owned(parameter):
        return held_elements(parameter).get(owner, 0)
    return local(parameter).numel()


def momentum_bytes(elements: int, state_dtype: str) -> int:
    """Bytes of the momentum, with the scales of whole blocks."""
    if state_dtype == "int8":
        return elements + 4 * -(-elements // SCALE_BLOCK)
    return elements * int(getattr(torch, state_dtype).itemsize)


def host_bytes(size: int, device: str) -> int:
    """Host memory for a tensor. PyTorch pins memory for a GPU in powers of two."""
    return 1 << (size - 1).bit_length() if size > 0 and device != "cpu" else size
