"""Muon on every exchange and placement equals the CPU's reference: on GPUs, on the CPU over gloo, on fake GPUs.

    torchrun --nproc_per_node=8 -m tests.gpu.parity --device cuda --json parity.json

Layouts are FSDP, HSDP, TP, EP and PP, as far as the number of ranks allows. On a GPU no step may have the host
wait for the device, open a communicator, or allocate more than the plan says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.gpu.ranks import begin, communicators, gathered, no_sync
from benchmarks.memory_use import allocated
from benchmarks.owned_model import Net, Setup, data_mesh, loss_of, make, place, whole
from tests.parity.layouts import MATRICES
from tests.parity.layouts import STACKS as EXPERTS
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn, muon_keywords
from titan_muon import Muon
from titan_muon.plan import summarize

STEPS = 3
EXCHANGES = ("all_to_all", "all_gather", "all_gather_reduce_scatter")
PASSES_TOLERANCE = 0.02
"""For float32 gradients of backward: ranks sum in another order than one process."""
# Large enough to keep the memory of GPU libraries below the slack.
MEMORY_SHAPES = {"cpu": (64, 128), "cuda": (4096, 4096)}
MEMORY_MATRICES = 32
MEMORY_SLACK = 1.1


@dataclass(frozen=True)
class Case:
    """A mesh of all or some ranks, and the placement of matrices or expert stacks."""

    name: str
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Arithmetic:
    """Options of Muon, dtype of the reference, and error limits by device.

    Errors are relative errors of the update in the Frobenius norm. Devices round products differently; a misplaced
    piece is an error of 1.
    """

    name: str
    options: Mapping[str, str]
    dtype: torch.dtype
    tolerances: Mapping[str, float]


REFERENCE = Arithmetic("bfloat16", {"orthogonalize": "reference"}, torch.bfloat16, {"cpu": 0.0, "cuda": 0.1})
FLOAT32 = Arithmetic(
    "float32",
    {"orthogonalize": "standard", "ns_dtype": "float32", "wire_dtype": "float32"},
    torch.float32,
    {"cpu": 1e-4, "cuda": 5e-3},
)


@dataclass(frozen=True)
class Check:
    """Result of a check on a rank: the largest error, problems, and measurements."""

    name: str
    error: float
    faults: tuple[str, ...] = ()
    measured: Mapping[str, float] | None = None


def cases(world: int) -> list[Case]:
    """Every layout for this number of ranks."""
    layouts = [
        Case("FSDP", (world,), (Shard(0),), MATRICES),
        Case("TP columns", (world,), (Shard(1),), MATRICES),
        Case("DDP", (world,), (Replicate(),), MATRICES),
        Case("EP", (world,), (Shard(0),), EXPERTS),
    ]
    if world % 2:
        return layouts
    grid = (world // 2, 2)
    cut_twice = (_StridedShard(0, split_factor=2), Shard(0))
    layouts += [
        Case("HSDP", (2, world // 2), (Replicate(), Shard(0)), MATRICES),
        Case("FSDP x TP rows", grid, cut_twice, MATRICES),
        Case("FSDP x TP columns", grid, (Shard(0), Shard(1)), MATRICES),
        Case("FSDP x TP replicated", grid, (Shard(0), Replicate()), MATRICES),
        Case("EFSDP x EP", grid, cut_twice, EXPERTS),
        Case("EFSDP rows x EP", grid, (Shard(1), Shard(0)), EXPERTS),
        Case("HSDP x EP", grid, (Replicate(), Shard(0)), EXPERTS),
    ]
    if world % 4 == 0:
        cube = (2, world // 4, 2)
        layouts += [
            Case("HSDP x TP", cube, (Replicate(), *cut_twice), MATRICES),
            Case("HSDP x EFSDP x EP", cube, (Replicate(), Shard(1), Shard(0)), EXPERTS),
        ]
    return layouts


class Trained:
    """Parameters of several cases in one optimizer on this rank, and the reference on the CPU."""

    def __init__(
        self,
        layouts: Sequence[Case],
        meshes: Mapping[tuple[int, ...], DeviceMesh],
        arithmetic: Arithmetic = REFERENCE,
        **options: str,
    ) -> None:
        self.arithmetic = arithmetic
        self.places = {f"{c.name}: {name}": (meshes[c.mesh], c.placements) for c in layouts for name in c.shapes}
        self.shapes = {f"{case.name}: {name}": shape for case in layouts for name, shape in case.shapes.items()}
        self.initial = drawn(self.shapes, 0)
        self.params = {name: nn.Parameter(self.placed(name, full)) for name, full in self.initial.items()}
        whole = {name: full.clone() for name, full in self.initial.items()}
        self.reference = ReferenceMuon(whole, dtype=arithmetic.dtype)
        named = list(self.params.items())
        self.optimizer = Muon(named, **muon_keywords(lr=0.02, **arithmetic.options, **options)).build()  # type: ignore[arg-type]

    def placed(self, name: str, full: Tensor) -> Tensor:
        mesh, placements = self.places[name]
        return distribute_tensor(full.to(mesh.device_type, copy=True), mesh, placements, src_data_rank=None)

    def set_gradients(self, seed: int) -> dict[str, Tensor]:
        gradients = drawn(self.shapes, seed)
        for name, param in self.params.items():
            param.grad = self.placed(name, gradients[name])
        return gradients

    def errors(self) -> dict[str, float]:
        """Relative error of this rank's part of each parameter's update and momentum."""
        errors = {}
        for name, param in self.params.items():
            expected = self.placed(name, self.reference.params[name]).to_local().cpu()
            momentum = self.placed(name, self.reference.average[name]).to_local().cpu()
            average = self.optimizer.state[param]["momentum_buffer"].to_local().cpu()
            change = (expected - self.placed(name, self.initial[name]).to_local().cpu()).norm()
            errors[name] = ratio((param.detach().to_local().cpu() - expected).norm(), change)
            errors[f"{name}: momentum"] = ratio((average - momentum).norm(), momentum.norm())
        return errors


def ratio(error: Tensor, size: Tensor) -> float:
    """Ratio of two tensors' norms; 0 for an empty part."""
    return float(error / size) if float(size) > 0 else float(error)


def checked_step(optimizer: Muon, device: torch.device) -> list[str]:
    """A step and the side effects: opened communicators. A device sync raises."""
    before = communicators()
    with no_sync(device):
        optimizer.step()
    opened = communicators() - before
    return [f"the step opened {opened} communicators"] if opened else []


def check_exchange(exchange: str, arithmetic: Arithmetic, device: torch.device, *, has_values: bool = True) -> Check:
    """All cases in one optimizer under an exchange, for some steps."""
    layouts = cases(dist.get_world_size())
    meshes = {
        shape: device_mesh.init_device_mesh(device.type, shape) for shape in dict.fromkeys(c.mesh for c in layouts)
    }
    trained = Trained(layouts, meshes, arithmetic, exchange=exchange)
    return steps(f"exchange {exchange}, {arithmetic.name}", trained, device, has_values=has_values)


def check_pipeline(device: torch.device) -> Check:
    """Two stages: each half of the ranks has separate parameters, and both build a Muon at the same time."""
    half = dist.get_world_size() // 2
    stages = [DeviceMesh(device.type, list(ranks)) for ranks in (range(half), range(half, 2 * half))]
    stage = int(dist.get_rank() >= half)
    case = Case(f"PP stage {stage}", (half,), (Shard(0),), MATRICES)
    return steps("PP", Trained([case], {(half,): stages[stage]}), device)


def steps(name: str, trained: Trained, device: torch.device, *, has_values: bool = True) -> Check:
    """Train some steps, and compare each with the reference if there are values."""
    faults, worst = [], 0.0
    for step in range(STEPS):
        gradients = trained.set_gradients(step + 1)
        faults += checked_step(trained.optimizer, device)
        if has_values:
            trained.reference.step(gradients)
            errors = trained.errors()
            worst = max(worst, *errors.values())
            limit = trained.arithmetic.tolerances[device.type]
            faults += [f"step {step}: {key}: off by {error:.3g}" for key, error in errors.items() if error > limit]
    trained.optimizer.close()
    return Check(name, worst, tuple(faults))


def check_owned(device: torch.device, placement: str, replicas: int) -> Check:
    """Forward, backward and step of a small transformer with owned matrices, against one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    setup = Setup(placement, replicas=replicas)
    alone, model = make(), make().to(device)
    place(model, setup, data_mesh(world, setup, model, device.type))
    names = [name for name, p in alone.named_parameters() if "layers" in name and p.ndim == 2]
    initial = {name: p.detach().clone() for name, p in alone.named_parameters()}
    matrices = {name: p.detach() for name, p in alone.named_parameters() if name in names}
    reference = ReferenceMuon(matrices, dtype=FLOAT32.dtype)
    trained = [(name, p) for name, p in model.named_parameters() if name in names]
    optimizer = Muon(trained, **muon_keywords(lr=0.02, **FLOAT32.options)).build()  # type: ignore[arg-type]
    faults: list[str] = []
    for step in range(STEPS):
        passes(model, rank, world, step)
        faults += checked_step(optimizer, device)
        passes(alone, 0, 1, step)
        reference.step({name: p.grad for name, p in alone.named_parameters() if name in names and p.grad is not None})
    weights, expected = whole(model), dict(alone.named_parameters())
    errors = {n: ratio((weights[n].cpu() - expected[n]).norm(), (expected[n] - initial[n]).norm()) for n in names}
    faults += [f"{name}: off by {error:.3g}" for name, error in errors.items() if error > PASSES_TOLERANCE]
    optimizer.close()
    return Check(
        f"placement {placement}{f', {replicas} replicas' if replicas > 1 else ''}", max(errors.values()), tuple(faults)
    )


def passes(model: Net, share: int, shares: int, step: int) -> None:
    """Forward and backward, with gradients from nothing."""
    model.zero_grad(set_to_none=True)
    loss_of(model, share, shares, step).backward()


def check_memory(device: torch.device) -> Check:
    """Memory of build and step beyond the parameters' state, against the plan."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shape = MEMORY_SHAPES[device.type]
    case = Case("memory", (world,), (Shard(0),), {f"layers.{i}": shape for i in range(MEMORY_MATRICES)})
    mesh = device_mesh.init_device_mesh(device.type, (world,))
    params = {}
    for name, full in case.shapes.items():
        params[name] = nn.Parameter(_rows(full, mesh))
        params[name].grad = _rows(full, mesh)
    optimizer, _, kept = allocated(lambda: Muon(list(params.items()), lr=0.02).build(), device)
    # The first step also allocates the libraries' own memory.
    optimizer.step()
    _, new, _ = allocated(optimizer.step, device)
    momentum = sum(optimizer.state[p]["momentum_buffer"].to_local().nbytes for p in params.values())
    cost = summarize(optimizer.plan).ranks[rank]
    planned, measured = cost.buffer_bytes + cost.work_bytes, kept - momentum + new
    over = [f"took {measured:,} bytes, and the plan says {planned:,}"] if measured > MEMORY_SLACK * planned else []
    optimizer.close()
    return Check("memory", 0.0, tuple(over), {"planned": planned, "taken": measured})


def _rows(shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    return distribute_tensor(torch.randn(shape, device=mesh.device_type), mesh, [Shard(0)], src_data_rank=None)


def checks(device: torch.device) -> Iterator[Check]:
    """Every check on these ranks. A check that raises on a rank ends the job."""
    world = dist.get_world_size()
    for exchange in EXCHANGES:
        yield check_exchange(exchange, FLOAT32, device)
    yield check_exchange("all_to_all", REFERENCE, device)
    if world > 1:
        if world % 2 == 0:
            yield check_pipeline(device)
        for placement in ("sharded", "owned"):
            yield check_owned(device, placement, 1)
        if world % 2 == 0 and world > 2:
            yield check_owned(device, "owned", 2)
    yield check_memory(device)


def main(words: Sequence[str]) -> int:
    """Run the checks on this rank. Returns the exit code, equal on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args(words)
    device = begin(arguments.device)
    world = dist.get_world_size()
    layouts, rows, faults = [case.name for case in cases(world)], [], []
    for check in checks(device):
        mine: list[Check] = gathered(check)
        faults += [f"rank {rank}: {found.name}: {fault}" for rank, found in enumerate(mine) for fault in found.faults]
        rows.append({**asdict(check), "error": max(found.error for found in mine)})
        if dist.get_rank() == 0:
            # After each, because a later check can end the process.
            document = {"ranks": world, "layouts": layouts, "checks": rows, "faults": faults}
            arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(f"{check.name}: largest error {rows[-1]['error']:.2g} {check.measured or ''}", flush=True)
    if dist.get_rank() == 0:
        print("\n".join(faults) if faults else f"{len(rows)} checks passed on {world} ranks")
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
