"""Kernel launches and list entries of a step on fake CUDA tensors, for the rows of docs/results/plan.md.

    python benchmarks/count_launches.py --files docs/results/plan_dense.json --json launches.json

The slowest rank of each row's modelled step steps, at full size without memory. The rules for lists are those of
`benchmarks/rehearsal/launches.py`. Needs no CUDA build and no GPU. Overlapped rounds count as part of the step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import models as families  # noqa: F401 (registers them)
from titan_muon.trainer.torchtitan import compat

compat.install()

from benchmarks.rehearsal.fake_gpu import fake_gpu, fake_rank
from benchmarks.rehearsal.launches import Launches
from titan_muon import Muon
from titan_muon.engine.layout.intervals import Geometries
from titan_muon.engine.layout.types import Plan
from titan_muon.planner.machine import planning_machine
from titan_muon.planner.timeline import timeline
from titan_muon.trainer.dry_run.meta_model import MetaModel, build_meta_model
from titan_muon.trainer.recipe import load


@dataclass(frozen=True)
class Row:
    """A model planned on a world, as `benchmarks/plan_scale.py` names it."""

    model: str
    ranks: int
    expert_parallel: int
    overlap: str = "none"
    replicas: int = 1


@dataclass(frozen=True)
class Counts:
    """Of a step on `rank`: launches, operators, collectives, and tensors in lists of operators."""

    rank: int
    launches: int
    operators: int
    collectives: int
    entries: int


class ListCounter(Launches):
    """Counts launches in `counts`, and operators and tensors in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.entries = 0

    def weight(self, name: str, args: Any) -> int:
        self.operators += 1
        self.entries += sum(len(arg) for arg in args if isinstance(arg, (list, tuple)) and arg and _is_tensor(arg[0]))
        return super().weight(name, args)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def planned(row: Row) -> tuple[MetaModel, int]:
    """The plan of a row for GPUs, on the meta device, and the slowest rank of its modelled step."""
    flags = ["--parallelism.expert_parallel_degree", str(row.expert_parallel), "--machine.name", "h100x8"]
    flags += ["--muon.overlap", row.overlap, "--qk_clip.mode", "off"]
    flags += ["--parallelism.data_parallel_replicate_degree", str(row.replicas)]
    recipe = load(ROOT / f"configs/{row.model}_muon.toml", flags)
    meta = build_meta_model(recipe, row.ranks, "cuda")
    assert meta.plan is not None, f"{row.model} has Muon parameters"
    return meta, timeline(meta.plan, planning_machine(recipe.machine, "cuda"), overlap=recipe.muon.overlap).last.rank


def parameters_on(plan: Plan, sharded: Mapping[str, Tensor], rank: int) -> Iterator[tuple[str, nn.Parameter]]:
    """A rank's parameters on the fake GPU with gradients, placed like `sharded`."""
    meshes, geometries = dict[DeviceMesh, DeviceMesh](), Geometries(plan.parameters)
    for index, parameter in enumerate(plan.parameters):
        like = sharded[parameter.fqn]
        assert isinstance(like, DTensor), f"{parameter.fqn} is sharded"
        if like.device_mesh not in meshes:
            meshes[like.device_mesh] = DeviceMesh("cuda", like.device_mesh.mesh.cpu())
        placed = (meshes[like.device_mesh], like.placements)
        whole = torch.empty(parameter.layout.shape, device="meta")
        value, grad = (
            DTensor.from_local(
                torch.empty(geometries[index].local_shape(rank), device="cuda"),
                *placed,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            for _ in range(2)
        )
        made = nn.Parameter(value)
        made.grad = grad
        yield parameter.fqn, made


@contextmanager
def given(plan: Plan) -> Iterator[None]:
    """Muon uses this plan instead of its own search."""
    with mock.patch("titan_muon.planner.planner.plan_by_search", return_value=plan):
        yield


def counted(row: Row) -> Counts:
    """The counts of the second step, because the first makes tensors."""
    meta, rank = planned(row)
    plan = meta.plan
    assert plan is not None, "planned() returns one"
    node = {"LOCAL_RANK": str(rank % 8), "LOCAL_WORLD_SIZE": str(min(8, row.ranks))}
    is_built = mock.patch("torch.backends.cuda.is_built", return_value=True)
    with is_built, fake_gpu(), fake_rank(row.ranks, rank), mock.patch.dict(os.environ, node):
        params = list(parameters_on(plan, meta.parameters, rank))
        with given(plan):
            muon = Muon(params)
            muon.step()
        calls = muon.engine.rank.exchange.traffic.calls
        with ListCounter() as counter:
            muon.step()
        calls = muon.engine.rank.exchange.traffic.calls - calls
        return Counts(rank, counter.counts.total(), counter.operators, calls, counter.entries)


def rows_of(file: Path) -> list[Row]:
    """The rows of a file of `benchmarks/plan_scale.py`."""
    names = [field.name for field in fields(Row)]
    return [Row(**{name: row[name] for name in names}) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def main(
    files: Sequence[Path] = (),
    only: str = "",
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Count, row by row. `only`: a model's name. `json_file`: a line for each row; rows that it has are kept."""
    lines = [] if json_file is None or not json_file.exists() else json_file.read_text(encoding="utf-8").splitlines()
    known = [json.loads(line)["row"] for line in lines]
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    for row in (row for file in files for row in rows_of(file) if only in row.model):
        if asdict(row) in known:
            continue
        line = json.dumps({"row": asdict(row), **asdict(counted(row)), "commit": commit})
        print(line, flush=True)
        if json_file is not None:
            with json_file.open("a", encoding="utf-8") as report:
                report.write(line + "\n")


if __name__ == "__main__":
    tyro.cli(main)
