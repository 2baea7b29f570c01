"""Training with gathers in backward: the digits of training without, with accumulation and recomputed activations."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests import tiny
from tests.dist.features.test_overlap import BACKWARD, OPTIONS, WITHOUT
from tests.dist.harness import run_ranks
from tests.dist.titan.test_training_layouts import train as train_recipe
from tests.dist.titan.test_training_layouts import write_corpus, write_recipe
from titan_muon import Muon
from titan_muon.features.early import EarlyGathers

LAYOUTS: dict[str, tuple[int, tuple[int, ...], tuple[str, ...]]] = {
    "shard0": (2, (2,), ("shard",)),
    "tp": (2, (2,), ("tp",)),
    "hsdp": (4, (2, 2), ("replicate", "shard")),
    "fsdp_tp": (4, (2, 2), ("shard", "tp")),
}
"""Ranks, and the mesh with axes."""
DIM, LAYERS, STEPS, MICROBATCHES = 16, 4, 2, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@dataclass(frozen=True)
class Trained:
    """Parameters and momenta here, collectives of Muon before each step, and how many gathers there are."""

    tensors: list[Tensor]
    before: list[int]
    gathers: int


def make(axes: tuple[str, ...], mesh: DeviceMesh) -> Net:
    torch.manual_seed(0)
    net = Net()
    data = tuple(axis for axis in axes if axis != "tp")
    for layer in net.layers:
        if "tp" in axes:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if data:
            fully_shard(layer, mesh=mesh[data])
    if data:
        fully_shard(net, mesh=mesh[data])
    return net


def train(axes: tuple[str, ...], mesh: DeviceMesh, **options: Any) -> Trained:
    net = make(axes, mesh)
    muon, before = Muon(net.named_parameters(), **{**OPTIONS, **options}), []
    places = dict(zip(axes, mesh.get_coordinate() or (), strict=True)) | {"tp": 0}
    generator = torch.Generator().manual_seed(sum(3**index * place for index, place in enumerate(places.values())))
    for _ in range(STEPS):
        calls = muon.exchange.traffic.calls
        for part in range(MICROBATCHES):
            with muon.overlap() if part == MICROBATCHES - 1 else nullcontext():
                net(torch.randn(4, DIM, generator=generator)).square().mean().backward()
        before.append(muon.exchange.traffic.calls - calls)
        muon.step()
        muon.zero_grad()
    params = list(net.parameters())
    tensors = [*params, *(muon.state[param]["momentum_buffer"] for param in params)]
    return Trained([tensor.to_local().detach().clone() for tensor in tensors], before, len(muon.plan.buckets))


def compare(rank: int, world_size: int) -> dict[str, tuple[bool, list[int], list[int], int]]:
    """Whether digits are equal, and the collectives before each step without and with overlap."""
    differences = {}
    for name, (ranks, shape, axes) in LAYOUTS.items():
        if ranks == world_size:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
            without, overlapped = (train(axes, mesh, **options) for options in (WITHOUT, BACKWARD))
            equal = all(map(torch.equal, without.tensors, overlapped.tensors))
            differences[name] = equal, without.before, overlapped.before, overlapped.gathers
    return differences


@pytest.mark.parametrize("world_size", [2, 4])
def test_digits_equal_training_without_overlap_in_any_layout(world_size: int) -> None:
    for layouts in run_ranks(compare, world_size):
        for name, (equal, without, overlapped, gathers) in layouts.items():
            assert gathers > 1, "the case this test is for"
            assert without == [0] * STEPS
            assert overlapped == [gathers] * STEPS, name
            assert equal, name


def launches_and_losses(rank: int, world_size: int, path: str, overrides: list[str]) -> tuple[int, dict[int, float]]:
    count = 0
    launch = EarlyGathers.launch

    def counted(self: EarlyGathers, *args: Any) -> None:
        nonlocal count
        count += 1
        launch(self, *args)

    EarlyGathers.launch = counted  # type: ignore[method-assign, assignment]
    folder = train_recipe(path, overrides)
    return count, tiny.records(folder, "loss")


def test_backward_overlap_keeps_the_curve_of_a_recipe(tmp_path: Path) -> None:
    """Two passes to a step, and all activations computed anew in backward."""
    recipe = {"training.steps": 2, "training.local_batch_size": 1, "validator.enable": False}
    path = write_recipe(write_corpus(tmp_path), "llama3/tiny", "recipe", recipe)
    options = ["--training.seq_len", "64", "--muon.orthogonalize", "reference"]
    options += ["--activation_checkpoint.mode", "full", "--machine.node_gb", "1e-6", "--machine.tflops", "1"]
    options += ["--machine.tflops_float32", "1", "--machine.node_latency_us", "0"]
    runs = [run_ranks(launches_and_losses, 2, path, [*options, "--muon.overlap", o]) for o in ("none", "backward")]
    (without, with_overlap) = (run[0] for run in runs)
    assert with_overlap[1] == without[1]
    assert without[0] == 0
    assert with_overlap[0] > 2
