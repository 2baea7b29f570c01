"""Shapes of parameters, their matrices cut by hand, and placements on the ranks of a world."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from titan_muon.engine.tensors.dtensor import held_indices, own_rows, set_rows
from titan_muon.options import Split

DEVICE = torch.device(os.environ.get("PARITY_DEVICE", "cpu"))
"""Device of every row; of the environment, because ranks inherit it."""
MATRICES = {"wide": (24, 40), "tall": (40, 24), "uneven": (13, 18), "short": (3, 16)}
STACKS = {"experts": (8, 12, 20), "few": (3, 10, 14)}
Fused = tuple[tuple[int, ...], str, dict[str, Any], Callable[[Tensor], Sequence[Tensor]]]
FUSED: dict[str, Fused] = {
    "heads": ((24, 20), "(h f) d -> h | f d", {"f": 6}, lambda full: full.split(6)),
    "qkv": ((32, 12), "(p h) d -> p | h d", {"p": (2, 1, 1), "h": 8}, lambda full: full.split((16, 8, 8))),
    "fused": (
        (36, 12),
        "(g p h) d -> p | (g h) d",
        {"p": (2, 1, 1), "h": 3},
        lambda full: [part.reshape(-1, 12) for part in full.view(3, 12, 12).split((6, 3, 3), 1)],
    ),
    "groups": (
        (32, 6),
        "(g p h) d -> p | (g h) d",
        {"p": (2, 1, 1), "h": 4},
        lambda full: [part.reshape(-1, 6) for part in full.view(2, 16, 6).split((8, 4, 4), 1)],
    ),
    "c_attn": ((8, 18), "d (g f) -> g | f d", {"g": 3}, lambda full: [part.T for part in full.split(6, 1)]),
    "gate_up": (
        (4, 20, 8),
        "e (p h) d -> e p | h d",
        {"p": (3, 2), "h": 4},
        lambda full: [part for expert in full for part in expert.split((12, 8))],
    ),
    "columns": (
        (4, 6, 10),
        "e d (f g) -> e g | f d",
        {"g": 2},
        lambda full: [expert[:, group::2].T for expert in full for group in range(2)],
    ),
    "w13": ((2, 10, 8), "g f d -> g | f d", {}, list),
    "conv": ((6, 3, 2, 2), "o i h w -> | o (i h w)", {}, lambda full: [full.reshape(6, 12)]),
    "efd": (
        (4, 6, 2, 8),
        "e f g d -> e g | f d",
        {},
        lambda full: [expert[:, group] for expert in full for group in range(2)],
    ),
}
"""Parameters with several matrices: the shape, `dims` and `lengths` of a split, and the matrices cut by hand."""
SPLITS = tuple(Split(match=f"*.{name}", dims=dims, lengths=lengths) for name, (_, dims, lengths, _) in FUSED.items())
ODD = {"one": (1, 1), "row": (1, 12), "column": (12, 1), "prime": (17, 2), "single": (1, 5, 8), "lines": (5, 1, 3)}
ODD_STACKS = {"tiny": (6, 4, 5), "grid": (8, 63, 47)}
"""Stacks whose matrices end inside of a vector of a CPU kernel."""
SHAPES: dict[str, tuple[int, ...]] = {**MATRICES, **STACKS, **ODD, **ODD_STACKS}
SHAPES |= {name: shape for name, (shape, *_) in FUSED.items()}


def shape_of(name: str) -> tuple[int, ...]:
    """The shape of a parameter such as layers.0.wide."""
    return SHAPES[name.rpartition(".")[2]]


def drawn(name: str, seed: int) -> Tensor:
    """The whole value (seed 0) or gradient (seeds from 1) of a parameter."""
    generator = torch.Generator().manual_seed(crc32(f"{name} {seed}".encode()))
    return torch.randn(shape_of(name), generator=generator).to(DEVICE)


def matrices(name: str, whole: Tensor) -> list[Tensor]:
    """Copies of the matrices of a whole parameter, with outputs as rows."""
    short, cut = name.rpartition(".")[2], list if whole.ndim == 3 else lambda full: [full]
    if short in FUSED:
        cut = FUSED[short][-1]
    return [matrix.clone(memory_format=torch.contiguous_format) for matrix in cut(whole)]


def assembled(name: str, parts: Sequence[Tensor]) -> Tensor:
    shape = shape_of(name)
    places = torch.cat([part.flatten() for part in matrices(name, torch.arange(prod(shape)).view(shape))])
    values = torch.cat([part.flatten() for part in parts])
    return torch.empty_like(values).scatter_(0, places.to(values.device), values).view(shape)


@dataclass(frozen=True)
class Layout:
    """Axes of a mesh of all ranks, or the ranks of a mesh of one axis, and the placements. No placements: plain.

    `within`: the axis with the placements, if other axes only separate copies. `ranges`: ranks have any range of rows,
    also an empty one, in the order of Megatron-FSDP, where the last axis cuts first.
    """

    axes: str = ""
    placements: tuple[Placement, ...] = ()
    ranks: tuple[int, ...] = ()
    owned: bool = False
    within: str = ""
    ranges: bool = False

    @property
    def has_replicas(self) -> bool:
        return not self.placements or COPIES in self.placements

    @property
    def mesh(self) -> DeviceMesh:
        mesh = mesh_of(self.axes, self.ranks)
        return mesh[self.within] if self.within else mesh


ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()
TWICE = (_StridedShard(0, split_factor=2), ROWS)
LAYOUTS: dict[str, Layout] = {
    "plain": Layout(),
    "replicated": Layout("replicate", (COPIES,)),
    "fsdp": Layout("shard", (ROWS,)),
    "hsdp": Layout("replicate shard", (COPIES, ROWS)),
    "tp rows": Layout("tp", (ROWS,)),
    "tp columns": Layout("tp", (COLUMNS,)),
    "fsdp x tp rows": Layout("shard tp", TWICE),
    "fsdp x tp columns": Layout("shard tp", (ROWS, COLUMNS)),
    "fsdp x tp copies": Layout("shard tp", (ROWS, COPIES)),
    "hsdp x tp": Layout("replicate shard tp", (COPIES, *TWICE)),
    "ep x rows": Layout("shard ep", (COLUMNS, ROWS)),
    "tp x ep": Layout("tp ep", (Shard(2), ROWS)),
    "hsdp x ep": Layout("replicate shard ep", (COPIES, COLUMNS, ROWS)),
    "fsdp beside tp": Layout("shard tp", (ROWS,), within="shard"),
    "last dim": Layout("tp", (Shard(-1),)),
    "first ranks": Layout(ranks=(0, 1), placements=(ROWS,)),
    "last ranks": Layout(ranks=(2, 3), placements=(ROWS,)),
    "all but one": Layout(ranks=(1, 2, 3), placements=(ROWS,)),
    "every other": Layout(ranks=(0, 2), placements=(COLUMNS,)),
    "one rank": Layout(ranks=(2,), placements=(COPIES,)),
    "ranges": Layout("shard", (ROWS,), ranges=True),
    "ranges, hsdp": Layout("replicate shard", (COPIES, ROWS), ranges=True),
    "ranges, hfsdp": Layout("outer shard", (ROWS, ROWS), ranges=True),
    "ranges x tp rows": Layout("shard tp", (ROWS, ROWS), ranges=True),
    "ranges x tp columns": Layout("shard tp", (ROWS, COLUMNS), ranges=True),
    "ranges beside tp": Layout("shard tp", (ROWS,), within="shard", ranges=True),
    "owned": Layout("shard", owned=True),
    "owned, hsdp": Layout("replicate shard", owned=True),
    "owned x tp": Layout("shard tp", (ROWS,), owned=True, within="shard"),
}


@cache
def mesh_of(axes: str, ranks: tuple[int, ...]) -> DeviceMesh:
    """A mesh, the same for each row of a world. Axes other than the first long one have two ranks."""
    if ranks:
        return DeviceMesh(DEVICE.type, list(ranks))
    names, world = tuple(axes.split()), dist.get_world_size()
    longest = "shard" if "shard" in names else names[0]
    sizes = [world // 2 ** (len(names) - 1) if name == longest else 2 for name in names]
    return init_device_mesh(DEVICE.type, tuple(sizes), mesh_dim_names=names)


def placed(whole: Tensor, layout: Layout) -> Tensor:
    if not layout.placements:
        return whole.clone()
    if layout.ranges:
        return in_ranges(whole, layout)
    dims = [Shard(p.dim % whole.ndim) if type(p) is Shard else p for p in layout.placements]
    return distribute_tensor(whole.clone(), layout.mesh, dims, src_data_rank=None)


def in_ranges(whole: Tensor, layout: Layout) -> DTensor:
    """A whole tensor whose ranks have ranges of rows with random bounds, equal for equal shapes."""
    coordinate = layout.mesh.get_coordinate()
    piece, place, count = whole, 0, 1
    for axis, placement in reversed([*enumerate(layout.placements)]):
        size = layout.mesh.size(axis)
        if placement == ROWS:
            place, count = place * size + coordinate[axis], count * size
        elif isinstance(placement, Shard):
            piece = piece.tensor_split(size, placement.dim)[coordinate[axis]]
    draws = torch.Generator().manual_seed(crc32(str(tuple(whole.shape)).encode()))
    inner = torch.randint(0, len(whole) + 1, (count - 1,), generator=draws).sort().values.tolist()
    bounds = [0, *inner, len(whole)]
    piece = piece[bounds[place] : bounds[place + 1]].clone(memory_format=torch.contiguous_format)
    placed = {"device_mesh": layout.mesh, "placements": layout.placements, "run_check": False}
    made = DTensor.from_local(piece, **placed, shape=whole.shape, stride=whole.stride())
    set_rows(made, bounds[place])
    return made


def like(whole: Tensor, param: Tensor) -> Tensor:
    """A tensor, placed as a parameter is."""
    if isinstance(whole, DTensor) or not isinstance(param, DTensor):
        return whole.detach().clone()
    if own_rows(param) is not None:
        for dim, indices in enumerate(held_indices(param)):
            whole = whole.index_select(dim, indices)
        placed = {"device_mesh": param.device_mesh, "placements": param.placements, "run_check": False}
        return DTensor.from_local(whole.clone(), **placed, shape=param.shape, stride=param.stride())
    return distribute_tensor(whole.clone(), param.device_mesh, param.placements, src_data_rank=None)
