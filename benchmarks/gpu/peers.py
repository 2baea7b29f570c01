"""Steps of Muons in one process, in rotation, on plain tensors.

All contenders share weights and gradients and have a state of their own. Each gets five steps of Keller Jordan's
coefficients, as far as it can be told so; the column `coefficients` says which it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.contenders import HYPERPARAMETERS, JORDAN, dist_muon, torch_muon
from benchmarks.gpu import Rows
from benchmarks.gpu.launches import Clock, one_process
from titan_muon import Expert, Muon
from titan_muon.engine.orthogonalize import iterate, iteration

MATRICES: Mapping[str, Mapping[str, Mapping[tuple[int, int], int]]] = {
    "cuda": {
        # 28 layers: q and o; k and v; gate and up; down.
        "Qwen3-1.7B": {(2048, 2048): 56, (1024, 2048): 56, (6144, 2048): 56, (2048, 6144): 28},
        "128 experts": {(768, 2048): 128},
    },
    "cpu": {"Qwen3-1.7B": {(32, 32): 4, (16, 32): 4, (96, 32): 2}, "128 experts": {(12, 32): 8}},
}
"""Number of matrices by shape, and small ones for a rehearsal."""
TURNS = {"cuda": 30, "cpu": 3}
LATE = 3
"""A contender that compiles its whole step joins after a third of the turns."""
WIPED = {"cuda": 2**30, "cpu": 2**20}
"""Bytes that are written before a cold step, so that caches hold nothing of it."""
FIVE, DION = "keller_jordan", "you_jiacheng"
"""Coefficients of five steps. dion's Newton-Schulz without Polar Express has others."""
LR, DECAY = HYPERPARAMETERS["lr"], HYPERPARAMETERS["weight_decay"]
Parameters = dict[str, nn.Parameter]
Step = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """A way to step: `build` gets named parameters with gradients, and returns the step."""

    build: Callable[[Parameters], Step]
    coefficients: str = FIVE
    late: bool = False


def _torch(params: Parameters, *, compiled: bool = False) -> Step:
    step = torch_muon(params.values()).step
    if not compiled:
        return step
    is_cuda = next(iter(params.values())).is_cuda
    return torch.compile(step, backend="inductor" if is_cuda else "aot_eager")


def _gram(params: Parameters, *, kernels: bool) -> Step:
    from gram_newton_schulz import Muon as GramMuon

    if kernels:
        # The package falls back without a word.
        from quack import gemm_interface  # noqa: F401
    coefficients = [list(row) for row in JORDAN.steps]
    more = {"ns_coefficients": coefficients, "ns_use_kernels": kernels, "gram_newton_schulz_restart_iterations": [2]}
    return GramMuon(list(params.values()), lr=LR, weight_decay=DECAY, momentum=0.95, **more).step


def _dion(params: Parameters, *, graph: bool = False) -> Step:
    from dion import Muon as DionMuon
    from dion.cuda_graph import CudaGraphOptimizer

    more = {"use_polar_express": False, "use_triton": next(iter(params.values())).is_cuda}
    made = DionMuon(list(params.values()), lr=LR, weight_decay=DECAY, nesterov=True, adjust_lr="rms_norm", **more)
    return CudaGraphOptimizer(made, warmup_steps=2).step if graph else made.step


def _emerging(params: Parameters) -> Step:
    from emerging_optimizers.orthogonalized_optimizers import Muon as EmergingMuon

    more = {"nesterov": True, "extra_scale_factor": 0.2, "coefficient_type": "simple"}
    return EmergingMuon(list(params.values()), lr=LR, weight_decay=DECAY, **more).step


def _dist_muon(params: Parameters) -> Step:
    from titan_muon.trainer.torchtitan import compat

    # Before the import of TorchTitan, which copies the device.
    compat.install()
    device = next(iter(params.values())).device.type
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))
    whole = {}
    for name, param in params.items():
        whole[name] = nn.Parameter(DTensor.from_local(param.detach(), mesh, [Shard(0)], run_check=False))
        assert param.grad is not None, "the caller sets gradients"
        whole[name].grad = DTensor.from_local(param.grad, mesh, [Shard(0)], run_check=False)
    return dist_muon(whole, mesh).step


def _ours(params: Parameters, **expert: Any) -> Step:
    return Muon(list(params.items()), expert=Expert(**expert), **HYPERPARAMETERS).build().step  # type: ignore[arg-type]


def _adamw(params: Parameters) -> Step:
    return torch.optim.AdamW(params.values(), lr=LR, weight_decay=DECAY, fused=True).step


CONTENDERS: Mapping[str, Contender] = {
    "torch.optim.Muon": Contender(_torch),
    "ours": Contender(_ours),
    "ours, reference": Contender(partial(_ours, orthogonalize="reference")),
    "ours, fused": Contender(partial(_ours, fused=True)),
    "gram-newton-schulz": Contender(partial(_gram, kernels=True)),
    "gram-newton-schulz without its kernels": Contender(partial(_gram, kernels=False)),
    "dion": Contender(_dion, DION),
    "dion, CudaGraphOptimizer": Contender(partial(_dion, graph=True), DION),
    "Emerging-Optimizers": Contender(_emerging),
    "DistMuon": Contender(_dist_muon),
    "AdamW, fused": Contender(_adamw, "none"),
    "torch.optim.Muon, compiled": Contender(partial(_torch, compiled=True), late=True),
}


def parameters(shapes: Mapping[tuple[int, int], int], device: torch.device) -> Parameters:
    """Random parameters with gradients, equal in each call. Names have the layer and the matrix."""
    torch.manual_seed(0)
    params = {}
    for shape, number in shapes.items():
        for index in range(number):
            param = nn.Parameter(torch.randn(shape, device=device).mul_(0.02))
            param.grad = torch.randn(shape, device=device).mul_(1e-3)
            params[f"layers.{index}.{shape[0]}x{shape[1]}"] = param
    return params


def compare(workload: str, rows: Rows, device: torch.device) -> None:
    """Rows of errors, of builds with memory, and of the times of each contender in each turn."""
    shapes = MATRICES[device.type][workload]
    with one_process(device):
        for name, contender in CONTENDERS.items():
            if not contender.late and not rows.is_over:
                with rows.faults(contender=name, measured="error of one update"):
                    write_errors(name, contender, shapes, device, rows)
        params, ready = parameters(shapes, device), dict[str, Step]()
        add(ready, params, rows, device, late=False)
        clock, turns = Clock(device), TURNS[device.type]
        wiped = torch.empty(WIPED[device.type], dtype=torch.uint8, device=device)
        for turn in range(turns):
            if turn == turns // LATE:
                add(ready, params, rows, device, late=True)
            names = [*ready]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if rows.is_over:
                    return
                with rows.faults(contender=name, measured="step", turn=turn):
                    wiped.zero_()
                    cold = clock.once(ready[name])
                    hot = clock.once(ready[name])
                    columns = {f"cold {key}": value for key, value in cold.items()}
                    rows.write(contender=name, measured="step", turn=turn, **columns, **hot)


def write_errors(
    name: str, contender: Contender, shapes: Mapping[tuple[int, int], int], device: torch.device, rows: Rows
) -> None:
    """Row with the error of one update against the same steps in float64, by shape.

    The update's size is fitted, because packages scale updates by different rules.
    """
    params = parameters(dict.fromkeys(shapes, 1), device)
    before = {key: param.detach().clone() for key, param in params.items()}
    contender.build(params)()
    errors = {}
    for key, param in params.items():
        if contender.coefficients == "none":
            continue
        # The first momentum is a multiple of the gradient, with Nesterov's too. The decay is taken out.
        update = before[key].double() * (1 - LR * DECAY) - param.detach().double()
        assert param.grad is not None, "no contender drops a gradient"
        steps = iteration(contender.coefficients, 5, JORDAN.eps)
        errors[key] = fitted_error(update, iterate(param.grad[None].double(), steps.steps, steps.eps, torch.float64)[0])
    rows.write(contender=name, measured="error of one update", coefficients=contender.coefficients, errors=errors)


def fitted_error(update: Tensor, exact: Tensor) -> float:
    """Relative error of an update in the Frobenius norm, after the best scale."""
    scale = (update * exact).sum() / exact.square().sum()
    return float((update / scale - exact).norm() / exact.norm())


def add(ready: dict[str, Step], params: Parameters, rows: Rows, device: torch.device, *, late: bool) -> None:
    """Build contenders and take three steps of each. A row has the memory that it holds and needs."""
    clock = Clock(device)
    for name, contender in CONTENDERS.items():
        if contender.late != late or rows.is_over:
            continue
        with rows.faults(contender=name, measured="build"):
            held = torch.cuda.memory_allocated() if clock.is_gpu else 0
            step = contender.build(params)
            first = clock.once(step)
            # A graph is captured in the third step.
            for _ in range(2):
                step()
            memory: dict[str, float] = {}
            if clock.is_gpu:
                torch.cuda.reset_peak_memory_stats()
                own = torch.cuda.memory_allocated()
                clock.once(step)
                memory = {"held GiB": (own - held) / 2**30,
                          "temporary GiB": (torch.cuda.max_memory_allocated() - own) / 2**30}  # fmt: skip
            rows.write(contender=name, measured="build", **{f"first {key}": ms for key, ms in first.items()}, **memory)
            ready[name] = step
