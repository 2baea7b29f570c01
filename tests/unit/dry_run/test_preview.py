"""`preview` has the plan of the user's script and its memory, or names the function in which the script would fail."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.memory_use import allocated
from tests.shared import muon_keywords
from tests.unit.plans import mesh_of, parameter_of, plan_of
from tests.unit.test_hybrid import Decoder
from titan_muon import Hybrid, Muon, Owners, Rule, own, preview
from titan_muon.assignment.optimizer_set import OptimizerSet
from titan_muon.assignment.rules import Assignment
from titan_muon.engine.layout.types import Replicate, Shard
from titan_muon.forecast.fake_world import fake_world
from titan_muon.forecast.lines import plan_lines
from titan_muon.forecast.model import PlannedModel, memory_per_rank
from titan_muon.planner.summary import summarize

WORLD = 8


def fsdp(model: Any, mesh: DeviceMesh | None = None) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def hsdp(model: Any) -> nn.Module:
    fsdp(model, init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")))
    return model


def tensor_parallel(model: Any) -> None:
    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("shard", "tensor"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fsdp(model, mesh["shard"])


def owned(model: Any) -> None:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    owners = Owners(model, mesh=mesh, params=[p for p in model.layers.parameters() if p.ndim == 2])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=own(layer, owners=owners))
    fully_shard(model, mesh=mesh)


def offloaded(model: nn.Module) -> None:
    fully_shard(model, offload_policy=CPUOffloadPolicy())


@pytest.mark.parametrize("parallelize", [None, fsdp, hsdp, tensor_parallel, owned])
def test_the_plan_is_that_of_the_script(parallelize: Callable[[Any], Any] | None, monkeypatch: Any) -> None:
    shown = preview(Decoder, parallelize, WORLD, device="cpu")
    # Meshes of CPUs, as the script of a machine without GPUs has.
    make = init_device_mesh
    monkeypatch.setattr(f"{__name__}.init_device_mesh", lambda _, *shape, **names: make("cpu", *shape, **names))
    with fake_world(WORLD):
        model = Decoder()
        if parallelize is not None:
            parallelize(model)
        muon = Hybrid(model).optimizers["muon"]
        assert shown.model.plan.digest() == muon.plan.digest()
        assert shown.estimate.memory.exchange_buffers == muon.engine.rank.buffers.memory.nbytes
    text = str(shown)
    assert "layers.*.up.weight  (2)" in text
    assert "modelled time" in text
    assert ("as under DDP" in text) == (parallelize is None)
    assert ("owned: " in text) == (parallelize is owned)
    assert len(shown.text(full=True)) > len(text)


def test_owners_and_memory_of_a_machine() -> None:
    shown = preview(Decoder, owned, WORLD, "h200x8")
    assert shown.estimate.machine.name == "h200x8"
    assert sum(load.matrices for load in shown.estimate.loads.values()) == 4
    one, two = (preview(Decoder, fsdp, world) for world in (1, 2))
    whole, half = one.estimate.memory, two.estimate.memory
    assert whole.parameters == sum(parameter.nbytes for parameter in Decoder().parameters()) == 2 * half.parameters

    def frozen() -> nn.Module:
        model: Any = Decoder()
        model.embed.requires_grad_(False)
        return model

    free = preview(frozen, fsdp, 2)
    assert free.estimate.memory.parameters == half.parameters
    assert free.estimate.memory.gradients == half.gradients - 24 * 16 * 4 // 2
    assert "not trained (requires_grad is False): embed.weight" in str(free)
    only_adamw = [Rule(match="*", optimizer="adamw")]
    without_muon = preview(Decoder, fsdp, 2, optimizer=lambda model: Hybrid(model, rules=only_adamw))
    assert without_muon.model.plan is None
    assert without_muon.estimate.memory.optimizer_states == 2 * half.parameters


def test_parameters_on_the_host_are_asked_for() -> None:
    kept: Any = {"offload": "parameters"}
    memory = preview(
        Decoder, offloaded, 2, optimizer=lambda model: Hybrid(model, muon=kept, adamw=kept)
    ).estimate.memory
    assert memory.parameters == 0 < memory.host_parameters


def of_four(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cuda", (4,)))


def forgetful(model: nn.Module) -> None:
    raise KeyError("layers")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"build": lambda: nn.Linear(32, 32, device="cpu")}, r"build: weight is on cpu, and a preview needs the meta"),
        ({"build": lambda: 3}, r"build: returned int; return the model"),
        ({"parallelize": of_four}, r"parallelize: embed\.weight is on a mesh of 4 ranks, and world_size = 8"),
        ({"parallelize": hsdp, "world_size": 1}, r"parallelize: \w+ \(line \d+ of .*test_preview\.py\) raised"),
        ({"parallelize": offloaded}, r"CPUOffloadPolicy .* pass optimizer=lambda model: Hybrid\(model, muon="),
        ({"parallelize": forgetful}, r"parallelize: forgetful \(line \d+ of .*\) raised KeyError: 'layers'"),
        ({"machine": "h100"}, r"machine\.name = 'h100' is not one of auto, h100x8"),
        ({"optimizer": lambda model: torch.optim.AdamW(model.parameters())}, r"optimizer: returned AdamW; return"),
        ({"optimizer": lambda model: Hybrid(model, muon={"lr": -1})}, r"lr"),
        ({"build": lambda: nn.Embedding(4, 4)}, r"Muon takes no parameter of this model"),
        ({"world_size": 0}, r"world_size = 0 is not accepted; it takes 1 or more"),
    ],
)
def test_a_script_that_would_fail_is_refused(arguments: dict[str, Any], problem: str) -> None:
    before = DeviceMesh.__init__
    with pytest.raises(ValueError, match=problem):
        preview(**{"build": Decoder, "parallelize": None, "world_size": WORLD, **arguments})
    assert DeviceMesh.__init__ is before
    assert not dist.is_initialized()


def test_a_process_with_ranks_is_refused() -> None:
    with fake_world(2), pytest.raises(ValueError, match=r"plan before init_process_group"):
        preview(Decoder, fsdp, 2)


EXPERTS = "2 matrices are whole on up to 8 replicas.*data_parallel_replicate_degree = 1.*split.*sends results"


@pytest.mark.parametrize(
    ("replicas", "options", "told", "untold"),
    [
        # Local experts on each of 8 replicas are orthogonalized 8 times. Rows of recipes: tests/recipes.
        (8, {"replicas": "redundant"}, EXPERTS, "no effect"),
        (1, {"replicas": "redundant"}, "", "repeated"),
        (1, {"state": "owner"}, "state = 'owner' has no effect", "repeated"),
    ],
)
def test_a_plan_tells_repeated_work_and_options_without_effect(
    replicas: int, options: dict[str, Any], told: str, untold: str
) -> None:
    """Two experts, each whole on a rank of a replica, and two sharded matrices."""
    shapes, mesh = {"layers.0.experts": (2, 32, 32), "a.wq": (32, 32), "a.wk": (32, 32)}, mesh_of(replicas, 2)
    plan = plan_of([parameter_of(*pair, mesh, Replicate(), Shard(0)) for pair in shapes.items()], **options)
    text = "\n".join(plan_lines(plan, summarize(plan)))
    assert re.search(told, text, re.DOTALL)
    assert untold not in text


OPTIONS = {"orthogonalize": "standard", "ns_dtype": "bfloat16"}
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "muon": ((64, 4096), OPTIONS),
    "normuon": ((64, 4096), OPTIONS),
    # Every step makes new bases.
    "soap": ((400, 400), {"soap_freq": 1}),
    "soap and normuon": ((400, 400), {"soap_freq": 1, **OPTIONS, "ns_dtype": "auto"}),
}


@pytest.mark.usefixtures("zero_products")
@pytest.mark.parametrize("rule", CASES)
def test_the_dry_run_counts_the_memory_of_states_and_step(rule: str) -> None:
    shape, options = CASES[rule]
    shapes = {"first": shape, "tall": (512, 32), "experts": (3, 64, 32)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    names = rule.split(" and ")
    pairs = [[*parameters.items()][place :: len(names)] for place in range(len(names))]
    groups = [{"params": part, "algorithm": name} for part, name in zip(pairs, names, strict=True)]
    muon = Muon(groups, **muon_keywords(**options))
    # SOAP's first step makes no update.
    muon.step()
    muon.step()
    _, peak, _ = allocated(muon.step)
    assigned = tuple(Assignment(name, shape, "muon", "", None) for name, shape in shapes.items())
    optimizers = OptimizerSet(assigned, assigned, {}, {"muon": muon}, tuple(parameters), ())
    model = PlannedModel(1, range(1), "cpu", parameters, optimizers, muon.plan)
    memory = memory_per_rank(model, summarize(muon.plan), {})
    states = [tensor for state in muon.state.values() for tensor in state.values()]
    assert memory.optimizer_states == sum(tensor.nbytes for tensor in states)
    assert memory.orthogonalization == pytest.approx(peak, rel=0.1)
