"""Parameters cut into several matrices (heads, fused projections) are orthogonalized matrix by matrix on any layout."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.dist.harness import run_ranks
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn
from titan_muon import Muon
from titan_muon.options import Split

SHAPES = {
    "heads": (24, 20),
    "qkv": (32, 12),
    "fused": (36, 12),
    "gate_up": (4, 20, 8),
    "conv": (6, 3, 2, 2),
    "w13": (2, 10, 8),
    "efd": (4, 6, 2, 8),
    "columns": (4, 6, 10),
    "c_attn": (8, 18),
    "groups": (32, 6),
}
SPLITS = (
    Split(match="*heads", dims="(h f) d -> h | f d", lengths={"f": 6}),
    Split(match="*qkv", dims="(p h) d -> p | h d", lengths={"p": (2, 1, 1), "h": 8}),
    Split(match="*fused", dims="(g p h) d -> p | (g h) d", lengths={"p": (2, 1, 1), "h": 3}),
    Split(match="*gate_up", dims="e (p h) d -> e p | h d", lengths={"p": (3, 2), "h": 4}),
    Split(match="*conv", dims="o i h w -> | o (i h w)"),
    Split(match="*w13", dims="g f d -> g | f d"),
    Split(match="*efd", dims="e f g d -> e g | f d"),
    Split(match="*columns", dims="e d (f g) -> e g | f d", lengths={"g": 2}),
    Split(match="*c_attn", dims="d (g f) -> g | f d", lengths={"g": 3}),
    Split(match="*groups", dims="(g p h) d -> p | (g h) d", lengths={"p": (2, 1, 1), "h": 4}),
)
LAYOUTS = {
    "fsdp": ((4,), (Shard(0),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "fsdp_tp": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "columns": ((4,), (Shard(1),)),
    "rows_and_columns": ((2, 2), (Shard(0), Shard(1))),
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
    return {name: full.reshape(6, 12)} if name == "conv" else in_dims(name, full)


def in_dims(name: str, full: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices of a split's `dims`, cut by hand."""
    if name == "w13":
        return {f"{name}.{half}": full[i] for i, half in enumerate(("gate", "up"))}
    if name == "efd":
        return {f"{name}.{e}.{g}": full[e, :, g] for e in range(4) for g in range(2)}
    if name == "columns":
        return {f"{name}.{e}.{g}": full[e, :, g::2] for e in range(4) for g in range(2)}
    if name == "c_attn":
        return {f"{name}.{i}": full[:, 6 * i : 6 * i + 6] for i in range(3)}
    heads = full.view(2, 4, 4, 6)
    parts = {"q": heads[:, :2], "k": heads[:, 2], "v": heads[:, 3]}
    return {f"{name}.{part}": rows.reshape(-1, 6) for part, rows in parts.items()}


full_tensors = partial(drawn, SHAPES)


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
        if step == 1:
            # The buffers of a step are empty now, and views of the parts are made again.
            optimizer.load_state_dict(optimizer.state_dict())
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


def last_dim(rank: int, world_size: int) -> list[str]:
    """Like `check_splits`, for parameters with three or more dims, sharded along the last dims."""
    names = ("w13", "efd", "columns")
    mesh = init_device_mesh("cpu", (world_size,))
    initial = full_tensors(0)
    keys = [(name, dim) for name in names for dim in range(2, len(SHAPES[name]))]

    def place(name: str, dim: int, full: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(full.clone(), mesh, [Shard(dim)], src_data_rank=None)

    params = {key: nn.Parameter(place(*key, initial[key[0]])) for key in keys}
    named = [(f"{dim}.{name}", params[name, dim]) for name, dim in keys]
    splits = [split for split in SPLITS if split.match[1:] in names]
    optimizer = Muon(named, lr=0.02, split=splits, orthogonalize="reference")
    grads = full_tensors(1)
    for (name, dim), param in params.items():
        param.grad = place(name, dim, grads[name])
    optimizer.step()
    different = []
    for (name, dim), param in params.items():
        reference = ReferenceMuon({key: m.clone() for key, m in blocks(name, initial[name]).items()})
        reference.step({key: m.clone() for key, m in blocks(name, grads[name]).items()})
        trained = blocks(name, param.full_tensor().detach())
        different += [f"{dim}.{key}" for key in trained if not torch.equal(trained[key], reference.params[key])]
    return different


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "all_gather_reduce_scatter"])
def test_split_parameters_equal_separately_trained_matrices(exchange: str) -> None:
    assert run_ranks(check_splits, 4, exchange) == [[]] * 4


def test_splits_along_every_dim_on_two_ranks() -> None:
    assert run_ranks(last_dim, 2) == [[]] * 2
