"""Parameters cut into several matrices (heads, fused projections) are orthogonalized matrix by matrix on any layout."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.dist.harness import run_ranks
from tests.reference_muon import ReferenceMuon
from titan_muon import Muon
from titan_muon.options import Split

SHAPES = {"heads": (24, 20), "qkv": (32, 12), "fused": (36, 12), "gate_up": (4, 20, 8), "conv": (6, 3, 2, 2)}
SPLITS = (
    Split(match="*heads", rows=(6,)),
    Split(match="*qkv", rows=(16, 8, 8)),
    Split(match="*fused", rows=(6, 3, 3), joined=True),
    Split(match="*gate_up", rows=(12, 8)),
    Split(match="*conv", row_dims=1),
)
LAYOUTS = {
    "fsdp": ((4,), (Shard(0),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "fsdp_tp": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "columns": ((4,), (Shard(1),)),
}


def blocks(name: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices of a full parameter, cut by hand."""
    if name == "heads":
        return {f"{name}.{i}": full[6 * i : 6 * i + 6] for i in range(4)}
    if name == "qkv":
        return {f"{name}.q": full[:16], f"{name}.k": full[16:24], f"{name}.v": full[24:]}
    if name == "fused":
        groups = full.view(3, 12, 12)
        parts = {"q": groups[:, :6], "k": groups[:, 6:9], "v": groups[:, 9:]}
        return {f"{name}.{part}": rows.reshape(-1, 12) for part, rows in parts.items()}
    if name == "gate_up":
        halves = {"gate": slice(0, 12), "up": slice(12, 20)}
        return {f"{name}.{e}.{half}": full[e, rows] for e in range(4) for half, rows in halves.items()}
    return {name: full.reshape(6, 12)}


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def check_splits(rank: int, world_size: int, exchange: str) -> list[str]:
    def place(name: str, layout: str, full: torch.Tensor) -> torch.Tensor:
        mesh, placements = meshes[layout], LAYOUTS[layout][1]
        return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)

    meshes = {layout: init_device_mesh("cpu", shape) for layout, (shape, _) in LAYOUTS.items()}
    keys = [(layout, name) for layout in LAYOUTS for name in SHAPES]
    initial = full_tensors(0)
    params = {key: nn.Parameter(place(key[1], key[0], initial[key[1]])) for key in keys}
    optimizer = Muon(
        [(".".join(key), p) for key, p in params.items()],
        lr=0.02,
        exchange=exchange,
        split=SPLITS,
        orthogonalize="reference",
    )
    reference = {
        name: ReferenceMuon({key: m.clone() for key, m in blocks(name, full).items()}) for name, full in initial.items()
    }
    for step in range(2):
        grads = full_tensors(step + 1)
        for (layout, name), param in params.items():
            param.grad = place(name, layout, grads[name])
        optimizer.step()
        for name, expected in reference.items():
            expected.step({key: m.clone() for key, m in blocks(name, grads[name]).items()})
    different = []
    for (layout, name), param in params.items():
        trained = blocks(name, param.full_tensor().detach())
        expected = reference[name].params
        different += [f"{layout}.{key}" for key in trained if not torch.equal(trained[key], expected[key])]
    return different


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "all_gather_reduce_scatter", "auto"])
def test_split_parameters_equal_their_matrices_trained_apart(exchange: str) -> None:
    assert run_ranks(check_splits, 4, exchange) == [[]] * 4
