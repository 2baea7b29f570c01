"""Gradients that are summed over HSDP's replicas where their momentum is: the same steps, and half of the bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.features.test_state_owner import said
from tests.dist.harness import run_ranks
from titan_muon import Muon, reduce_scatter_replicas
from titan_muon.fsdp.replica_gradients import _Reduction
from titan_muon.plan.cost.replicas import replica_traffic
from titan_muon.plan.terms.machine import MACHINES
from titan_muon.titan.assign.clip import GradientClip, local_gradient

DIM, LAYERS, STEPS = 10, 3, 4
OPTIONS: dict[str, Any] = {"lr": 0.02, "orthogonalize": "reference", "state": "owner"}


class Layer(nn.Module):
    """Matrices for Muon, uneven ones and a norm between them, and biases and norms for another optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 14, bias=False)
        self.norm = nn.LayerNorm(14)
        self.down = nn.Linear(14, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.down(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Setup:
    """How a model is sharded and trained. `shape` is of replicas, shards and, if there are three, tensor parallelism.

    `factor`: what gradients are divided by, None for the number of ranks. `defers`: whether FSDP2 reduces in the last
    backward of a step alone. `apart`: whether each matrix is a module of its own, all of which one replica keeps.
    """

    shape: tuple[int, ...] = (2, 2)
    factor: float | None = None
    microbatches: int = 1
    defers: bool = False
    dtype: torch.dtype = torch.float32
    reshards: bool | int = True
    apart: bool = False


def copied_input(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)


def local_output(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.to_local()


class Training:
    """A model under HSDP, and its two optimizers."""

    def __init__(self, setup: Setup, *, scatters: bool, **options: Any) -> None:
        self.setup = setup
        names = ("dp_replicate", "dp_shard", "tp")[: len(setup.shape)]
        self.mesh = init_device_mesh("cpu", setup.shape, mesh_dim_names=names)
        torch.manual_seed(0)
        self.net = Net().to(setup.dtype)
        self._shard(self.mesh["dp_replicate", "dp_shard"])
        trained = [(name, param) for name, param in self.net.named_parameters() if param.ndim == 2]
        self.matrices = [(name, param) for name, param in trained if not name.startswith("head")]
        self.muon = Muon(self.matrices, **(OPTIONS | options))
        ours = {param for _, param in self.matrices}
        self.rest = torch.optim.AdamW([param for param in self.net.parameters() if param not in ours], lr=0.01)
        self.scattered = reduce_scatter_replicas(self.net, self.muon) if scatters else {}

    def _shard(self, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in self.net.layers:
            if len(self.setup.shape) > 2:
                parallelize_module(layer, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                layer.norm = nn.Identity()
                distribute_module(layer.out, self.mesh["tp"], input_fn=copied_input, output_fn=local_output)
            for module in (layer.up, layer.down, layer.out) if self.setup.apart else ():
                fully_shard(module, mesh=mesh, mp_policy=policy)
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=self.setup.reshards)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)
        for module in self.net.modules():
            if not isinstance(module, FSDPModule):
                continue
            # gloo has no PREMUL_SUM.
            module.set_force_sum_reduction_for_comms(True)
            if self.setup.factor is not None:
                module.set_gradient_divide_factor(self.setup.factor)

    def backward(self, step: int) -> None:
        place = self.mesh["dp_replicate", "dp_shard"].get_coordinate()
        assert place is not None
        generator = torch.Generator().manual_seed(100 * step + 10 * place[0] + place[1])
        for part in range(self.setup.microbatches):
            if self.setup.defers:
                self.net.set_requires_gradient_sync(part == self.setup.microbatches - 1)
            inputs = torch.randn(5, DIM, generator=generator, dtype=torch.float32).to(self.setup.dtype)
            self.net(inputs).square().mean().backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.muon.step()
        self.rest.step()
        self.net.zero_grad()

    def train(self, steps: range = range(STEPS)) -> "Training":
        for step in steps:
            self.step(step)
        return self

    def tensors(self) -> dict[str, Tensor]:
        averages = {f"momentum of {n}": self.muon.state[p]["momentum_buffer"] for n, p in self.matrices}
        return {name: local(each) for name, each in {**dict(self.net.named_parameters()), **averages}.items()}


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def largest_difference(first: Training, second: Training) -> float:
    theirs = second.tensors()
    found = [(value - theirs[name]).abs().max().item() for name, value in first.tensors().items() if value.numel()]
    return max(found)


def beside(rank: int, world_size: int, setups: dict[str, Setup]) -> dict[str, float]:
    """How far weights and momenta are from those of FSDP2's all-reduce."""
    return {
        name: largest_difference(Training(setup, scatters=True).train(), Training(setup, scatters=False).train())
        for name, setup in setups.items()
    }


TWO_REPLICAS = {
    "one microbatch": Setup(),
    "gradients divided by a factor": Setup(factor=1.0),
    "summed in each of three passes": Setup(microbatches=3),
    "summed in the last of three": Setup(microbatches=3, defers=True),
    "bfloat16 weights, float32 sums": Setup(dtype=torch.bfloat16),
    "kept whole between passes": Setup(reshards=False),
    "modules of one matrix": Setup(apart=True),
}
FOUR_REPLICAS = {"four replicas of one": Setup((4, 1), microbatches=2)}
# A shard of a tensor that tensor parallelism copies is summed on one line of replicas, and on the other by nobody.
EIGHT_RANKS = {"two of two and two": Setup((2, 2, 2)), "four of one and two": Setup((4, 1, 2))}


def test_steps_are_those_of_an_all_reduce_bit_for_bit_on_two_replicas() -> None:
    for found in run_ranks(beside, 4, TWO_REPLICAS):
        assert found == dict.fromkeys(TWO_REPLICAS, 0.0)


@pytest.mark.parametrize(("world_size", "setups"), [(4, FOUR_REPLICAS), (8, EIGHT_RANKS)], ids=str)
def test_steps_are_those_of_an_all_reduce_on_more(world_size: int, setups: dict[str, Setup]) -> None:
    """To the rounding of a sum in another order."""
    for found in run_ranks(beside, world_size, setups):
        assert max(found.values()) < 1e-6, found


def norms(rank: int, world_size: int, shape: tuple[int, ...]) -> list[list[float]]:
    """The norms of all gradients and of the matrices', summed either way."""
    found = []
    for scatters in (True, False):
        each = Training(Setup(shape), scatters=scatters)
        each.backward(0)
        params, ours = list(each.net.parameters()), [param for _, param in each.matrices]
        clip = GradientClip(params, ours, max_norm=1.0, stage_ranks=world_size, scattered=each.scattered)
        found.append(clip._norms([None if param.grad is None else local_gradient(param) for param in params]).tolist())
    return found


@pytest.mark.parametrize(("world_size", "shape"), [(4, (2, 2)), (8, (2, 2, 2)), (8, (4, 1, 2))])
def test_norms_count_each_gradient_once(world_size: int, shape: tuple[int, ...]) -> None:
    """What tensor parallelism copies is on one of its copies too."""
    for scattered, everywhere in run_ranks(norms, world_size, shape):
        assert scattered == pytest.approx(everywhere, rel=1e-6)


@dataclass(frozen=True)
class Counted:
    """Bytes over the replicas of a step, by collective, the planned ones, and gradients here and where they belong."""

    sent: dict[str, int]
    planned: int
    planned_all_reduce: int
    calls: int
    kept: dict[str, bool]
    zero: dict[str, bool]


def count(rank: int, world_size: int, setup: Setup) -> Counted:
    each = Training(setup, scatters=True)
    with CollectiveCounter() as counter:
        each.backward(1)
    line = tuple(dist.get_process_group_ranks(each.mesh.get_group("dp_replicate")))
    over = [call for call in counter.calls if call.ranks == line and call.name.startswith(("reduce_s", "allreduce"))]
    sent: dict[str, int] = {}
    for call in over:
        sent[call.name] = sent.get(call.name, 0) + call.sent
    # An all-reduce's share is an integer for each call.
    planned = replica_traffic(each.muon.plan, 4, MACHINES["cpu"])
    assert planned is not None
    kept = {parameter.fqn: rank in parameter.state_ranks for parameter in each.muon.plan.parameters}
    zero = {name: bool((local(param.grad) == 0).all()) for name, param in each.matrices if param.grad is not None}
    calls = sum(call.name.startswith("reduce_s") for call in over)
    return Counted(sent, planned.reduce_scatter, planned.all_reduce, calls, kept, zero)


@pytest.mark.parametrize("setup", [Setup(), Setup((4, 1)), Setup((4, 1), microbatches=2)], ids=str)
def test_what_is_sent_is_half_of_an_all_reduce_and_as_planned(setup: Setup) -> None:
    found = run_ranks(count, 4, setup)
    passes = setup.microbatches
    assert max(each.sent["reduce_scatter"] for each in found) == passes * found[0].planned
    assert sum(each.sent["reduce_scatter"] for each in found) * 2 <= passes * len(found) * found[0].planned_all_reduce
    for each in found:
        assert each.calls == passes * LAYERS
        assert each.sent["allreduce"] > 0, "what other optimizers train"
        # Where the momentum is the gradient is; on the other replicas it is zero, and not a part of a sum.
        assert each.zero == {name: not here for name, here in each.kept.items()}


def alive(rank: int, world_size: int) -> tuple[list[bool], list[bool]]:
    """Whether a module's summed gradients are there while those of the next are summed, and behind backward."""
    each, flats, found = Training(Setup(dtype=torch.bfloat16), scatters=True), list[StorageWeakRef](), list[bool]()
    reduction = _Reduction.__call__

    def seen(self: _Reduction, reduced: Tensor) -> None:
        found.extend(not flat.expired() for flat in flats)
        flats.append(StorageWeakRef(reduced.untyped_storage()))
        reduction(self, reduced)

    with patch.object(_Reduction, "__call__", seen):
        each.backward(0)
    return found, [not flat.expired() for flat in flats]


def test_what_is_summed_is_held_until_backward_is_over() -> None:
    """Float32 sums of weights in bfloat16, whose memory another stream would fill with the next module's."""
    for during, behind in run_ranks(alive, 4):
        assert during == [True] * (LAYERS * (LAYERS - 1) // 2)
        assert behind == [False] * LAYERS


def unused(each: Training) -> None:
    """A layer whose norm gets no gradient."""
    each.net.layers[0].norm.forward = lambda x: x  # type: ignore[method-assign, union-attr]
    each.backward(1)


def deferred(each: Training) -> None:
    each.net.set_requires_all_reduce(False)
    each.backward(1)


def hooked() -> None:
    each = Training(Setup(), scatters=False)
    for layer in each.net.layers:
        layer.set_all_reduce_hook(lambda flat: None)  # type: ignore[operator]
    reduce_scatter_replicas(each.net, each.muon)


def refusals(rank: int, world_size: int) -> dict[str, str]:
    def ours(act: Callable[[Training], object]) -> str:
        return said(lambda: act(Training(Setup(), scatters=True)))

    return {
        "replicated": said(lambda: Training(Setup(), scatters=True, state="replicated")),
        "one replica": said(lambda: Training(Setup((1, 4)), scatters=True)),
        "copies of tensor parallelism": said(lambda: Training(Setup((1, 2, 2)), scatters=True)),
        "twice": ours(lambda each: reduce_scatter_replicas(each.net, each.muon)),
        "hooked": said(hooked),
        "unused": ours(unused),
        "deferred": ours(deferred),
    }


def test_what_cannot_be_summed_so_is_refused() -> None:
    for found in run_ranks(refusals, 4):
        for name in ("replicated", "one replica", "copies of tensor parallelism", "twice"):
            assert "no parameter of Muon is in an FSDP module with replicas" in found[name], name
            assert 'state = "owner"' in found[name], name
        assert "layers.0: set_all_reduce_hook has been called" in found["hooked"]
        assert "layers.0: gradients of 195 elements of its 209: a trained parameter has none" in found["unused"]
        assert "layers.2: set_requires_all_reduce(False) leaves gradients unreduced" in found["deferred"]


def thaw(each: Training) -> None:
    """Trains without a matrix, then with it, whose momentum is on another replica perhaps."""
    frozen = each.net.layers[1].out.weight  # type: ignore[union-attr]
    for trains in (False, True):
        frozen.requires_grad_(trains)  # type: ignore[union-attr, operator]
        each.muon.load_state_dict(each.muon.state_dict())
        each.train(range(2))


def thawed(rank: int, world_size: int) -> float:
    pair = [Training(Setup(), scatters=scatters) for scatters in (True, False)]
    for each in pair:
        thaw(each)
    return largest_difference(*pair)


def test_a_new_plan_is_followed() -> None:
    assert run_ranks(thawed, 4) == [0.0] * 4


def freeze(each: Training) -> None:
    """Trains with all norms and then without: of other optimizers than Muon, which plans nothing anew."""
    each.train(range(1))
    for layer in each.net.layers:
        layer.norm.requires_grad_(False)  # type: ignore[union-attr, operator]
    each.train(range(1, 3))


def frozen(rank: int, world_size: int) -> float:
    pair = [Training(Setup(), scatters=scatters) for scatters in (True, False)]
    for each in pair:
        freeze(each)
    return largest_difference(*pair)


def test_what_others_train_may_be_frozen() -> None:
    assert run_ranks(frozen, 4) == [0.0] * 4


def not_finite(rank: int, world_size: int) -> tuple[str, float]:
    """One replica's gradient is not finite: what the next step says, and how far the matrix has moved."""
    each = Training(Setup(), scatters=True, weight_decay=0.0)
    name, param = each.matrices[0]
    before, spoiled = local(param), []

    def spoil(module: nn.Module, inputs: Any) -> None:
        if rank == world_size - 1:
            spoiled.append(module.weight.register_hook(lambda grad: grad * torch.inf))  # type: ignore[operator, union-attr]

    hook = each.net.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(spoil)
    each.step(0)
    for handle in (hook, *spoiled):
        handle.remove()
    return said(lambda: each.step(1)), (local(param) - before).abs().max().item()


def test_a_gradient_that_is_not_finite_on_one_replica_changes_no_weight_on_any() -> None:
    for text, moved in run_ranks(not_finite, 4):
        assert "layers.0.up.weight" in text
        assert "not finite" in text
        assert moved == 0.0
