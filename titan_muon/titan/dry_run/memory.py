"""What a rank keeps in memory and what a step needs besides, by what it holds, without activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from titan_muon.adam import AVERAGES, BATCH_BYTES
from titan_muon.dtensor import local
from titan_muon.offload import LOADS_AT_ONCE, host_bytes
from titan_muon.owned import is_owned
from titan_muon.owned.param import held_elements
from titan_muon.plan import Summary
from titan_muon.plan.ownership import OwnedTotals
from titan_muon.titan.dry_run.meta_model import MetaModel
from titan_muon.titan.recipe import Recipe


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank with the largest shards, and of what the fullest owner owns, without activations.

    Attributes:
        optimizer_states: on the device: all between steps, or, if they are offloaded, most of them in a step.
        host_states: on the host, as its pinned memory is allocated.
        uncounted: optimizers, registered by others, whose states are unknown.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    exchange_buffers: int
    orthogonalization: int
    host_states: int
    uncounted: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """What the device has, by its name, and the total."""
        names = ("parameters", "gradients", "optimizer_states", "exchange_buffers", "orthogonalization")
        counted = {name: getattr(self, name) for name in names}
        return {**counted, "total": sum(counted.values())}


@dataclass(frozen=True)
class State:
    """A state of one parameter on a rank: its optimizer and its bytes."""

    optimizer: str
    bytes: int


def memory_per_rank(
    meta: MetaModel, summary: Summary | None, loads: Mapping[int, OwnedTotals], recipe: Recipe, device: str
) -> Memory:
    """What stays in memory between steps, and a step's buffers. `device` is the type of device that is planned for."""
    # The first rank holds the largest shards of what is sharded. The fullest owner may be another: with its matrices
    # added this is a bound that no rank exceeds.
    fullest = max(loads, key=lambda rank: loads[rank].bytes, default=0)
    elements = {name: _elements(parameter, fullest) for name, parameter in meta.parameters.items()}
    held = sum(elements[name] * parameter.element_size() for name, parameter in meta.parameters.items())
    states = list(_states(meta, elements, recipe))
    on_device, on_host = sum(state.bytes for state in states), 0
    if recipe.optimizer.offload == "state":
        on_host = sum(host_bytes(state.bytes, device) for state in states)
        on_device = _window_bytes(states, summary, recipe)
    uncounted = sorted({a.optimizer for a in meta.assigned} - {"muon", "adamw", "adam"})
    step = (0, 0) if summary is None else (summary.buffer_bytes_max, summary.work_bytes_max)
    # FSDP2 gives a gradient the dtype and the shards of its parameter.
    return Memory(held, held, on_device, *step, on_host, tuple(uncounted))


def _states(meta: MetaModel, elements: Mapping[str, int], recipe: Recipe) -> Iterator[State]:
    """The states of all parameters on a rank that holds so many elements of each."""
    momentum_bytes = TORCH_DTYPE_MAP[recipe.muon.state_dtype].itemsize
    for a in meta.assigned:
        if a.optimizer == "muon":
            yield State(a.optimizer, elements[a.fqn] * momentum_bytes)
        elif a.optimizer in ("adamw", "adam"):
            table = recipe.adamw if a.optimizer == "adamw" else recipe.adam
            narrow = table.state_dtype == "bfloat16"
            size = elements[a.fqn] * (2 if narrow else meta.parameters[a.fqn].element_size())
            yield from (State(a.optimizer, size) for _ in AVERAGES)


def _window_bytes(states: list[State], summary: Summary | None, recipe: Recipe) -> int:
    """Most bytes of states that are on the device at one time in a step, with optimizers one after the other."""
    batched = (sum(s.bytes for s in states if s.optimizer == name) for name in ("adamw", "adam"))
    most = max(LOADS_AT_ONCE * min(BATCH_BYTES, size) for size in batched)
    if summary is None:
        return most
    momentum_bytes = TORCH_DTYPE_MAP[recipe.muon.state_dtype].itemsize
    loads = max(min(LOADS_AT_ONCE, cost.loads) * cost.load_elements for cost in summary.ranks)
    return max(most, loads * momentum_bytes)


def _elements(parameter: Tensor, owner: int) -> int:
    """Elements of a parameter on the first of its ranks, or, if it is owned, on rank `owner`."""
    if isinstance(parameter, DTensor) and is_owned(parameter):
        return held_elements(parameter).get(owner, 0)
    return local(parameter).numel()
