"""CPU time of Muon's step without Newton-Schulz and of AdamW's foreach step on the same DTensors, in a fake world.

    python benchmarks/host_cost.py                              # all models: a minute, most of it planning
    python benchmarks/host_cost.py --models dense_560 --profile
    python benchmarks/host_cost.py --no-fused                   # PyTorch's operators in the place of the kernels

One rank of the world steps, an owner, with the plan of the real shapes for GPUs: the same numbers of pieces, buckets
and batches. The tensors are on the CPU with a single column, so that only the host's time counts. The kernels of
`fused`, the default on GPUs, have empty launches: 8 to 16 us of Triton's launcher for each are not in the figures. The
optimizers take turns. Figures are medians of CPU time, hardly affected by other processes.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import models as families  # noqa: F401 (registers them)
from benchmarks import spread
from titan_muon.trainer.torchtitan import compat

compat.install()

from titan_muon import Expert, Muon
from titan_muon.engine.layout.intervals import Geometries
from titan_muon.engine.layout.types import Parameter, Plan
from titan_muon.trainer.dry_run.meta_model import build_meta_model
from titan_muon.trainer.recipe import load


@dataclass(frozen=True)
class Case:
    """A recipe in `configs/`, its expert-parallel degree and its ranks."""

    recipe: str
    expert_parallel: int
    ranks: int


CASES: Mapping[str, Case] = {
    "qwen3_30b_a3b": Case("qwen3_30b_a3b_muon", 8, 64),
    "kimi_k2": Case("kimi_k2_muon", 64, 1024),
    # Llama 3 70B: 80 layers of seven matrices.
    "dense_560": Case("llama3_70b_muon", 1, 64),
}


@dataclass(frozen=True)
class Cost:
    """Medians of the CPU time of a step, in milliseconds, on a rank with pieces of parameters."""

    parameters: int
    pieces: int
    muon: float
    adamw: float
    ratio: float
    spread: float


def with_one_column(parameter: Parameter) -> Parameter:
    """A parameter with a single column and the same row sharding."""
    *kept, last = range(len(parameter.layout.shape))
    assert all(getattr(placement, "dim", 0) != last for placement in parameter.layout.placements), (
        f"{parameter.fqn}: its columns are cut"
    )
    shape = tuple(parameter.layout.shape[dim] for dim in kept)
    return replace(parameter, layout=replace(parameter.layout, shape=(*shape, 1)))


def narrow(plan: Plan) -> Plan:
    """The same plan for parameters with a single column."""
    matrices = tuple(replace(matrix, cols=1) for matrix in plan.matrices)
    return replace(plan, parameters=tuple(map(with_one_column, plan.parameters)), matrices=matrices)


def narrow_parameters(plan: Plan, sharded: Mapping[str, Tensor], rank: int) -> dict[str, nn.Parameter]:
    """A rank's parameters of a narrow plan, on the CPU with gradients, placed like `sharded`."""
    params, meshes = {}, dict[DeviceMesh, DeviceMesh]()
    geometries = Geometries(plan.parameters)
    for index, parameter in enumerate(plan.parameters):
        like = sharded[parameter.fqn]
        assert isinstance(like, DTensor), f"{parameter.fqn} is sharded"
        if like.device_mesh not in meshes:
            meshes[like.device_mesh] = DeviceMesh("cpu", like.device_mesh.mesh.cpu())
        shape = torch.Size(parameter.layout.shape)
        stride = torch.empty(shape, device="meta").stride()

        placed = (meshes[like.device_mesh], like.placements)
        value, grad = (
            DTensor.from_local(torch.randn(geometries[index].local_shape(rank)), *placed, shape=shape, stride=stride)
            for _ in range(2)
        )
        params[parameter.fqn] = nn.Parameter(value)
        params[parameter.fqn].grad = grad
    return params


def all_to_all(output: Tensor, *_: Any, group: dist.ProcessGroup, **__: Any) -> Any:
    """A collective with the usual host cost; the fake process group's all-to-all copies rank by rank."""
    return dist.all_reduce(output.zero_(), group=group, async_op=True)


@contextmanager
def optimizers(case: Case, fused: bool) -> Iterator[tuple[Muon, torch.optim.Optimizer]]:
    """Muon without Newton-Schulz, and AdamW, on the same parameters."""
    degree = ["--parallelism.expert_parallel_degree", str(case.expert_parallel)]
    meta = build_meta_model(load(ROOT / f"configs/{case.recipe}.toml", degree), case.ranks, "cuda")
    assert meta.plan is not None, f"{case.recipe} has Muon parameters"
    plan = narrow(meta.plan)
    rank = plan.buckets[0].owners[0]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.ranks)
    try:
        params = narrow_parameters(plan, meta.parameters, rank)
        with (
            mock.patch.object(dist, "all_to_all_single", all_to_all),
            mock.patch("titan_muon.planner.planner.plan_by_search", return_value=plan),
            mock.patch("titan_muon.engine.step.views.prepared", return_value=lambda stack, **_: stack),
            mock.patch("titan_muon.kernels.batches.iteration_calls", return_value=()),
            mock.patch("titan_muon.kernels.fused.usable", return_value=True),
            mock.patch("titan_muon.kernels.batches.TableLaunch.run"),
        ):
            yield (
                Muon(list(params.items()), expert=Expert(fused=fused)),
                torch.optim.AdamW(params.values(), foreach=True),
            )
    finally:
        dist.destroy_process_group()


def milliseconds(step: Callable[[], Any]) -> float:
    """CPU time of this process in a step."""
    start = time.process_time()
    step()
    return 1e3 * (time.process_time() - start)


def measured(case: Case, fused: bool, repeats: int, profile: bool) -> Cost:
    """The cost of both optimizers' steps."""
    with optimizers(case, fused) as (muon, adamw):
        for optimizer in (muon, adamw) * 2:
            optimizer.step()
        turns = [(milliseconds(muon.step), milliseconds(adamw.step)) for _ in range(repeats)]
        if profile:
            with cProfile.Profile() as profiler:
                for _ in range(repeats):
                    muon.step()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        program = muon.engine.rank.program
        pieces = sum(len(run.stored) for run in program.buckets)
        ours, theirs = (median(column) for column in zip(*turns, strict=True))
        ratios = [mine / other for mine, other in turns]
        return Cost(len(muon.plan.parameters), pieces, ours, theirs, median(ratios), spread(ratios))


def table(costs: Mapping[str, Cost]) -> str:
    """Markdown."""
    lines: list[Sequence[str]] = [["model", "parameters", "pieces", "Muon ms", "AdamW ms", "ratio", "spread"]]
    lines.append(["---"] + ["---:"] * 6)
    for name, cost in costs.items():
        label = f"{name} @ {CASES[name].ranks:,}"
        times = (f"{cost.muon:.1f}", f"{cost.adamw:.1f}", f"{cost.ratio:.2f}", f"{cost.spread:.0%}")
        lines.append([label, str(cost.parameters), str(cost.pieces), *times])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass(frozen=True)
class Arguments:
    """Measure the host's part of an optimizer step."""

    models: tuple[Literal["qwen3_30b_a3b", "kimi_k2", "dense_560"], ...] = ("qwen3_30b_a3b", "kimi_k2", "dense_560")
    """Models to measure."""
    fused: bool = True
    """Kernels with empty launches."""
    repeats: int = 15
    """Timed steps of each optimizer."""
    profile: bool = False
    """Print where Muon's time goes."""


if __name__ == "__main__":
    arguments = tyro.cli(Arguments)
    torch.set_num_threads(1)
    how = arguments.fused, arguments.repeats, arguments.profile
    print(table({name: measured(CASES[name], *how) for name in arguments.models}))
