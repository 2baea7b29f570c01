"""On two ranks Hybrid saves the state that its optimizers train, and loads on all ranks or on none."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.harness import on_ranks
from tests.dist.step.test_hybrid import shard
from tests.shared import equal, message
from tests.unit.test_hybrid import MOMENTS, OPTIONS, SAME, problems_of, run_of, torch_adam, train
from titan_muon import Hybrid


@on_ranks(2)
def test_hybrid_saves_the_state_that_its_optimizers_train(rank: int) -> None:
    """After each event at each moment. Plain tensors are replicas, as under DDP."""
    layouts: dict[str, Callable[[nn.Module], object] | None] = {"replicas": None, "fsdp": shard}
    with torch_adam():
        for layout, place in layouts.items():
            for name, event in SAME.items():
                # FSDP keeps the parameters that it has made, and a copy of a device mesh is another mesh.
                if layout == "fsdp" and name not in ("read_state", "load_its_own", "freeze_and_thaw"):
                    continue
                for moment in MOMENTS:
                    assert problems_of(run_of(shard=place), moment, event, place) == [], (layout, name, moment)


@on_ranks(2)
def test_a_state_dict_that_is_wrong_on_one_rank_changes_nothing_on_any(rank: int) -> None:
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
        assert "embed.weight: the state dict has no exp_avg with this optimizer's" in error
        assert "(on rank 1)" in error
        for key, state in run.hybrid.state_dict()["state"].items():
            assert equal(before[key].values(), state.values())


def stage(has_matrices: bool) -> nn.Module:
    """A pipeline stage of one rank, with hidden layers or with an embedding alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pp", "dp"))
    part = nn.Sequential(nn.Linear(16, 32) if has_matrices else nn.Embedding(24, 16))
    fully_shard(part, mesh=mesh["dp"])
    return part


@on_ranks(2)
def test_a_stage_without_matrices_trains_and_a_model_without_matrices_is_refused(rank: int) -> None:
    model = stage(has_matrices=rank == 1)
    hybrid = Hybrid(model, **OPTIONS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    hybrid.step()
    assert sorted({a.optimizer for a in hybrid.assignments}) == (["adamw", "muon"] if rank == 1 else ["adamw"])
    assert "Muon has no parameter to train" in message(Hybrid(stage(False), **OPTIONS).build)
