"""Memory of a rank by purpose, between steps and in a step, without activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_muon.adam import AVERAGES, BATCH_BYTES
from titan_muon.algorithms import algorithm_of
from titan_muon.features.eight_bit import BLOCK
from titan_muon.features.offload import TRANSFERS_AT_ONCE
from titan_muon.options import MuonOptions
from titan_muon.owned import is_owned
from titan_muon.owned.param import held_elements
from titan_muon.plan import Summary
from titan_muon.plan.search.owners import state_elements
from titan_muon.plan.search.ownership import OwnedTotals
from titan_muon.state.matrix_states import state_bytes
from titan_muon.tensors.device import host_bytes
from titan_muon.tensors.dtensor import local
from titan_muon.titan.assign.container import offload_of
from titan_muon.titan.dry_run.meta_model import MetaModel
from titan_muon.titan.recipe import Recipe


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank with the largest shards and the fullest owner's parameters."""

    parameters: int  # on the device between steps; 0 if offloaded
    gradients: int
    optimizer_states: int  # on the device between steps; if offloaded: the peak of all transfers in a step
    exchange_buffers: int
    orthogonalization: int  # whole matrices and temporary memory, `StepBytes.work`
    host_parameters: int  # pinned, like the next two
    host_gradients: int
    host_states: int
    uncounted: tuple[str, ...]  # optimizers of other packages, with unknown states

    @property
    def sizes(self) -> dict[str, int]:
        names = ("parameters", "gradients", "optimizer_states", "exchange_buffers", "orthogonalization")
        counted = {name: getattr(self, name) for name in names}
        return {**counted, "total": sum(counted.values())}

    @property
    def host_sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("host_parameters", "host_gradients", "host_states")}


@dataclass(frozen=True)
class OffloadedParameter:
    """Bytes of a parameter on a rank, in host memory if the recipe offloads."""

    optimizer: str
    bytes: int
    itemsize: int
    states: tuple[int, ...]


def memory_per_rank(
    meta: MetaModel, summary: Summary | None, loads: Mapping[int, OwnedTotals], recipe: Recipe, device: str
) -> Memory:
    """Upper bound of the fullest rank's memory. `device`: type of device to plan for."""
    items, offload = list(_parameters(meta, loads, recipe)), offload_of(recipe)
    parameters, states = [item.bytes for item in items], [size for item in items for size in item.states]
    on_device, states_on_device, pinned_parameters, pinned_states = sum(parameters), sum(states), 0, 0
    if offload != "none":
        states_on_device = _window_bytes(items, summary, recipe)
        pinned_states = sum(host_bytes(size, device) for size in states)
    if offload == "parameters":
        on_device, pinned_parameters = 0, sum(host_bytes(size, device) for size in parameters)
    if meta.plan is not None:
        algorithm = algorithm_of(MuonOptions(algorithm=recipe.muon.algorithm))
        states_on_device += max(state_bytes(meta.plan, algorithm.states).values(), default=0)
    return Memory(
        parameters=on_device,
        # FSDP2's gradients have the dtype and the shards of the parameters.
        gradients=on_device,
        optimizer_states=states_on_device,
        exchange_buffers=0 if summary is None else summary.buffer_bytes_max,
        orthogonalization=0 if summary is None else summary.work_bytes_max,
        host_parameters=pinned_parameters,
        host_gradients=pinned_parameters,
        host_states=pinned_states,
        uncounted=tuple(sorted({a.optimizer for a in meta.assigned} - {"muon", "adamw"})),
    )


def _parameters(meta: MetaModel, loads: Mapping[int, OwnedTotals], recipe: Recipe) -> Iterator[OffloadedParameter]:
    # The fullest owner may be another rank than the first, with the largest shards.
    fullest = max(loads, key=lambda rank: loads[rank].bytes, default=0)
    elements = {name: _elements(parameter, fullest) for name, parameter in meta.parameters.items()}
    momentum: Mapping[str, int] = elements
    if meta.plan is not None and recipe.muon.state != "replicated":
        most = max(state_elements(meta.plan).values(), key=lambda held: sum(held.values()))
        momentum = {meta.plan.parameters[number].fqn: size for number, size in most.items()}
    algorithm = algorithm_of(MuonOptions(algorithm=recipe.muon.algorithm))
    for a in meta.assigned:
        size, itemsize = elements[a.fqn], meta.parameters[a.fqn].element_size()
        states: tuple[int, ...] = ()
        if a.optimizer == "muon":
            states = (momentum_bytes(momentum[a.fqn], recipe.muon.state_dtype),) if algorithm.momentum else ()
        elif a.optimizer == "adamw":
            states = (size * (2 if recipe.adamw.state_dtype == "bfloat16" else itemsize),) * len(AVERAGES)
        yield OffloadedParameter(a.optimizer, size * itemsize, itemsize, states)


def _window_bytes(items: list[OffloadedParameter], summary: Summary | None, recipe: Recipe) -> int:
    """Peak of offloaded bytes on the device; optimizers step in turn."""
    all_offloaded = offload_of(recipe) == "parameters"
    # AdamW also moves a parameter and its gradient.
    moved = (sum(item.states) + 2 * item.bytes * all_offloaded for item in items if item.optimizer == "adamw")
    most = TRANSFERS_AT_ONCE * min(BATCH_BYTES, sum(moved))
    if summary is None:
        return most
    element_bytes, stages = momentum_bytes(1, recipe.muon.state_dtype), 1
    if all_offloaded:
        # Momentum and gradient share a transfer; the parameter's is smaller.
        element_bytes += max(item.itemsize for item in items if item.optimizer == "muon")
        stages = 2
    held = max(min(TRANSFERS_AT_ONCE, stages * cost.buckets) * cost.bucket_elements for cost in summary.ranks)
    return max(most, held * element_bytes)


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
        return elements + 4 * -(-elements // BLOCK)
    return elements * int(getattr(torch, state_dtype).itemsize)
