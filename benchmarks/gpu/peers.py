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
from benchmarks.one_gpu.one_rank import GIB, Memory
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
    """Rows of errors, of memory, and of the times of each contender in each turn."""
    shapes, turns = MATRICES[device.type][workload], TURNS[device.type]
    with one_process(device):
        for name, contender in CONTENDERS.items():
            if not contender.late:
                rows.measure(
                    partial(errors_of, contender, shapes, device), contender=name, measured="error of one update"
                )
        params, ready = parameters(shapes, device), dict[str, Step]()
        wiped = torch.empty(WIPED[device.type], dtype=torch.uint8, device=device)
        for turn in range(turns):
            for name, contender in CONTENDERS.items():
                if turn == (turns // LATE if contender.late else 0):
                    rows.measure(partial(build, name, params, ready, device), contender=name, measured="memory")
            names = [*ready]
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                run = partial(times_of, ready[name], wiped)
                rows.measure(run, contender=name, measured="step", turn=turn)


def build(name: str, params: Parameters, ready: dict[str, Step], device: torch.device) -> dict[str, Any]:
    """Add a contender to those that are ready, and take four steps. Returns the memory that it holds and needs."""
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    step = CONTENDERS[name].build(params)
    # A graph is captured in the third step.
    for _ in range(3):
        step()
    memory = Memory(device)
    step()
    ready[name] = step
    figures = memory.figures(1)
    return {**figures, "held GiB": figures["held GiB"] - held / GIB} if figures else {}


def times_of(step: Step, wiped: Tensor) -> dict[str, float]:
    """Times of a step whose data is in no cache, and of the next one."""
    clock = Clock(wiped.device)
    wiped.zero_()
    cold = clock.once(step)
    return {**{f"cold {key}": value for key, value in cold.items()}, **clock.once(step)}


def errors_of(contender: Contender, shapes: Mapping[tuple[int, int], int], device: torch.device) -> dict[str, Any]:
    """Relative error of one update in the Frobenius norm against the same steps in float64, by shape.

    The update's size is fitted, because packages scale updates by different rules.
    """
    params = parameters(dict.fromkeys(shapes, 1), device)
    before = {key: param.detach().clone() for key, param in params.items()}
    contender.build(params)()
    columns: dict[str, Any] = {"coefficients": contender.coefficients}
    for key, param in params.items() if contender.coefficients != "none" else ():
        # The first momentum is a multiple of the gradient, with Nesterov's too. The decay is taken out.
        update = before[key].double() * (1 - LR * DECAY) - param.detach().double()
        assert param.grad is not None, "no contender drops a gradient"
        steps = iteration(contender.coefficients, 5, JORDAN.eps)
        exact = iterate(param.grad[None].double(), steps.steps, steps.eps, torch.float64)[0]
        scale = (update * exact).sum() / exact.square().sum()
        columns[key] = float((update / scale - exact).norm() / exact.norm())
    return columns
