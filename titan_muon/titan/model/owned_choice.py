"""`placement.replicas` and `placement.tensor_parallel` = "auto": the way to own that costs least, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from titan_muon.options import MuonOptions, Owner, Split
from titan_muon.orthogonalize import Dispatch
from titan_muon.owned.owners import FlopCount, cut_by_peers, owned_items
from titan_muon.owned.private import joint_mesh
from titan_muon.plan.cost.timeline import timeline
from titan_muon.plan.owned.choice import Passes, TrainingCost, cheapest, pass_seconds, rest_bytes
from titan_muon.plan.owned.ownership import assign_owners
from titan_muon.plan.owned.space import OwnedSpace, OwnedTensor
from titan_muon.plan.terms.types import Mesh, Replicate
from titan_muon.planning import plan_parameters, planning_machine
from titan_muon.state.groups import iteration_of
from titan_muon.tensors.dtensor import layout_of
from titan_muon.tensors.matrices import stack_of
from titan_muon.titan.assign.container import optimizer_config
from titan_muon.titan.recipe import Recipe, recipe_error

REASONS = "_owned_reasons"
"""Attribute of a model with what was chosen for it."""


class Way(NamedTuple):
    """Values of `placement.replicas` and `placement.tensor_parallel`."""

    replicas: Literal["each", "one"]
    tensor_parallel: Literal["peers", "whole"]


@dataclass(frozen=True)
class Wanted:
    """Parameters that are to be owned on one data-parallel mesh, by name, and how the owners of each are found.

    `shared`: whether one of the tensor-parallel ranks may hold what they cut.
    """

    mesh: DeviceMesh
    parameters: Mapping[str, nn.Parameter]
    owners: Mapping[str, Owner]
    shared: bool


@dataclass(frozen=True)
class Owning:
    """All that is to be owned, and what its owners depend on.

    Attributes:
        wanted: by mesh.
        split: how parameters are read as matrices.
        elementwise: what Muon does not take.
        flops: of orthogonalizing a matrix, for the balance.
        device: type of device that is planned for.
        passes: of a training step.
        pipelined: whether this is a stage of a pipeline.
    """

    wanted: Sequence[Wanted]
    split: Sequence[Split]
    elementwise: Collection[nn.Parameter]
    flops: FlopCount
    device: str
    passes: Passes
    pipelined: bool


def decide(recipe: Recipe, owning: Owning) -> tuple[Recipe, list[str]]:
    """The recipe with a way to own in place of each "auto", and a line for each that was a choice: which, and why.

    Nothing is communicated, and all ranks come to the same. Raises RecipeError if no way can be planned.
    """
    replicas, tensor_parallel = choices = _choices(recipe, owning)
    ways = [Way(*values) for values in product(replicas.values, tensor_parallel.values)]
    costs, faults = _costs(recipe, owning, ways) if len(ways) > 1 else ({}, {})
    way = cheapest(costs) if costs else ways[0]
    said = []
    for key, choice in zip(Way._fields, choices, strict=True):
        others = [way._replace(**{key: value}) for value in choice.values if value != getattr(way, key)]
        why = choice.settled or "; ".join(_against(way, other, key, costs, faults) for other in others)
        if why:
            said.append(f'owned: placement.{key} = "auto" takes "{getattr(way, key)}", {why}')
    return replace(recipe, placement=replace(recipe.placement, **way._asdict())), said


def reasons(parts: Iterable[nn.Module]) -> list[str]:
    """What was chosen for the parts of a model, each line once."""
    return list(dict.fromkeys(line for part in parts for line in getattr(part, REASONS, ())))


@dataclass(frozen=True)
class _Choice:
    """The values that a key may have here, and why it may not have others although it is open."""

    values: tuple[Any, ...]
    settled: str = ""


def _choices(recipe: Recipe, owning: Owning) -> tuple[_Choice, _Choice]:
    """Of `placement.replicas` and of `placement.tensor_parallel`."""
    placement = recipe.placement
    # A rank of another axis would be another rank: what was written for one must not be read for the other.
    indexed = any(isinstance(owner, int) for each in owning.wanted for owner in each.owners.values())
    named = "since placement.rule names owners by their place on the FSDP axis" if indexed else ""
    # All ranks of the world make the group of all replicas together, and another stage might choose otherwise.
    apart = "since pipeline stages choose apart, and one owner for all replicas takes all of them"
    replicated = any(each.mesh.ndim == 2 for each in owning.wanted)
    cut = any(_is_cut(p) for each in owning.wanted if each.shared for p in each.parameters.values())
    return (
        _choice(placement.replicas, ("each", "one"), applies=replicated, settled=apart if owning.pipelined else named),
        _choice(placement.tensor_parallel, ("peers", "whole"), applies=cut, settled=named),
    )


def _choice(asked: str, values: tuple[str, ...], *, applies: bool, settled: str) -> _Choice:
    if asked != "auto":
        return _Choice((asked,))
    if not applies:
        return _Choice(values[:1])
    return _Choice(values[:1], settled) if settled else _Choice(values)


def _is_cut(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def _costs(
    recipe: Recipe, owning: Owning, ways: Sequence[Way]
) -> tuple[dict[Way, TrainingCost], dict[Way, ValueError]]:
    """What each way costs, or why it cannot be. Raises RecipeError if none can."""
    costs, faults = {}, {}
    for way in ways:
        try:
            costs[way] = _cost(recipe, owning, way)
        except ValueError as fault:
            faults[way] = fault
    if not costs:
        raise recipe_error(faults[ways[0]]) from faults[ways[0]]
    return costs, faults


def _cost(recipe: Recipe, owning: Owning, way: Way) -> TrainingCost:
    # Pieces rest alike in all modes of tensor parallelism; with any other no way is open that has one rank hold all.
    options = replace(MuonOptions(**optimizer_config(recipe).tables["muon"]), tensor_parallel="owner")
    machine = planning_machine(recipe.machine, owning.device)
    spaces = [_space(owning, wanted, way) for wanted in owning.wanted]
    parameters = [parameter for space in spaces for parameter in space.parameters()]
    step = 0.0
    if parameters:
        iterations = [iteration_of(vars(options))] * len(parameters)
        dispatch = Dispatch.of(options, owning.device, machine=machine)
        plan = plan_parameters(parameters, iterations, dispatch, options)
        step = timeline(plan, machine).last.seconds
    momentum, weight = (TORCH_DTYPE_MAP[name].itemsize for name in (options.state_dtype, recipe.training.dtype))
    passes = sum(pass_seconds(space, owning.passes, machine) for space in spaces)
    return TrainingCost(step, passes, rest_bytes(spaces, 1 + momentum / weight))


def _space(owning: Owning, wanted: Wanted, way: Way) -> OwnedSpace:
    """What is wanted on one mesh, with its owners. Raises ValueError if one rank cannot hold it for its peers."""
    parameters = wanted.parameters
    gathered = cut_by_peers(parameters) if wanted.shared and way.tensor_parallel == "whole" else {}
    items = owned_items(
        parameters,
        wanted.owners,
        gathered=gathered,
        split=owning.split,
        flops=owning.flops,
        elementwise=owning.elementwise,
    )
    mesh = _mesh(wanted, joined=way.replicas == "one")
    _, shards, peers = mesh.shape
    ownership = assign_owners(items, shards * peers if gathered else shards)
    return OwnedSpace(mesh, dict(_tensors(owning, parameters)), frozenset(gathered), ownership)


def _tensors(owning: Owning, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, OwnedTensor]]:
    for fqn, parameter in parameters.items():
        shape = tuple(parameter.shape)
        stack = None if parameter in owning.elementwise else stack_of(fqn, shape, owning.split)
        cut = layout_of(fqn, parameter).placements[0] if isinstance(parameter, DTensor) else Replicate()
        yield fqn, OwnedTensor(shape, parameter.element_size(), stack, cut)


def _mesh(wanted: Wanted, *, joined: bool) -> Mesh:
    """(replicas, shards, peers) of what is wanted; `joined` if one rank among all replicas owns."""
    inner = next((p.device_mesh for p in wanted.parameters.values() if isinstance(p, DTensor)), None)
    assert inner is None or inner.ndim == 1, "TorchTitan's tensor and expert parallelism have an axis each"
    peers = 1 if inner is None else inner.size()
    ranks = (wanted.mesh if inner is None else joint_mesh(wanted.mesh, inner)).mesh.flatten().tolist()
    replicas = 1 if joined or wanted.mesh.ndim == 1 else wanted.mesh.size(0)
    return Mesh((replicas, len(ranks) // replicas // peers, peers), tuple(ranks))


def _against(
    way: Way, other: Way, key: str, costs: Mapping[Way, TrainingCost], faults: Mapping[Way, ValueError]
) -> str:
    """Why a way was chosen and not another, which differs in one key."""
    name = getattr(other, key)
    if other in faults:
        return f'since "{name}" cannot be: {faults[other]}'
    why = "the faster" if costs[way].seconds < costs[other].seconds else "as fast"
    if costs[way].seconds > costs[other].seconds:
        why = "slower, and smaller"
    return f'{why}: {_in_words(costs[way])}; "{name}": {_in_words(costs[other])}; as if computing hid no link'


def _in_words(cost: TrainingCost) -> str:
    step, passes = (f"{1e3 * seconds:,.{0 if seconds >= 1 else 3}f} ms" for seconds in (cost.step, cost.passes))
    return f"{step} in Muon's step, {passes} of links in the passes and {cost.bytes / 2**20:,.1f} MiB at rest"
