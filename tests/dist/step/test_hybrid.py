"""Hybrid on two ranks: it trains as one process, reads checkpoints of other optimizers, and saves what it trains."""

import copy
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.dist.harness import on_ranks
from tests.shared import equal, message, whole
from tests.unit.test_hybrid import MOMENTS, OPTIONS, SAME, Decoder, pair, problems_of, run_of, torch_adam
from tests.unit.test_hybrid import train as train_unclipped
from titan_muon import Expert, Hybrid, clip_grad_norm_

train = partial(train_unclipped, max_norm=1.0)


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def weights(model: nn.Module) -> list[Tensor]:
    return [whole(param).detach().clone() for param in model.parameters()]


def prepared(kind: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model under DDP or FSDP2, with separate optimizers, with a Hybrid, or with a recipe's container."""
    model = Decoder(seed)
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
        return wrapped, Hybrid(wrapped, **OPTIONS)
    if kind == "swapped":
        # Like Accelerate's `prepare`: shard after the construction of the optimizer, then put new parameters into the
        # groups.
        hybrid = Hybrid(model, **OPTIONS)
        shard(model)
        for group in hybrid.param_groups:
            group["params"] = [model.get_parameter(name) for name in group["param_names"]]
        return model, hybrid
    shard(model)
    if kind != "recipe":
        return model, pair(model) if kind == "pair" else Hybrid(model, **OPTIONS)
    from titan_muon.trainer import HybridOptimizers

    tables = {
        "muon": {"lr": 0.02, "expert": Expert(orthogonalize="reference")},
        "adamw": {"lr": 0.02, "weight_decay": 0.1},
    }
    return model, HybridOptimizers.Config(tables=tables, implementation="foreach").build(model_parts=[model])


def saved(model: nn.Module, optimizer: Any, options: StateDictOptions) -> dict[str, Any]:
    is_recipe = hasattr(optimizer, "model_parts")
    states = optimizer.state_dict() if is_recipe else get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model), "optimizer": states}


PAIRS = [*permutations(("pair", "hybrid", "recipe"), 2), *((kind, kind) for kind in ("ddp", "hybrid", "swapped"))]
"""The kind that saves a checkpoint, and the kind that continues from the checkpoint."""


@on_ranks(2)
def test_ranks_train_as_one_process_and_continue_each_others_checkpoints_with_equal_bits(
    rank: int, tmp_path: Path
) -> None:
    alone = Decoder()
    group = [dist.new_group([each]) for each in range(2)][rank]
    train(alone, Hybrid(alone, **OPTIONS, process_group=group), range(4))
    for source, target in PAIRS:
        options = StateDictOptions(flatten_optimizer_state_dict=source != target)
        model, optimizer = prepared(source)
        train(model, optimizer, range(2))
        path = f"{tmp_path}/{source}-{target}"
        dcp.save(saved(model, optimizer, options), checkpoint_id=path)
        other, reader = prepared(target, seed=1)
        state = saved(other, reader, options)
        # TorchTitan's containers save no `param_names`.
        dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=source == "recipe"))
        set_model_state_dict(other, state["model"])
        if target == "recipe":
            reader.load_state_dict(state["optimizer"])
        else:
            set_optimizer_state_dict(other, reader, state["optimizer"], options=options)
        train(model, optimizer, range(2, 4))
        train(other, reader, range(2, 4))
        assert equal(weights(model), weights(other)), (source, target)
        for weight, expected in zip(weights(model), weights(alone), strict=True):
            # Four updates of about 0.02 each. Newton-Schulz in bfloat16 magnifies differences of the last bits.
            torch.testing.assert_close(weight, expected, rtol=0, atol=2e-3)


@on_ranks(2)
def test_a_state_dict_on_rank_0_alone_is_refused_after_a_fault_and_read_after_a_skipped_step(rank: int) -> None:
    """As Trainer saves under DDP."""
    model, hybrid = prepared("ddp")
    train(model, hybrid, range(1))
    if rank == 0:
        hybrid.state_dict()
    train(model, hybrid, range(1, 2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    next(iter(model.parameters())).grad.fill_(torch.nan)
    hybrid.step()
    assert rank or "embed.weight" in message(hybrid.state_dict)
    assert "embed.weight" in message(hybrid.step)
    clip_grad_norm_(model.parameters(), 1.0, optimizer=hybrid)
    hybrid.step()
    if rank == 0:
        # The skipped step has changed nothing, so the state is right.
        hybrid.state_dict()
    assert "embed.weight" in message(hybrid.step)


@on_ranks(2)
@pytest.mark.parametrize("moment", MOMENTS)
def test_hybrid_saves_the_state_that_its_optimizers_train(rank: int, moment: str) -> None:
    """After each event. Plain tensors are replicas, as under DDP."""
    # FSDP keeps the parameters that it has made, and a copy of a device mesh is another mesh.
    sharded = ("read_state", "load_its_own", "freeze_and_thaw")
    with torch_adam():
        for name, event in SAME.items():
            for place in (None, shard) if name in sharded else (None,):
                assert problems_of(run_of(shard=place), moment, event, place) == [], (place, name)


@on_ranks(2)
def test_a_state_dict_that_is_wrong_on_one_rank_changes_nothing_on_any(rank: int) -> None:
    with torch_adam():
        run = run_of()
        train_unclipped(run.model, run.hybrid, range(2))
        wrong, before = (copy.deepcopy(run.hybrid.state_dict()["state"]) for _ in range(2))
        for value in (value for state in wrong.values() for value in state.values()):
            value.mul_(2)
        if rank == 1:
            wrong[0]["exp_avg"] = torch.zeros(3, 3)
        error = message(lambda: run.hybrid.load_state_dict({**run.hybrid.state_dict(), "state": wrong}))
        assert "embed.weight: the state dict has no exp_avg with this optimizer's" in error
        assert "(on rank 1)" in error
        for key, state in run.hybrid.state_dict()["state"].items():
            assert equal(before[key].values(), state.values())


@on_ranks(2)
def test_a_stage_without_matrices_trains_and_a_model_without_matrices_is_refused(rank: int) -> None:
    """Pipeline stages of one rank, with a linear layer or with an embedding alone."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]

    def stage(has_matrices: bool) -> Hybrid:
        part = nn.Sequential(nn.Linear(16, 32) if has_matrices else nn.Embedding(24, 16))
        fully_shard(part, mesh=mesh)
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
        return Hybrid(part, **OPTIONS)

    hybrid = stage(rank == 1)
    hybrid.step()
    assert sorted({a.optimizer for a in hybrid.assignments}) == (["adamw", "muon"] if rank == 1 else ["adamw"])
    assert "Muon has no parameter to train" in message(stage(False).build)
