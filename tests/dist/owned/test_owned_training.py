"""A model with owned matrices trains as under fully_shard, and as on one process."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from benchmarks.owned_model import Block, Net, Setup, data_mesh, loss_of, make, matrices, place, whole
from tests.dist.harness import on_all_ranks, on_ranks, run_ranks
from tests.shared import unsharded_bytes
from titan_muon import Owners, own
from titan_muon.engine.tensors.dtensor import local
from titan_muon.owned import is_owned

STEPS = 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def checkpointed(model: Net) -> None:
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)


class Recomputed(Block):
    """Recomputes the second half in backward, in a forward inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def recomputed_within(model: Net) -> None:
    for layer in model.layers:
        layer.__class__ = Recomputed


class RecomputedAround(Net):
    """Recomputes each layer in backward, hooks included."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.out(x)


def compiled(model: Net) -> None:
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


def frozen(model: Net) -> None:
    model.layers[1].wk.weight.requires_grad_(False)
    model.layers[2].wv.weight.requires_grad_(False)


def train(rank: int, world_size: int, setup: Setup, parts: int = 1, sync_each: bool = True) -> dict[str, Tensor]:
    """Parameters after a few steps of SGD with momentum on `parts` microbatches each."""
    model, shares, owners = make(), world_size // setup.tensor, None
    alone = setup.placement == "alone"
    if not alone:
        owners = place(model, setup, data_mesh(world_size, setup, model))
    elif setup.prepare is not None:
        setup.prepare(model)
    mine = range(shares) if alone else [rank // setup.tensor]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9, foreach=False)
    for step in range(STEPS):
        for part in range(parts):
            for reducing in () if alone or sync_each else filter(None, (model, owners)):
                reducing.set_requires_gradient_sync(part == parts - 1)
            for share in mine:
                (loss_of(model, share, shares, step, part) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if owners is not None:
        assert unsharded_bytes(owners) == 0, "copies of owned parameters are left over"
    return whole(model)


PLAIN, KEPT = Setup("owned"), Setup("owned", reshard=False)
HALF, TENSOR = Setup("owned", policy=BF16), Setup("owned", tensor=2)
SETUPS = {
    "plain": PLAIN,
    "freed": Setup("owned", reshard=True),
    "sharded first": Setup("owned", shard_first=True),
    "checkpointed and kept": replace(KEPT, prepare=checkpointed),
    "recomputed within": replace(PLAIN, prepare=recomputed_within),
    "recomputed around and kept": replace(KEPT, prepare=lambda model: setattr(model, "__class__", RecomputedAround)),
    # The input of the first layer then requires no gradient.
    "frozen input": replace(PLAIN, prepare=lambda model: model.inp.requires_grad_(False)),
    "compiled": replace(PLAIN, prepare=compiled),
    "frozen": replace(PLAIN, prepare=frozen),
    "bf16": HALF,
    "bf16 checkpointed": replace(HALF, prepare=checkpointed),
}
# A matrix without use on any rank: the gradient is zero.
UNUSED = replace(PLAIN, prepare=lambda model: setattr(model.layers[1].wq, "forward", lambda x: x))
REPEATED = replace(PLAIN, prepare=lambda model: model.layers.append(model.layers[0]))
# Equal bits where a sum has one order. Sums of three or more numbers differ in the last bits.
CLOSE = 1e-6
CASES: dict[str, tuple[int, Setup, str, float, tuple[int, bool]]] = {
    **{f"{name}, 2 ranks": (2, setup, "sharded", 0.0, (1, True)) for name, setup in SETUPS.items()},
    **{
        f"{name}, {parts} microbatches, synchronized each: {each}": (2, SETUPS[name], "sharded", 0.0, (parts, each))
        for name in ("plain", "bf16")
        for parts, each in ((2, True), (2, False))
    },
    **{f"1 process beside {n}": (n, PLAIN, "alone", 0.0 if n < 4 else CLOSE, (1, True)) for n in (1, 2, 4)},
    "unused": (2, UNUSED, "alone", 0.0, (1, True)),
    "repeated": (2, REPEATED, "alone", CLOSE, (1, True)),
    "HSDP": (4, replace(PLAIN, replicas=2), "sharded", CLOSE, (1, True)),
    "HSDP, bf16": (4, replace(HALF, replicas=2), "sharded", CLOSE, (1, True)),
    "FSDP x TP": (4, TENSOR, "sharded", 0.0, (1, True)),
    "FSDP x TP, checkpointed": (4, replace(TENSOR, prepare=checkpointed), "sharded", 0.0, (1, True)),
}
"""Ranks, the setup, the other placement, the largest difference, and microbatches with their synchronization."""


def both(rank: int, world_size: int, name: str) -> float:
    """Largest difference of any parameter between a setup and the same model placed otherwise."""
    _, setup, other, _, microbatches = CASES[name]
    setups = (setup, replace(setup, placement=other, shard_first=False))
    ours, theirs = (train(rank, world_size, each, *microbatches) for each in setups)
    start = whole(make())
    assert list(ours) == list(theirs)
    assert max(float((ours[name] - start[name]).abs().max()) for name in start) > 0.01, "nothing was trained"
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("name", CASES)
def test_owned_matrices_train_as_fsdp_and_as_one_process(name: str) -> None:
    world_size, _, _, most, _ = CASES[name]
    assert max(run_ranks(both, world_size, name)) <= most


class OutOfMemory(Exception):
    pass


def fail(*_: object) -> None:
    raise OutOfMemory


BEFORE, BETWEEN, AFTER = "before the forward", "between forward and backward", "before the update"
EVENTS: dict[str, tuple[str, str, str]] = {
    "evaluation": (AFTER, "forward", ""),
    "forward fails in a layer": (AFTER, "forward", "layers.1.w1"),
    "forward fails between layers": (AFTER, "forward", "layers.1"),
    **{f"backward fails at {p}": (BEFORE, "backward", p) for p in ("out", "layers.2.w2", "layers.1", "layers.0.wq")},
    "backward fails between forward and backward": (BETWEEN, "backward", "layers.1"),
}
"""When in a step, in which pass, and at which module a pass fails on every rank; an evaluation does not fail."""


def disturb(model: Net, rank: int, world_size: int, kind: str, place: str) -> None:
    module = model.get_submodule(place)
    hook = partial(module.register_forward_pre_hook, prepend=True) if kind == "forward" else None
    handle = (hook or module.register_full_backward_pre_hook)(fail) if place else None
    with suppress(OutOfMemory), torch.set_grad_enabled(kind == "backward"):
        loss = loss_of(model, rank, world_size, 9)
        if kind == "backward":
            loss.backward()
    if handle is not None:
        handle.remove()
    if kind == "backward":
        model.zero_grad()


def disturbed(rank: int, world_size: int, reshard: bool | None, event: str) -> list[list[float]]:
    """Losses of a few steps and the last gradients, with an event in the second step; and what is left at the end."""
    model = make()
    owners = Owners(model, mesh=data_mesh(world_size, PLAIN, model), params=matrices(model))
    for layer in model.layers:
        # FSDP2 is not compared: without a reshard it continues with stale weights after an evaluation.
        own(layer, owners=owners, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(matrices(model), lr=0.2)
    losses, (moment, *what) = [], EVENTS.get(event, ("", "", ""))
    for step in range(3):
        now = moment if step == 1 else ""
        model.zero_grad()
        if now == BEFORE:
            disturb(model, rank, world_size, *what)
        loss = loss_of(model, rank, world_size, step)
        losses.append(loss.item())
        if now == BETWEEN:
            disturb(model, rank, world_size, *what)
        loss.backward()
        if now == AFTER:
            disturb(model, rank, world_size, *what)
        optimizer.step()
    left = unsharded_bytes(owners) + len(owners.context.reductions.pending)
    gradients = [local(p.grad).flatten().tolist() for p in matrices(model) if p.grad is not None]
    return [[float(left)], losses, *gradients]


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, False])
def test_an_interruption_leaves_the_training_unchanged(rank: int, reshard: bool | None) -> None:
    """After an evaluation before an update, or a failed pass, nothing is stale or left over."""
    undisturbed = disturbed(rank, 2, reshard, "")
    assert undisturbed[0] == [0.0]
    for event in EVENTS:
        assert disturbed(rank, 2, reshard, event) == undisturbed, event


def placed(world_size: int, setup: Setup = PLAIN) -> tuple[Net, Owners]:
    model = make()
    return model, place(model, setup, data_mesh(world_size, setup, model))


@on_ranks(1)
def test_a_change_of_unsharded_weights_is_an_error_on_the_owner(rank: int) -> None:
    """Between forward and backward."""
    model, _ = placed(1, KEPT)
    owned_param = model.layers[0].wq.weight
    loss_of(model, rank, 1, 0)
    with torch.no_grad():
        owned_param.mul_(2.0)
        with pytest.raises(RuntimeError, match="owned parameters were changed"):
            model.layers[0](torch.ones(1, 2, 32))


@on_ranks(2)
def test_a_matrix_may_be_frozen_and_thawed(rank: int) -> None:
    model, owners = placed(2)
    owned_param = model.layers[1].wv.weight
    is_owner = owners.owners("layers.1.wv.weight") == (rank,)
    for trained in (True, False, True):
        owned_param.requires_grad_(trained)
        loss_of(model, rank, 2, 0).backward()
        assert (owned_param.grad is not None) == (is_owner and trained)
        model.zero_grad()


@on_ranks(2)
def test_the_policy_sets_the_dtypes_of_a_module(rank: int) -> None:
    """Of a weight in use, also if the policy overrides its dtype, of the output, and of the owner's gradient."""
    block, seen = Block(), []
    mesh = data_mesh(2, Setup("owned"), make())
    own(block, mesh=mesh, mp_policy=replace(BF16, output_dtype=torch.float64))
    block.norm1.bfloat16(), block.norm2.bfloat16(), block.w1.bias.data.bfloat16()
    block.wq.register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
    for module in (block.w1, block.w2):
        module.bias = None
    output = block(torch.ones(1, 2, 32, requires_grad=True))
    output.sum().backward()
    policy = replace(BF16, cast_forward_inputs=False)
    # A field of the frozen policy from PyTorch 2.15 on.
    object.__setattr__(policy, "param_dtype_override_fn", lambda parameter: torch.float64)
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    own(layer, mesh=mesh, mp_policy=policy)
    seen.append(layer(torch.ones(1, 16, dtype=torch.float64)).dtype)
    assert [*seen, output.dtype] == [torch.bfloat16, torch.float64, torch.float64]
    owned_param = block.wq.weight
    grads = on_all_ranks(None if owned_param.grad is None else owned_param.grad.dtype)
    assert owned_param.dtype == torch.float32
    assert sorted(grads, key=str) == [None, torch.float32], "the owner alone has a gradient"


def reduced(rank: int, world_size: int) -> list[list[float]]:
    """A gradient of own and of fully_shard over two microbatches, without a reduce dtype and with each of two."""
    gradients, mesh = [], init_device_mesh("cpu", (world_size,))
    for dtype, owned in product((None, torch.bfloat16, torch.float32), (True, False)):
        policy = MixedPrecisionPolicy(torch.bfloat16, dtype)
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(16, 16, bias=False))
        reducing: Any = Owners(layer, mesh=mesh) if owned else layer
        own(layer, owners=reducing, mp_policy=policy) if owned else fully_shard(layer, mesh=mesh, mp_policy=policy)
        generator = torch.Generator().manual_seed(rank)
        for last in (False, True):
            reducing.set_requires_gradient_sync(last)
            layer(torch.randn(64, 16, generator=generator)).float().square().sum().backward()
        gradient: Any = layer[0].weight.grad
        gradients.append([] if gradient is None else (local(gradient) if owned else gradient.full_tensor()).tolist())
    return gradients


def test_gradients_are_reduced_in_fully_shards_dtype() -> None:
    """Without a reduce dtype: in the param dtype, and from PyTorch 2.15 on in the dtype of the stored parameter."""
    none, of_none, half, of_half, full, of_full = next(found for found in run_ranks(reduced, 2) if found[0])
    assert (none, half, full) == (of_none, of_half, of_full)
    assert half != full, "the dtypes must differ in what they make of these gradients"
    assert none == (half if torch.__version__ < "2.15" else full)


@on_ranks(2)
def test_a_forward_after_an_update_without_a_backward_takes_the_new_weights(rank: int) -> None:
    """A last module waits for a backward meanwhile."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, bias=False)
    own(layer, mesh=init_device_mesh("cpu", (2,)), params=[layer.weight])
    before = layer(torch.ones(2, 8)).detach()
    with torch.no_grad():
        local(layer.weight).mul_(2)
    assert torch.equal(layer(torch.ones(2, 8)), 2 * before)


@on_ranks(2)
def test_the_next_module_is_prefetched_during_compute(rank: int) -> None:
    """One layer ahead in forward, one layer back in backward, and at most two at once."""
    model, owners = placed(2)
    seen: list[list[str]] = []
    held: list[int] = []

    def look(*_: object) -> None:
        seen.append([hooks.group.state.name for hooks in owners.context.hooks])
        held.append(unsharded_bytes(owners))

    for block in model.layers:
        block.wq.register_forward_hook(look)
        block.w2.register_full_backward_pre_hook(look)
    loss_of(model, rank, 2, 0).backward()
    assert seen == [
        ["UNSHARDED", "UNSHARDING", "OWNED"],
        ["OWNED", "UNSHARDED", "UNSHARDING"],
        ["OWNED", "OWNED", "UNSHARDED"],
        ["OWNED", "UNSHARDING", "UNSHARDED"],
        ["UNSHARDING", "UNSHARDED", "OWNED"],
        ["UNSHARDED", "OWNED", "OWNED"],
    ]
    layer = 4 * (4 * 32 * 32 + 2 * 32 * 80)
    assert held == [2 * layer, 2 * layer, layer, 2 * layer, 2 * layer, layer]


@on_ranks(2)
def test_the_hook_of_an_owned_gradient_is_called_on_the_owner_alone(rank: int) -> None:
    model, _ = placed(2)
    called = {name: 0 for name, param in model.named_parameters() if is_owned(param)}

    def count(name: str, param: Tensor) -> None:
        assert param.grad is not None, "the reduced gradient is there"
        called[name] += 1

    for name in called:
        model.get_parameter(name).register_post_accumulate_grad_hook(partial(count, name))
    loss_of(model, rank, 2, 0).backward()
    first, second = on_all_ranks(called)
    assert first
    assert all(sorted((first[name], second[name])) == [0, 1] for name in first)
