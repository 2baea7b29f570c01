"""On two ranks Hybrid saves the state that its optimizers train, and loads on all ranks or on none."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.harness import run_ranks
from tests.dist.step.test_hybrid import shard
from tests.shared import message
from tests.unit.test_hybrid import OPTIONS, train
from tests.unit.test_hybrid_state import MOMENTS, SAME, problems_of, run_of, torch_adam
from titan_muon import Hybrid


def events(rank: int, world_size: int) -> list[str]:
    """Problems after each event at each moment. Plain tensors are replicas, as under DDP."""
    problems = []
    layouts: dict[str, Callable[[nn.Module], object] | None] = {"replicas": None, "fsdp": shard}
    with torch_adam():
        for layout, place in layouts.items():
            for name, event in SAME.items():
                # FSDP keeps the parameters that it has made, and a copy of a device mesh is another mesh.
                if layout == "fsdp" and name not in ("read_state", "load_its_own", "freeze_and_thaw"):
                    continue
                for moment in MOMENTS:
                    found = problems_of(run_of(shard=place), moment, event, place)
                    problems += [f"{layout}, {name} {moment}: {problem}" for problem in found]
    return problems


def refused_on_one_rank(rank: int, world_size: int) -> list[str]:
    """Errors of all ranks if one rank's state dict has an average of another shape, and the changed tensors."""
    with torch_adam():
        run = run_of()
        train(run.model, run.hybrid, range(2))
        wrong = copy.deepcopy(run.hybrid.state_dict())
        before = copy.deepcopy(run.hybrid.state_dict()["state"])
        for state in wrong["state"].values():
            for value in state.values():
                value.mul_(2)
        if rank == 1:
            wrong["state"][0]["exp_avg"] = torch.zeros(3, 3)
        error = message(lambda: run.hybrid.load_state_dict(wrong))
        after = run.hybrid.state_dict()["state"]
        changed = [
            name
            for key, state in before.items()
            for name, value in state.items()
            if not torch.equal(value, after[key][name])
        ]
    return [error, *changed]


def stage(has_matrices: bool) -> nn.Module:
    """A pipeline stage of one rank, with hidden layers or with an embedding alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pp", "dp"))
    part = nn.Sequential(nn.Linear(16, 32) if has_matrices else nn.Embedding(24, 16))
    fully_shard(part, mesh=mesh["dp"])
    return part


def stage_without_matrices(rank: int, world_size: int) -> list[str]:
    """The optimizers of a stage after a step, and the error of a model without matrices on any rank."""
    model = stage(has_matrices=rank == 1)
    hybrid = Hybrid(model, **OPTIONS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    hybrid.step()
    return [*sorted({a.optimizer for a in hybrid.assignments}), message(Hybrid(stage(False), **OPTIONS).build)]


def all_on_ranks(rank: int, world_size: int) -> tuple[list[str], list[str], list[str]]:
    return events(rank, world_size), refused_on_one_rank(rank, world_size), stage_without_matrices(rank, world_size)


def test_hybrid_keeps_one_state_on_two_ranks() -> None:
    results: list[Any] = run_ranks(all_on_ranks, 2)
    for problems, refused, _ in results:
        assert problems == []
        assert len(refused) == 1, refused
        assert "embed.weight: the state dict has no exp_avg with this optimizer's" in refused[0]
        assert "(on rank 1)" in refused[0]
    optimizers = [stage[:-1] for _, _, stage in results]
    assert optimizers == [["adamw"], ["adamw", "muon"]]
    assert all("Muon has no parameter to train" in stage[-1] for _, _, stage in results)
