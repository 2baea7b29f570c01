"""Muon's plan for Qwen3.5-397B-A17B on 128 GPUs by expert-parallel degree, beside xtuner's published steps.

    python scripts/plan_experts.py     # 4 minutes; prints the table of docs/results/experts.md

The shapes are TorchTitan's. Two layouts of the matrices outside of the experts: sharded over all ranks, as TorchTitan
does under expert parallelism, and sharded over the ranks of a replica alone, as xtuner does
(`_replicate_other_params` in its `moe.py`), where each expert-parallel rank repeats the work of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]


from docs.make_zoo import titan_model
from titan_muon.assignment.roles import inspect_model
from titan_muon.assignment.rules import assign_parameters
from titan_muon.engine import plan_step
from titan_muon.options import Machine, MuonOptions
from titan_muon.plan.cost.timeline import timeline
from titan_muon.plan.summary import summarize
from titan_muon.plan.terms.machine import machine_of
from titan_muon.selection import select
from titan_muon.tensors.process_groups import fake_world

Replicas = Literal["redundant", "split"]
FAMILY, FLAVOR, RANKS, MACHINE = "qwen3_5", "397B-A17B", 128, Machine(name="h100x8")
THEIRS = {1: "491", 8: "1,019"}
"""Milliseconds of a step by expert-parallel degree: InternLM/xtuner#1716."""
CASES: tuple[tuple[int, Replicas | None], ...] = ((1, None), (8, None), (8, "redundant"), (8, "split"), (64, None))
"""Expert-parallel degree, and the work of its ranks on the other matrices if these are replicated."""
COLUMNS = (
    "EP",
    "other matrices",
    "theirs, ms",
    "modelled step, ms",
    "Newton-Schulz",
    "passes",
    "waits",
    "link",
    "sent MiB",
)
TEXTS: dict[Replicas, str] = {"redundant": "repeated by", "split": "shared by"}
STACK = 3


def placed(names: dict[str, tuple[int, ...]], degree: int, *, replicated: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, parameter without storage) on the meshes of a degree."""
    mesh = init_device_mesh("cpu", (RANKS // degree, degree), mesh_dim_names=("efsdp", "ep"))
    flat = init_device_mesh("cpu", (RANKS,))
    experts: list[Placement] = [_StridedShard(0, split_factor=degree), Shard(0)]
    for name, shape in names.items():
        others = (mesh, [Shard(0), Replicate()]) if replicated else (flat, [Shard(0)])
        layout = (mesh, experts) if len(shape) == STACK else others
        whole = torch.empty(shape, device="meta", dtype=torch.float32)
        yield name, DTensor.from_local(whole[:0], *layout, run_check=False, shape=whole.shape, stride=whole.stride())


def row(names: dict[str, tuple[int, ...]], degree: int, replicas: Replicas | None) -> str:
    """A line of the table."""
    options = MuonOptions(machine=MACHINE, replicas="split" if replicas is None else replicas)
    with fake_world(RANKS):
        named = list(placed(names, degree, replicated=replicas is not None))
        groups, tensors = [vars(options)] * len(named), [tensor for _, tensor in named]
        plan = plan_step(named, groups, select(options, groups, tensors, torch.device("cuda")))
    played = timeline(plan, machine_of(MACHINE))
    last = played.last
    cells = (
        degree,
        f"on {RANKS} ranks" if replicas is None else f"on {RANKS // degree} ranks, {TEXTS[replicas]} {degree} replicas",
        THEIRS.get(degree, "") if replicas == "redundant" or degree == 1 else "",
        *(f"{1e3 * s:,.1f}" for s in (last.seconds, last.orthogonalize, last.passes, last.waits, played.link)),
        f"{summarize(plan).bytes_sent_max / 2**20:,.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the table, line by line."""
    model = titan_model(FAMILY, FLAVOR)
    assigned = assign_parameters(inspect_model([model]), [])
    names = {a.fqn: a.shape for a in assigned if a.optimizer == "muon"}
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for degree, replicas in CASES:
        print(row(names, degree, replicas), flush=True)


if __name__ == "__main__":
    main()
