"""Hybrid under DDP, FSDP2 and FSDP2 with tensor parallelism trains as in one process."""

import itertools
from functools import partial
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
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.dist.harness import on_ranks
from tests.shared import equal, message, whole
from tests.unit.test_hybrid import OPTIONS, Decoder, pair
from tests.unit.test_hybrid import train as train_unclipped
from titan_muon import Expert, Hybrid, clip_grad_norm_


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def prepared(layout: str, model: Decoder) -> tuple[nn.Module, Hybrid]:
    """The model in a layout, and the optimizer."""
    if layout == "ddp":
        wrapped = DistributedDataParallel(model)
        return wrapped, Hybrid(wrapped, **OPTIONS)
    if layout == "fsdp":
        shard(model)
        return model, Hybrid(model, **OPTIONS)
    # Like Accelerate's `prepare`: shard after the construction of the optimizer, then put new parameters into the
    # groups.
    hybrid = Hybrid(model, **OPTIONS)
    shard(model)
    named = dict(model.named_parameters())
    for group in hybrid.param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    return model, hybrid


train = partial(train_unclipped, max_norm=1.0)


def weights(model: nn.Module) -> list[Tensor]:
    return [whole(param).detach().clone() for param in model.parameters()]


KINDS = ("pair", "hybrid", "recipe")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def sharded(kind: str, seed: int = 0) -> tuple[Decoder, Any]:
    """An FSDP2 model with separate optimizers, with a Hybrid, or with a recipe's container."""
    model = Decoder(seed)
    shard(model)
    if kind == "pair":
        return model, pair(model)
    if kind == "hybrid":
        return model, Hybrid(model, **OPTIONS)
    from titan_muon.trainer import HybridOptimizers

    tables = {
        "muon": {"lr": 0.02, "expert": Expert(orthogonalize="reference")},
        "adamw": {"lr": 0.02, "weight_decay": 0.1},
    }
    return model, HybridOptimizers.Config(tables=tables, implementation="foreach").build(model_parts=[model])


def saved(kind: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    states = optimizer.state_dict() if kind == "recipe" else get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {"model": model.state_dict(), "optimizer": states}


@on_ranks(2)
def test_separate_optimizers_a_hybrid_and_a_recipe_read_each_others_checkpoints(rank: int, tmp_path: Path) -> None:
    for source, target in itertools.permutations(KINDS, 2):
        model, optimizer = sharded(source)
        train(model, optimizer, range(2))
        path = f"{tmp_path}/{source}-{target}"
        dcp.save(saved(source, model, optimizer), checkpoint_id=path)
        other, reader = sharded(target, seed=1)
        states = saved(target, other, reader)
        # TorchTitan's containers save no `param_names`.
        planner = DefaultLoadPlanner(allow_partial_load=source == "recipe")
        dcp.load(states, checkpoint_id=path, planner=planner)
        other.load_state_dict(states["model"])
        if target == "recipe":
            reader.load_state_dict(states["optimizer"])
        else:
            set_optimizer_state_dict(other, reader, states["optimizer"], options=FLAT)
        train(model, optimizer, range(2, 4))
        train(other, reader, range(2, 4))
        assert equal(weights(model), weights(other)), (source, target)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "swapped"])
def test_ranks_train_as_a_single_process_and_resume_with_equal_bits(rank: int, layout: str, tmp_path: Path) -> None:
    alone = Decoder()
    group = [dist.new_group([each]) for each in range(2)][rank]
    train(alone, Hybrid(alone, **OPTIONS, process_group=group), range(5))
    model, hybrid = prepared(layout, Decoder())
    train(model, hybrid, range(3))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, hybrid), strict=True))
    dcp.save(states, checkpoint_id=tmp_path)
    train(model, hybrid, range(3, 5))
    other, resumed = prepared(layout, Decoder(seed=1))
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, resumed), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(other, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(other, resumed, range(3, 5))
    assert equal(weights(model), weights(other))
    for weight, expected in zip(weights(model), weights(alone), strict=True):
        # Five updates of about 0.02 each. Newton-Schulz in bfloat16 magnifies differences of the last bits.
        torch.testing.assert_close(weight, expected, rtol=0, atol=2e-3)


@on_ranks(2)
def test_a_state_dict_on_rank_0_alone_is_refused_after_a_fault_and_read_after_a_skipped_step(rank: int) -> None:
    """As Trainer saves under DDP."""
    model, hybrid = prepared("ddp", Decoder())
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
