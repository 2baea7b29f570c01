"""The modes of tensor parallelism on gloo: bits and traffic."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.reference_muon import ReferenceMuon, newton_schulz
from tests.shared import drawn, muon_keywords
from titan_muon import Muon
from titan_muon.plan.summary import summarize

STEPS = 2
FLOAT32: dict[str, Any] = {"ns_dtype": "float32", "wire_dtype": "float32"}


@dataclass(frozen=True)
class Case:
    """A mesh, and the placement of a matrix; the last axis is tensor parallelism."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def cut(self) -> tuple[int, int]:
        """The sharded dim of tensor parallelism, and the number of parts."""
        last = self.placements[-1]
        assert isinstance(last, Shard)
        return last.dim, self.mesh[-1]


CASES = {
    "rows": Case((4,), (Shard(0),)),
    "columns": Case((4,), (Shard(1),)),
    "fsdp_rows": Case((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "fsdp_columns": Case((2, 2), (Shard(0), Shard(1))),
    "replicated_rows": Case((2, 2), (Replicate(), Shard(0))),
}
SHAPES = {"wide": (24, 40), "tall": (40, 24)}


@dataclass(frozen=True)
class Trained:
    """Parameters after two steps of all cases, and bytes sent in the last step."""

    params: dict[str, Any]
    sent: int
    planned: int


def train(rank: int, world_size: int, **options: Any) -> Trained:
    shapes = {f"{case}.{name}": shape for case in CASES for name, shape in SHAPES.items()}
    meshes = {}
    for name, case in CASES.items():
        names = ("fsdp", "tp")[-len(case.mesh) :]
        meshes[name] = init_device_mesh("cpu", case.mesh, mesh_dim_names=names), case.placements

    def placed(key: str, full: Tensor) -> DTensor:
        return distribute_tensor(full.clone(), *meshes[key.partition(".")[0]], src_data_rank=None)

    params = {key: nn.Parameter(placed(key, full)) for key, full in drawn(shapes, 0).items()}
    optimizer = Muon(list(params.items()), **muon_keywords(lr=0.02, **options)).build()
    for step in range(STEPS):
        for key, full in drawn(shapes, step + 1).items():
            params[key].grad = placed(key, full)
        with CollectiveCounter() as counter:
            optimizer.step()
    sent = sum(call.sent for call in counter.calls if call.name != "allreduce")
    return Trained(dict(params), sent, summarize(optimizer.plan).ranks[rank].bytes_sent)


def not_blocks(trained: Trained) -> list[str]:
    """Parameters with a difference from the reference of the blocks."""
    different = []
    for key, param in trained.params.items():
        dim, count = CASES[key.partition(".")[0]].cut
        full = [drawn({k: SHAPES[k.partition(".")[2]] for k in trained.params}, seed)[key] for seed in range(STEPS + 1)]
        initial, *grads = [{str(place): block for place, block in enumerate(t.chunk(count, dim))} for t in full]
        reference = ReferenceMuon({place: block.clone() for place, block in initial.items()})
        for grad in grads:
            reference.step(grad)
        if not torch.equal(param.full_tensor(), torch.cat(list(reference.params.values()), dim)):
            different.append(key)
    return different


def compare(rank: int, world_size: int) -> tuple[list[str], list[str], list[tuple[int, int]]]:
    """Parameters unlike Muon on the blocks, warnings, and bytes sent and planned in all modes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        blocks = train(rank, world_size, tp_mode="blockwise", orthogonalize="reference")
    modes = [blocks, *(train(rank, world_size, tp_mode=mode, **FLOAT32) for mode in ("owner", "distributed"))]
    texts = [str(warning.message) for warning in caught if "blockwise" in str(warning.message)]
    return not_blocks(blocks), texts, [(mode.sent, mode.planned) for mode in modes]


def test_blockwise_equals_muon_on_the_blocks_and_all_modes_send_the_planned_bytes() -> None:
    for different, texts, traffic in run_ranks(compare, 4, timeout=2 * SECONDS):
        assert different == []
        assert len(texts) == 1
        count = len(SHAPES) * len(CASES)
        assert f"'blockwise' is inexact: of {count} matrices that tensor parallelism cuts" in texts[0]
        assert all(sent == planned for sent, planned in traffic)


# The published tolerances of Emerging-Optimizers for Newton-Schulz under tensor parallelism. None: the tolerances of
# `torch.testing.assert_close` in float32.
ONE_STEP = [(shape, dim, 1, 1e-6) for shape in ((20, 16), (16, 32)) for dim in (0, 1)]
PUBLISHED: list[tuple[tuple[int, int], int, int, float | None]] = [
    *ONE_STEP,
    ((32, 3), 0, 5, None),
    ((5, 100), 1, 5, None),
    ((21, 16), 1, 1, None),
]


def orthogonalized(shape: tuple[int, int], dim: int, steps: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor] | str:
    """An integer matrix orthogonalized in slices and whole by the reference, or the reason of a refusal."""
    full = torch.randint(-5, 5, shape, generator=torch.Generator().manual_seed(0)).float()
    param = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)], src_data_rank=None))
    param.grad = distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None)
    plain: dict[str, Any] = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "original"}
    try:
        optimizer = Muon(
            [("w", param)], **muon_keywords(lr=1.0, ns_steps=steps, tp_mode="distributed", **plain, **FLOAT32)
        ).build()
    except ValueError as error:
        return str(error)
    optimizer.step()
    scale = max(1, shape[0] / shape[1]) ** 0.5
    result: Any = param.detach()
    return -result.full_tensor() / scale, newton_schulz(full, steps, dtype=torch.float32)


def keep_tolerances(rank: int, world_size: int) -> dict[tuple[tuple[int, int], int], str]:
    """The refusals by shape and dim. Raises AssertionError for errors above the tolerance."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    refused = {}
    for shape, dim, steps, most in PUBLISHED:
        if most is not None and shape[dim] % world_size:
            continue
        results = orthogonalized(shape, dim, steps, mesh)
        if isinstance(results, str):
            refused[shape, dim] = results
        elif most is None:
            torch.testing.assert_close(*results)
        else:
            torch.testing.assert_close(*results, rtol=0, atol=most)
    return refused


@pytest.mark.parametrize("world_size", [4, 8])
def test_published_tolerances_of_tensor_parallel_newton_schulz_are_met(world_size: int) -> None:
    """`distributed` refuses matrices without equal slices."""
    [refused] = {frozenset(texts.items()) for texts in run_ranks(keep_tolerances, world_size, timeout=SECONDS)}
    tried = [(shape, dim) for shape, dim, _, most in PUBLISHED if most is None or shape[dim] % world_size == 0]
    uneven = {(shape, dim) for shape, dim in tried if any(side % world_size for side in shape)}
    assert {key for key, _ in refused} == uneven
    assert all("cannot be cut into" in text for _, text in refused)
