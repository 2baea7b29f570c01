"""`placement` with "auto": what is compared is what would be placed, every rank finds the same, and says why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import models  # noqa: F401 (registers the families)
from benchmarks.owned_model import Net, Setup, data_mesh, make, matrices, place
from titan_muon.options import Machine, Owner
from titan_muon.plan.owned.choice import Passes
from titan_muon.plan.terms.types import Parameter
from titan_muon.plan.terms.work import standard_flops
from titan_muon.tensors.matrices import planned
from titan_muon.titan import compat
from titan_muon.titan import model as _model  # noqa: F401 (prepares TorchTitan for the CPU)
from titan_muon.titan.model import owned_choice
from titan_muon.titan.model.owned_choice import Owning, Wanted, Way, decide
from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.recipe.sections import Muon, Placement

ONCE = Passes(count=1, gathers=1, gathered=1, reduced=1)
# Two replicas of two shards of two tensor-parallel ranks.
SETUP = Setup("owned", replicas=2, tensor=2)


@contextmanager
def fake_world(rank: int = 0) -> Iterator[None]:
    compat.forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    yield
    dist.destroy_process_group()


def owning(model: Net, setup: Setup = SETUP, owner: Owner = "balanced", **changes: Any) -> Owning:
    """Everything that Muon takes of a model in a fake world."""
    mesh = data_mesh(8, setup, model)
    named = {name: p for name, p in model.named_parameters() if any(p is m for m in matrices(model))}
    wanted = Wanted(mesh, named, dict.fromkeys(named, owner), shared=True)
    given: dict[str, Any] = {"device": "cpu", "passes": ONCE, "pipelined": False, **changes}
    return Owning([wanted], (), (), partial(standard_flops, steps=5), **given)


def recipe(machine: Machine | None = None, **placement: str) -> Recipe:
    muon = Muon(wire_dtype="float32", orthogonalize="standard")
    found = Recipe(placement=Placement(muon="owned", **placement), muon=muon)  # type: ignore[arg-type]
    return found if machine is None else replace(found, machine=machine)


def placed_by(way: Way, model: Net) -> list[Parameter]:
    """What the planner sees once a model is placed in a way."""
    mesh = data_mesh(8, SETUP, model)
    mesh = mesh._flatten() if way.replicas == "one" else mesh
    place(model, replace(SETUP, tensor_parallel=way.tensor_parallel), mesh)
    return [planned(name, p) for name, p in model.named_parameters() if any(p is m for m in matrices(model))]


def held(parameter: Parameter) -> tuple[Any, ...]:
    """A parameter without axes of one rank, which say nothing of who holds what."""
    layout = parameter.layout
    axes = zip(layout.mesh.shape, layout.placements, strict=True)
    return parameter.fqn, parameter.layer, parameter.stack, layout.mesh.ranks, [axis for axis in axes if axis[0] > 1]


@pytest.mark.parametrize("replicas", ["each", "one"])
@pytest.mark.parametrize("tensor_parallel", ["peers", "whole"])
def test_what_is_compared_is_what_is_placed(replicas: Any, tensor_parallel: Any) -> None:
    """Layout by layout, so that the step that was played is the step that is taken."""
    way = Way(replicas, tensor_parallel)
    with fake_world():
        asked = owning(make())
        compared = list(owned_choice._space(asked, asked.wanted[0], way).parameters())
    with fake_world():
        placed = placed_by(way, make())
    assert sorted(map(held, compared)) == sorted(map(held, placed))


FAST, SLOW = Machine(node_gb=1e6, node_latency_us=0.0), Machine(node_gb=1e-6, node_latency_us=0.0)


@pytest.mark.parametrize(
    ("machine", "passes", "taken"),
    [
        (SLOW, ONCE, ("one", "whole")),
        (SLOW, replace(ONCE, count=9), ("one", "peers")),
        (Machine(node_gb=1e6, network_gb=1e-6, ranks_per_node=4), ONCE, ("each", "peers")),
    ],
)
def test_every_rank_takes_the_cheapest_way_and_says_why(
    machine: Machine, passes: Passes, taken: tuple[str, str]
) -> None:
    found = []
    for rank in (0, 7):
        with fake_world(rank):
            found.append(decide(recipe(machine), owning(make(), passes=passes)))
    assert found[0] == found[1], "ranks that placed otherwise would wait for each other"
    decided, (replicas, tensor_parallel) = found[0]
    assert (decided.placement.replicas, decided.placement.tensor_parallel) == taken
    cost = r"[\d.,]+ ms in Muon's step, [\d.,]+ ms of links in the passes and [\d.,]+ MiB at rest"
    for key, line in (("replicas", replicas), ("tensor_parallel", tensor_parallel)):
        other = {"each": "one", "one": "each", "peers": "whole", "whole": "peers"}[getattr(decided.placement, key)]
        assert line.startswith(f'owned: placement.{key} = "auto" takes "{getattr(decided.placement, key)}", ')
        assert len(re.findall(cost, line)) == 2
        assert f'; "{other}": ' in line
        assert line.endswith("as if computing hid no link")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pipelined": True}, {"replicas": "pipeline stages choose apart"}),
        ({"owner": 1}, dict.fromkeys(Way._fields, "placement.rule names owners by their place on the FSDP axis")),
    ],
)
def test_what_auto_cannot_choose_is_what_it_was_and_said(changes: dict[str, Any], why: dict[str, str]) -> None:
    with fake_world():
        decided, said = decide(recipe(SLOW), owning(make(), **changes))
    for key, reason in why.items():
        line = next(line for line in said if line.startswith(f"owned: placement.{key} = "))
        kept = {"replicas": "each", "tensor_parallel": "peers"}[key]
        assert getattr(decided.placement, key) == kept
        assert f'"auto" takes "{kept}", since {reason}' in line


def test_what_no_single_rank_can_hold_stays_with_its_peers() -> None:
    """One matrix is cut by something else than Shard."""
    with fake_world():
        model = make()
        asked = owning(model, Setup("owned", tensor=2))
        name, strange = next(iter(asked.wanted[0].parameters.items()))
        assert isinstance(strange, DTensor)
        strange._spec = replace(strange._spec, placements=(_StridedShard(0, split_factor=2),))
        decided, (line,) = decide(recipe(SLOW), asked)
    assert decided.placement.tensor_parallel == "peers"
    assert f'"auto" takes "peers", since "whole" cannot be: {name}: is placed as' in line


@pytest.mark.parametrize(
    ("setup", "placement"),
    [
        (SETUP, {"replicas": "each", "tensor_parallel": "whole"}),
        (SETUP, {"replicas": "one", "tensor_parallel": "peers"}),
        (Setup("owned"), {}),
    ],
)
def test_nothing_is_compared_or_said_where_there_is_no_choice(
    setup: Setup, placement: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that a recipe gives are taken; without replicas and tensor parallelism there is one way."""
    monkeypatch.delattr(owned_choice, "plan_parameters")
    with fake_world():
        decided, said = decide(recipe(**placement), owning(make(), setup))
    assert said == []
    expected = {"replicas": "each", "tensor_parallel": "peers", **placement}
    assert {key: getattr(decided.placement, key) for key in expected} == expected


def test_one_open_key_is_chosen_beside_the_other_that_is_given() -> None:
    with fake_world():
        decided, said = decide(recipe(SLOW, replicas="each"), owning(make()))
    assert decided.placement.replicas == "each"
    assert [line.split(" = ")[0] for line in said] == ["owned: placement.tensor_parallel"]


def test_options_that_no_step_takes_are_refused_with_their_key() -> None:
    with fake_world(), pytest.raises(RecipeError, match=r"^muon\.exchange = 'al_to_all' is unknown"):
        decide(Recipe(placement=Placement(muon="owned"), muon=Muon(exchange="al_to_all")), owning(make()))
