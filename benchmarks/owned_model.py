"""A small transformer, trained alone, under fully_shard, and with owned matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan_muon.owned import Owners, gather, is_owned, own

DIM, HIDDEN, BLOCKS, BATCH, LENGTH = 32, 80, 3, 8, 6


class Block(nn.Module):
    """Attention and MLP; norms and biases stay sharded."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.wo(F.scaled_dot_product_attention(self.wq(y), self.wk(y), self.wv(y), is_causal=True))
        return x + self.w2(F.silu(self.w1(self.norm2(x))))


class Net(nn.Module):
    """Blocks between two sharded linear layers."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, dim), nn.Linear(dim, 8)
        self.layers = nn.ModuleList(Block(dim, hidden) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@dataclass(frozen=True)
class Setup:
    """Placement of a model: `owned`, `sharded` (FSDP2 alone) or `alone` (a single process, the whole batch).

    `prepare` changes the model before the placement. `tensor`: degree of tensor parallelism within the blocks.
    `shard_first`: call fully_shard before own.
    """

    placement: str
    reshard: bool | None = None
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    prepare: Callable[[Net], object] | None = None
    replicas: int = 1
    tensor: int = 1
    shard_first: bool = False


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """Owned parameters of the blocks."""
    return [p for name, p in module.named_parameters() if "layers" in name and p.ndim == 2]


def make(seed: int = 0, **sizes: int) -> Net:
    """The same model on every rank."""
    torch.manual_seed(seed)
    return Net(**sizes)


COLUMNS, ROWS = ("wq", "wk", "wv", "w1"), ("wo", "w2")


def data_mesh(world_size: int, setup: Setup, model: Net, device: str = "cpu") -> DeviceMesh:
    """Mesh of FSDP or HSDP, after tensor parallelism of the blocks, if any."""
    degrees = (setup.replicas, world_size // setup.replicas // setup.tensor, setup.tensor)
    mesh = init_device_mesh(device, degrees, mesh_dim_names=("replicate", "shard", "tensor"))
    if setup.tensor > 1:
        plan = {**dict.fromkeys(COLUMNS, ColwiseParallel()), **dict.fromkeys(ROWS, RowwiseParallel())}
        for layer in model.layers:
            parallelize_module(layer, mesh["tensor"], plan)
    return mesh["replicate", "shard"] if setup.replicas > 1 else mesh["shard"]


def place(model: Net, setup: Setup, mesh: DeviceMesh) -> Owners | None:
    """Place a model on the ranks of a mesh. Returns the owners, if any."""
    if setup.prepare is not None:
        setup.prepare(model)
    sharding: dict[str, Any] = {"mesh": mesh, "mp_policy": setup.policy, "reshard_after_forward": setup.reshard}
    if setup.placement == "sharded":
        for layer in dict.fromkeys(model.layers):
            fully_shard(layer, **sharding)
        fully_shard(model, mesh=mesh, mp_policy=setup.policy)
        summed_plainly(model)
        return None
    owners = Owners(model, mesh=mesh, params=matrices(model))
    options: dict[str, Any] = {"owners": owners, "mp_policy": setup.policy, "reshard_after_forward": setup.reshard}
    for layer in dict.fromkeys(model.layers):
        if setup.shard_first:
            fully_shard(layer, **sharding, ignored_params=set(matrices_of(layer)))
            own(layer, **options)
        else:
            fully_shard(layer, **sharding, ignored_params=own(layer, **options))
    fully_shard(model, mesh=mesh, mp_policy=setup.policy, ignored_params=set(filter(is_owned, model.parameters())))
    summed_plainly(model)
    return owners


def matrices_of(layer: nn.Module) -> list[nn.Parameter]:
    """The matrices of a layer."""
    return [p for p in layer.parameters() if p.ndim == 2]


def summed_plainly(model: nn.Module) -> None:
    """gloo has no PREMUL_SUM reduction."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def batch(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step's microbatch, equal on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    shape = (BATCH, LENGTH, 8)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def loss_of(model: nn.Module, share: int, shares: int, step: int, part: int = 0) -> Tensor:
    """The loss of a share of a microbatch, on the model's device."""
    device = next(model.parameters()).device
    x, y = (t.chunk(shares)[share].to(device) for t in batch(step, part))
    return F.mse_loss(model(x).float(), y)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole, by plain name."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): gather(parameter)
        for name, parameter in model.named_parameters()
    }
