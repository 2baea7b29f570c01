"""Optimizers that bench_step.py compares: torch.optim.Muon on gathered matrices, stacks padded to the ranks, ours,
torchtitan's DistMuon, AdamW."""

import contextlib
import importlib.util
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_muon import Expert, Muon
from titan_muon.engine.orthogonalize import iteration
from titan_muon.engine.orthogonalize.newton_schulz import reference
from titan_muon.kernels.fused import usable
from titan_muon.options import Machine

JORDAN = iteration("keller_jordan", 5, 1e-7)
HYPERPARAMETERS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "ns_steps": 5}
INITIAL, GRADIENT = 0, 1


@dataclass(frozen=True)
class Model:
    """Shapes of a layer's matrices by name, and the number of layers."""

    layers: int
    shapes: Mapping[str, tuple[int, int]]

    def full(self, kind: int) -> dict[str, Tensor]:
        """Whole parameters (`INITIAL`) or gradients (`GRADIENT`) by name, in fp32, equal on every rank."""
        generator = torch.Generator().manual_seed(kind)
        return {
            f"layers.{layer}.{name}": torch.randn(shape, generator=generator)
            for layer in range(self.layers)
            for name, shape in self.shapes.items()
        }


def transformer(layers: int, width: int, kv: int, ffn: int) -> Model:
    """Attention with `kv` columns of keys and values, and a gated feed-forward of width `ffn`."""
    shapes = {"q": (width, width), "k": (kv, width), "v": (kv, width), "o": (width, width)}
    return Model(layers, {**shapes, "gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)})


MODELS = {
    "peers": transformer(layers=4, width=256, kv=128, ffn=704),
    "dense12": transformer(layers=12, width=512, kv=128, ffn=1408),
    # The products of bfloat16 on a CPU without its instructions take seconds here, and minutes for `peers`.
    "small": transformer(layers=6, width=128, kv=64, ffn=352),
    "tiny": transformer(layers=1, width=16, kv=8, ffn=40),
    # 100 M parameters: all contenders together fit on a GPU with 16 GB.
    "gpu": transformer(layers=4, width=1536, kv=512, ffn=4096),
}


class Steps(Protocol):
    """A timed optimizer."""

    def step(self) -> Any:
        """One update of the parameters."""


Parameters = dict[str, nn.Parameter]
Builder = Callable[[Parameters, DeviceMesh], Steps]


def sharded(model: Model, mesh: DeviceMesh) -> Parameters:
    """The model's parameters in rows over the mesh, with gradients."""

    def rows(whole: Tensor) -> Tensor:
        return distribute_tensor(whole.to(mesh.device_type), mesh, [Shard(0)], src_data_rank=None)

    gradients = model.full(GRADIENT)
    params = {}
    for name, whole in model.full(INITIAL).items():
        params[name] = nn.Parameter(rows(whole))
        params[name].grad = rows(gradients[name])
    return params


class Gathered:
    """Plain torch.optim.Muon: every rank gathers all gradients and trains whole copies of the parameters."""

    def __init__(self, params: Parameters, mesh: DeviceMesh) -> None:
        self.params = params
        self.whole = {name: nn.Parameter(param.detach().full_tensor()) for name, param in params.items()}  # type: ignore[attr-defined]
        self.optimizer = torch_muon(self.whole.values())

    @torch.no_grad()
    def step(self) -> None:
        """Gather, step, and copy this rank's rows back."""
        for name, param in self.params.items():
            self.whole[name].grad = param.grad.full_tensor()  # type: ignore[union-attr]
        self.optimizer.step()
        for name, param in self.params.items():
            mesh = param.device_mesh  # type: ignore[attr-defined]
            rows = distribute_tensor(self.whole[name].detach(), mesh, [Shard(0)], src_data_rank=None)
            param.to_local().copy_(rows.to_local())  # type: ignore[attr-defined]
            self.whole[name].grad = None


class Padded:
    """Matrices of a shape in rounds of one for each rank, as dion's and other Muons exchange them.

    A round is a gather to the owners and a return, each an all-to-all of equal parts. Zeros fill the last round of a
    shape, and rows up to a multiple of the ranks, so an owner may orthogonalize zeros.
    """

    def __init__(self, params: Parameters, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.ranks = mesh, mesh.get_local_rank(), mesh.size()
        self.momentum = {name: torch.zeros_like(param.to_local()) for name, param in params.items()}  # type: ignore[attr-defined]
        by_shape: dict[tuple[int, int], list[str]] = {}
        for name, param in params.items():
            by_shape.setdefault((param.shape[0], param.shape[1]), []).append(name)
        self.params = params
        self.rounds = [
            (shape, names[start : start + self.ranks])
            for shape, names in by_shape.items()
            for start in range(0, len(names), self.ranks)
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Momentum, then round after round."""
        for (rows, cols), names in self.rounds:
            height = -(-rows // self.ranks)
            parts = torch.zeros(self.ranks, height, cols, dtype=torch.bfloat16, device=self.mesh.device_type)
            for place, name in enumerate(names):
                grad, momentum = self.params[name].grad.to_local(), self.momentum[name]  # type: ignore[union-attr]
                momentum.lerp_(grad, 1 - HYPERPARAMETERS["momentum"])
                parts[place, : len(grad)] = grad.lerp(momentum, HYPERPARAMETERS["momentum"])
            whole = self._exchanged(parts).view(self.ranks * height, cols)[:rows]
            update = reference(whole, JORDAN.steps, JORDAN.eps)
            parts = self._exchanged(parts_of(update, self.ranks, height))
            for place, name in enumerate(names):
                local = self.params[name].to_local()  # type: ignore[attr-defined]
                rate = HYPERPARAMETERS["lr"] * 0.2 * math.sqrt(max(rows, cols))
                local.mul_(1 - HYPERPARAMETERS["lr"] * HYPERPARAMETERS["weight_decay"])
                local.add_(parts[place, : len(local)], alpha=-rate)

    def _exchanged(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.mesh.get_group())
        return received


def parts_of(whole: Tensor, ranks: int, height: int) -> Tensor:
    """The rows of a matrix in equal parts, with zeros behind the last row: (ranks, height, cols)."""
    padded = whole.new_zeros(ranks * height, whole.shape[1])
    padded[: len(whole)] = whole
    return padded.view(ranks, height, -1)


def torch_muon(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch.optim.Muon with the contenders' settings."""
    return torch.optim.Muon(params, adjust_lr_fn="match_rms_adamw", **HYPERPARAMETERS)  # type: ignore[arg-type]


def ours(
    exchange: str, params: Parameters, mesh: DeviceMesh | None, machine: Machine | None = None, **options: Any
) -> Muon:
    """Titan Muon with one of its exchanges, by default in torch.optim.Muon's arithmetic."""
    expert = Expert(exchange=exchange, **{"orthogonalize": "reference", **options})  # type: ignore[arg-type]
    return Muon(list(params.items()), expert=expert, machine=machine or Machine(), **HYPERPARAMETERS)  # type: ignore[arg-type]


def adamw(params: Parameters, mesh: DeviceMesh) -> torch.optim.Optimizer:
    """AdamW: a step without orthogonalization and communication."""
    return torch.optim.AdamW(params.values(), lr=0.02, weight_decay=0.1, fused=mesh.device_type == "cuda")


def dist_muon(params: Parameters, mesh: DeviceMesh) -> Steps:
    """torchtitan's DistMuon, a layer per bucket."""
    # Imported here, because the other contenders need only PyTorch.
    from torchtitan.distributed.flex_shard import BucketConfig, ComputeLayout, Owned
    from torchtitan.distributed.flex_shard.dist_muon import DistMuon

    class CpuDistMuon(DistMuon):
        """DistMuon without the check for CUDA."""

        def _validate_parameter_storage(self) -> torch.device:
            return torch.device("cpu")

    on_cpu = mesh.device_type == "cpu"
    if on_cpu:
        replace_streams()
    layers = dict.fromkeys(name.rsplit(".", 1)[0] for name in params)
    (axis,) = mesh.mesh_dim_names or ()
    return (CpuDistMuon if on_cpu else DistMuon)(
        [{"params": list(params.values()), "param_names": list(params)}],
        compute_sharding_by_fqn={name: ComputeLayout({axis: Owned()}) for name in params},
        bucket_configs=[BucketConfig((f"{layer}.*",), layer) for layer in layers],
        adjust_lr_fn="match_rms_adamw",
        **HYPERPARAMETERS,
    )


class NoStream:
    """A stream or event on the CPU: all work is already done."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def replace_streams() -> None:
    """Give torchtitan's runtime in this process streams and events for the CPU."""
    from torchtitan.distributed.flex_shard import _optimizer_reshard_runtime as reshard_runtime

    device = types.SimpleNamespace(
        Stream=NoStream,
        Event=NoStream,
        current_stream=NoStream,
        stream=lambda _: contextlib.nullcontext(),
        device=lambda _: contextlib.nullcontext(),
    )
    with_streams = types.ModuleType("torch")
    with_streams.__dict__.update(torch.__dict__, get_device_module=lambda _: device)
    reshard_runtime.torch = with_streams


FUSED = "all_to_all, auto, fused"
CONTENDERS: Mapping[str, Builder] = {
    "torch.optim.Muon, gathered": Gathered,
    "padded stacks": Padded,
    "all_gather": partial(ours, "all_gather"),
    "all_to_all": partial(ours, "all_to_all"),
    "all_gather_reduce_scatter": partial(ours, "all_gather_reduce_scatter"),
    "DistMuon": dist_muon,
    "all_to_all, auto": partial(ours, "all_to_all", orthogonalize="auto"),
    FUSED: partial(ours, "all_to_all", orthogonalize="auto", fused=True),
    "AdamW": adamw,
}
OTHER_ARITHMETIC = ("all_to_all, auto", FUSED, "AdamW")
"""Contenders compared by time only: their update differs from torch.optim.Muon's."""


def contenders(device: str) -> Mapping[str, Builder]:
    """Contenders of this machine: DistMuon needs torchtitan, and fused kernels need Triton on the device."""
    runs = {"DistMuon": importlib.util.find_spec("torchtitan") is not None, FUSED: usable(torch.device(device).type)}
    return {name: build for name, build in CONTENDERS.items() if runs.get(name, True)}
