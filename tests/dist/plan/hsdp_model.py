"""A model under HSDP with matrices for Muon and other parameters for AdamW, for tests."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan_muon import Muon

DIM, LAYERS, STEPS = 10, 3, 4
OPTIONS: dict[str, Any] = {"lr": 0.02, "orthogonalize": "reference"}


class Layer(nn.Module):
    """Uneven matrices for Muon with a norm in between, and biases and norms for the second optimizer."""

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
    """A sharded model in training.

    `shape`: replicas, shards and tensor parallelism, if any. `factor`: divisor of gradients; None for the number of
    ranks. `defers`: FSDP2 reduces only in the last backward of a step. `separate`: each matrix is a module, and one
    replica keeps all.
    """

    shape: tuple[int, ...] = (2, 2)
    factor: float | None = None
    microbatches: int = 1
    defers: bool = False
    dtype: torch.dtype = torch.float32
    reshards: bool | int = True
    separate: bool = False


def copied_input(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)


def local_output(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    return output.to_local()


class Training:
    """A model under HSDP, and the two optimizers."""

    def __init__(self, setup: Setup, **options: Any) -> None:
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

    def _shard(self, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in self.net.layers:
            if len(self.setup.shape) > 2:
                parallelize_module(layer, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                layer.norm = nn.Identity()
                distribute_module(layer.out, self.mesh["tp"], input_fn=copied_input, output_fn=local_output)
            for module in (layer.up, layer.down, layer.out) if self.setup.separate else ():
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
        return {name: local(tensor) for name, tensor in {**dict(self.net.named_parameters()), **averages}.items()}


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def largest_difference(first: Training, second: Training) -> float:
    theirs = second.tensors()
    errors = [(value - theirs[name]).abs().max().item() for name, value in first.tensors().items() if value.numel()]
    return max(errors)
