"""Blocks of tensor parallelism as matrices: ranks at one place of the axis store a block."""

from collections import Counter
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.unit.plans import MODES, elements_of, examples, parameter_lists, plan_of
from titan_muon.options import OptionError
from titan_muon.plan.search.tensor_parallel import in_blocks, tensor_parallel_parts
from titan_muon.plan.terms.layout import Geometries
from titan_muon.plan.terms.types import Interval, Layout, MatrixRows, MatrixStack, Mesh, Parameter, Placement, Shard
from titan_muon.tensors.dtensor import layout_on

SQUARE = Mesh((2, 2), (0, 1, 2, 3))


def matrix(shape: tuple[int, ...], *placements: Placement, heights: tuple[int, ...] = ()) -> Parameter:
    """A parameter on (fsdp, tp) as a matrix, or as matrices of the passed heights."""
    layout = Layout(shape, SQUARE, placements, tensor_parallel=1)
    rows, matrices = prod(shape[:-1]), list[MatrixRows]()
    for index, height in enumerate(heights or (rows,)):
        start = matrices[-1].rows[0].stop if matrices else 0
        matrices.append(MatrixRows(str(index), (Interval(start, start + height),)))
    return Parameter("w", "w", layout, MatrixStack(len(shape) - 1, tuple(matrices)))


def blocks(parameter: Parameter) -> list[MatrixRows]:
    [block_parameter] = in_blocks([parameter], Geometries([parameter]), tensor_parallel_parts, "tp")
    return list(block_parameter.stack.matrices)


@examples(50)
@given(parameter_lists())
def test_blocks_tile_the_matrix_by_tensor_parallel_place(parameters: list[Parameter]) -> None:
    """The blocks tile the matrix once, and no rank has parts of two blocks of a matrix."""
    before = Geometries(parameters)
    after = in_blocks(parameters, before, tensor_parallel_parts)
    geometries = Geometries(after)
    for number, (old, new) in enumerate(zip(parameters, after, strict=True)):
        geometry, layout = before[number], old.layout
        full = torch.arange(prod(layout.shape)).view(-1, prod(layout.shape[old.stack.row_dims :]))
        left = list(enumerate(new.stack.matrices))
        for index, whole in enumerate(old.stack.matrices):
            # The blocks of a matrix are adjacent.
            peers = geometry.peers
            places = {peers[rank].index(rank) for rank in geometry.elements(index)} if peers else {0}
            mine, left = left[: len(places)], left[len(places) :]
            elements = torch.cat([elements_of(full, block).flatten() for _, block in mine])
            assert torch.equal(elements.sort().values, elements_of(full, whole).flatten().sort().values)
            assert len(places) > 1 or mine[0][1] == whole, "what one place has whole is no block"
            held = Counter(rank for block, _ in mine for rank in geometries[number].elements(block))
            assert set(held.values()) == {1}
        assert left == []


def test_whole_blocks_stay_unchanged() -> None:
    """Three heads over two places: the middle head is on both."""
    result = blocks(matrix((12, 6), Shard(1), Shard(0), heights=(4, 4, 4)))
    assert [(block.label, block.rows) for block in result] == [
        ("0", (Interval(0, 4),)),
        ("1/tp0", (Interval(4, 6),)),
        ("1/tp1", (Interval(6, 8),)),
        ("2", (Interval(8, 12),)),
    ]


def test_a_block_has_the_learning_rate_of_the_block_shape_and_the_plan_warns() -> None:
    plan = plan_of([matrix((8, 6), Shard(0), Shard(1))], tp_mode="blockwise")
    assert [plan.out_in(number) for number in range(2)] == [(8, 3), (8, 3)]
    assert "'blockwise' is inexact: of 1 matrices" in plan.reason


@pytest.mark.parametrize("mode", tuple(MODES)[1:])
def test_a_tensor_parallel_mode_is_refused_without_tensor_parallel_matrices(mode: str) -> None:
    experts = matrix((2, 4, 6), Shard(1), Shard(0), heights=(4, 4))
    unnamed = matrix((8, 6), Shard(0), Shard(1))
    unnamed = replace(unnamed, layout=replace(unnamed.layout, tensor_parallel=None))
    for parameter in (experts, unnamed):
        with pytest.raises(OptionError, match=f"^tp_mode = '{mode}' .* 'tp' cuts, and there is none: name "):
            plan_of([parameter], tp_mode=mode)
        assert plan_of([parameter], tp_mode="owner").matrices


def axis_of(shape: tuple[int, ...], names: tuple[str, ...] | None, *placements: Any) -> int | None:
    """The tensor-parallel axis of a matrix on a mesh, from the ranks and names alone."""
    mesh: Any = SimpleNamespace(mesh=torch.arange(prod(shape)).view(shape), mesh_dim_names=names)
    return layout_on("w", (8, 6), mesh, placements).tensor_parallel


def test_the_tensor_parallel_axis_is_the_sharding_axis_named_tp() -> None:
    """Anywhere: last beside FSDP's axis, and before `owner` where peers have pieces."""
    copies, rows = TorchReplicate(), TorchShard(0)
    assert axis_of((2, 2, 1), ("dp_replicate", "tp", "owner"), copies, rows, copies) == 1
    assert axis_of((2, 2), ("fsdp", "tp"), _StridedShard(0, split_factor=2), rows) == 1
    assert axis_of((2, 2), ("fsdp", "tp"), rows, copies) is None
    assert axis_of((4, 1), ("fsdp", "tp"), rows, rows) is None
    assert axis_of((2, 2), ("fsdp", "ep"), rows, rows) is None
    assert axis_of((2, 2), None, rows, rows) is None
