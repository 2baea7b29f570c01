"""A model with owned matrices trains as under fully_shard, and as on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.dist.harness import run_ranks
from tests.dist.owned_model import Net, Setup, data_mesh, loss_of, make, place, whole

STEPS = 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def checkpointed(model: Net) -> None:
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)


def compiled(model: Net) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


def frozen(model: Net) -> None:
    model.layers[1].wk.weight.requires_grad_(False)
    model.layers[2].wv.weight.requires_grad_(False)


def train(rank: int, world_size: int, setup: Setup, parts: int = 1, sync_each: bool = True) -> dict[str, Tensor]:
    """Parameters after a few steps of SGD with momentum on `parts` microbatches each."""
    model = make()
    alone = setup.placement == "alone"
    owners = None if alone else place(model, setup, data_mesh(world_size, setup.replicas))
    if alone and setup.prepare is frozen:
        frozen(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9, foreach=False)
    for step in range(STEPS):
        for part in range(parts):
            last = part == parts - 1
            if not alone and not sync_each:
                model.set_requires_gradient_sync(last)
                if owners is not None:
                    owners.set_requires_gradient_sync(last)
            if alone:
                for share in range(world_size):
                    (loss_of(model, share, world_size, step, part) / world_size).backward()
            else:
                loss_of(model, rank, world_size, step, part).backward()
        optimizer.step()
        optimizer.zero_grad()
    if owners is not None:
        assert owners.passes.live_bytes == 0, "copies of owned parameters are left over"
    return whole(model)


def both(rank: int, world_size: int, setup: Setup, other: str, parts: int = 1, sync_each: bool = True) -> float:
    """Largest difference of any parameter between a setup and the same model placed otherwise."""
    ours = train(rank, world_size, setup, parts, sync_each)
    theirs = train(
        rank,
        world_size,
        Setup(other, setup.reshard, setup.policy, setup.prepare, setup.replicas),
        parts,
        sync_each,
    )
    start = whole(make())
    assert list(ours) == list(theirs) == list(start)
    assert max(float((ours[name] - start[name]).abs().max()) for name in ours) > 0.01, "nothing was trained"
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


SETUPS = {
    "plain": Setup("owned"),
    "kept": Setup("owned", reshard=False),
    "sharded first": Setup("owned", shard_first=True),
    "checkpointed": Setup("owned", prepare=checkpointed),
    "checkpointed and kept": Setup("owned", prepare=checkpointed, reshard=False),
    "compiled": Setup("owned", prepare=compiled),
    "frozen": Setup("owned", prepare=frozen),
    "bf16": Setup("owned", policy=BF16),
    "bf16 checkpointed": Setup("owned", policy=BF16, prepare=checkpointed),
}


@pytest.mark.parametrize("name", SETUPS)
def test_two_ranks_are_equal_to_fsdp(name: str) -> None:
    """Bit for bit: with two ranks a sum has one order."""
    assert run_ranks(both, 2, SETUPS[name], "sharded") == [0.0, 0.0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_follow_one_process(world_size: int) -> None:
    """Sums in another order differ in the last bits on 4 ranks."""
    differences = run_ranks(both, world_size, SETUPS["plain"], "alone")
    assert max(differences) <= (0.0 if world_size < 4 else 1e-6)


@pytest.mark.parametrize("sync_each", [True, False])
def test_gradients_accumulate(sync_each: bool) -> None:
    assert run_ranks(both, 2, SETUPS["plain"], "sharded", 2, sync_each) == [0.0, 0.0]


@pytest.mark.parametrize("name", ["plain", "bf16"])
def test_replicas_with_an_owner_each_are_equal_to_hsdp(name: str) -> None:
    setup = Setup("owned", policy=SETUPS[name].policy, replicas=2)
    assert max(run_ranks(both, 4, setup, "sharded")) <= 1e-6
