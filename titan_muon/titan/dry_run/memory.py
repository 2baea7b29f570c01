"""What a rank keeps in memory and what a step needs besides, by what it holds, without activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from titan_muon.adam import AVERAGES, BATCH_BYTES
from titan_muon.options import Offload
from titan_muon.owned import is_owned
from titan_muon.owned.param import held_elements
from titan_muon.plan import Summary
from titan_muon.plan.owned.ownership import OwnedTotals
from titan_muon.plan.search.state import state_elements
from titan_muon.rules import rule_states
from titan_muon.state.host import TRANSFERS_AT_ONCE, host_bytes
from titan_muon.state.rule_states import state_bytes
from titan_muon.step.foreach import call_bytes
from titan_muon.tensors.dtensor import local
from titan_muon.titan.assign.container import offload_of
from titan_muon.titan.dry_run.meta_model import MetaModel
from titan_muon.titan.recipe import Recipe


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank with the largest shards, and of what the fullest owner owns, without activations.

    Attributes:
        parameters: on the device between steps, as gradients are after backward: none if they are offloaded.
        optimizer_states: on the device: all between steps, or, if they are offloaded, most of them in a step, with the
            parameters and gradients that come with them if those are offloaded too.
        orthogonalization: of whole matrices, and of Newton-Schulz on them, or of updates in the dtype of their
            parameters where that is more.
        host_parameters: on the host, as its pinned memory is allocated; so are the other two.
        uncounted: optimizers, registered by others, whose states are unknown.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    exchange_buffers: int
    orthogonalization: int
    host_parameters: int
    host_gradients: int
    host_states: int
    uncounted: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """What the device has, by its name, and the total."""
        names = ("parameters", "gradients", "optimizer_states", "exchange_buffers", "orthogonalization")
        counted = {name: getattr(self, name) for name in names}
        return {**counted, "total": sum(counted.values())}

    @property
    def host_sizes(self) -> dict[str, int]:
        """What the host has, by its name."""
        return {name: getattr(self, name) for name in ("host_parameters", "host_gradients", "host_states")}


@dataclass(frozen=True)
class Held:
    """A parameter on a rank: its optimizer, its bytes, which are those of its gradient, and the bytes of each state."""

    optimizer: str
    bytes: int
    itemsize: int
    states: tuple[int, ...]

    def moved(self, offload: Offload) -> int:
        """Bytes that are on the device together while it is updated, of what is on the host between steps."""
        return sum(self.states) + (2 * self.bytes if offload == "parameters" else 0)


def memory_per_rank(
    meta: MetaModel, summary: Summary | None, loads: Mapping[int, OwnedTotals], recipe: Recipe, device: str
) -> Memory:
    """What stays in memory between steps, and a step's buffers. `device` is the type of device that is planned for."""
    # The first rank holds the largest shards of what is sharded. The fullest owner may be another: with its matrices
    # added this is a bound that no rank exceeds.
    fullest = max(loads, key=lambda rank: loads[rank].bytes, default=0)
    elements = {name: _elements(parameter, fullest) for name, parameter in meta.parameters.items()}
    held = list(_held(meta, elements, _kept(meta, elements, recipe), recipe))
    offload = offload_of(recipe)
    parameters, states = [each.bytes for each in held], [size for each in held for size in each.states]
    on_device, pinned_parameters = sum(parameters), 0
    states_on_device, pinned_states = sum(states), 0
    if offload != "none":
        pinned_states = sum(host_bytes(size, device) for size in states)
        states_on_device = _window_bytes(held, summary, recipe)
    if offload == "parameters":
        on_device, pinned_parameters = 0, sum(host_bytes(size, device) for size in parameters)
    if meta.plan is not None:
        # On the device under offload too. The owner with the largest states may not hold the largest shards.
        states_on_device += max(state_bytes(meta.plan, rule_states(recipe.muon.rule)).values(), default=0)
    uncounted = sorted({a.optimizer for a in meta.assigned} - {"muon", "adamw"})
    step = (0, 0)
    if summary is not None:
        # Newton-Schulz of a round is over before the round is applied: the two never need memory together.
        updates = summary.whole_bytes_max + _update_bytes(meta, elements, recipe, device)
        step = summary.buffer_bytes_max, max(summary.work_bytes_max, updates)
    # FSDP2 gives a gradient the dtype and the shards of its parameter.
    host = (pinned_parameters, pinned_parameters, pinned_states)
    return Memory(on_device, on_device, states_on_device, *step, *host, tuple(uncounted))


def _update_bytes(meta: MetaModel, elements: Mapping[str, int], recipe: Recipe, device: str) -> int:
    """Most bytes of updates in a wider dtype than that in transit, on a rank that holds so many elements of each."""
    assert meta.plan is not None, "a summary is of a plan"
    # One call updates several pieces, or one that is larger: of a stack of experts, a piece of one of them.
    largest: dict[str, int] = {}
    for matrix in meta.plan.matrices:
        name = meta.plan.parameters[matrix.parameter].fqn
        largest[name] = max(matrix.numel, largest.get(name, 0))
    wire = TORCH_DTYPE_MAP[recipe.muon.wire_dtype].itemsize
    sizes = {name: meta.parameters[name].element_size() for name in largest}
    wide = [name for name, size in sizes.items() if size > wire]
    together = sum(elements[name] * sizes[name] for name in wide)
    piece = max((min(elements[name], largest[name]) * sizes[name] for name in wide), default=0)
    return min(together, max(call_bytes(device), piece))


def _kept(meta: MetaModel, elements: Mapping[str, int], recipe: Recipe) -> Mapping[str, int]:
    """Elements of Muon's momentum on the rank that keeps most of it, which may be another than holds `elements`."""
    if meta.plan is None or recipe.muon.state == "replicated":
        return elements
    most = max(state_elements(meta.plan).values(), key=lambda held: sum(held.values()))
    return {meta.plan.parameters[number].fqn: size for number, size in most.items()}


def _held(meta: MetaModel, elements: Mapping[str, int], kept: Mapping[str, int], recipe: Recipe) -> Iterator[Held]:
    """All parameters, on a rank that holds so many elements of each, and of Muon's momentum so many."""
    for a in meta.assigned:
        size, itemsize = elements[a.fqn], meta.parameters[a.fqn].element_size()
        states: tuple[int, ...] = ()
        if a.optimizer == "muon":
            states = (kept[a.fqn] * TORCH_DTYPE_MAP[recipe.muon.state_dtype].itemsize,)
        elif a.optimizer == "adamw":
            states = (size * (2 if recipe.adamw.state_dtype == "bfloat16" else itemsize),) * len(AVERAGES)
        yield Held(a.optimizer, size * itemsize, itemsize, states)


def _window_bytes(held: list[Held], summary: Summary | None, recipe: Recipe) -> int:
    """Most bytes of what is offloaded that the device has at a time in a step, with optimizers one after the other."""
    offload = offload_of(recipe)
    batched = sum(each.moved(offload) for each in held if each.optimizer == "adamw")
    most = TRANSFERS_AT_ONCE * min(BATCH_BYTES, batched)
    if summary is None:
        return most
    element_bytes, stages = TORCH_DTYPE_MAP[recipe.muon.state_dtype].itemsize, 1
    if offload == "parameters":
        # Momentum and gradient come together, and the parameter in a transfer of its own, which is smaller.
        element_bytes += max(each.itemsize for each in held if each.optimizer == "muon")
        stages = 2
    loads = max(min(TRANSFERS_AT_ONCE, stages * cost.loads) * cost.load_elements for cost in summary.ranks)
    return max(most, loads * element_bytes)


def _elements(parameter: Tensor, owner: int) -> int:
    """Elements of a parameter on the first of its ranks, or, if it is owned, on rank `owner`."""
    if isinstance(parameter, DTensor) and is_owned(parameter):
        return held_elements(parameter).get(owner, 0)
    return local(parameter).numel()
