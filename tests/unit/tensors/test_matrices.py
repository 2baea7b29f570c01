"""The matrices of a parameter: by default, by einops notation, and refusals."""

from math import prod

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from tests.shared import muon_keywords
from tests.unit.plans import elements_of
from titan_muon import Muon
from titan_muon.engine.layout.intervals import Geometry
from titan_muon.engine.layout.types import Interval, Layout, MatrixStack, Mesh, Replicate, Shard
from titan_muon.engine.tensors.matrices import check_splits, planned, stack_of
from titan_muon.options import Split


def test_by_default_a_parameter_is_a_matrix_or_a_stack() -> None:
    for shape, blocks in (((6, 4), [(0, 6)]), ((3, 2, 5), [(0, 2), (2, 4), (4, 6)])):
        assert [block.rows for block in stack_of("w", shape).matrices] == [(Interval(*rows),) for rows in blocks]
    parameter = planned("layers.3.mlp.w", torch.zeros(4, 2))
    assert (parameter.fqn, parameter.layer, parameter.plain) == ("layers.3.mlp.w", "layers.3", True)
    assert parameter.layout == Layout((4, 2), Mesh((1,), (0,)), (Replicate(),))


def test_the_first_matching_split_decides_and_every_split_has_a_match() -> None:
    other, whole = Split(match="other", dims="f d -> | f d"), Split(match="*", dims="f d -> | f d")
    split = Split(match="*.w", dims="(p f) d -> p | f d", lengths={"p": 2})
    assert len(stack_of("layers.0.w", (6, 4), [other, split, whole]).matrices) == 2
    assert len(stack_of("layers.0.w", (6, 4), [other, whole, split]).matrices) == 1
    check_splits(["layers.0.w"], [split, whole])


READ = [
    ((8, 6), "(h f) d -> h | f d", {"h": 4}),
    ((2, 10, 8), "g f d -> g | f d", {}),
    ((10, 2, 8), "f g d -> g | f d", {}),
    ((3, 5, 2, 8), "e f g d -> e g | f d", {}),
    ((3, 4, 10), "e d (f g) -> e g | d f", {"g": 2}),
    ((3, 10, 4), "e (f g) d -> e g | f d", {"f": 5}),
    ((6, 3, 2, 2), "o i h w -> | o (i h w)", {}),
    ((4, 3, 2, 5), "d p h k -> p h | d k", {}),
    ((24, 4), "(n p k) d -> p | (n k) d", {"p": 3, "k": 4}),
]


def matrices(shape: tuple[int, ...], dims: str, lengths: dict[str, int | tuple[int, ...]]) -> list[Tensor]:
    stack = stack_of("w", shape, [Split(match="*", dims=dims, lengths=lengths)])
    full = torch.arange(prod(shape)).reshape(prod(shape[: stack.row_dims]), -1)
    return [elements_of(full, matrix) for matrix in stack.matrices]


@pytest.mark.parametrize(("shape", "dims", "lengths"), READ, ids=[dims for _, dims, _ in READ])
def test_matrices_equal_einops(shape: tuple[int, ...], dims: str, lengths: dict[str, int]) -> None:
    left, _, right = dims.partition("->")
    count, _, matrix = right.partition("|")
    full = torch.arange(prod(shape)).reshape(shape)
    expected = rearrange(full, f"{left} -> ({count}) {matrix}", **lengths)
    result = torch.stack(matrices(shape, dims, dict(lengths)))
    assert torch.equal(result, expected)


def test_a_list_of_lengths_is_parts_of_unequal_size() -> None:
    """Two groups of 2 + 1 + 1 heads of 3 rows: q, k and v are a matrix each."""
    q, k, v = matrices((24, 2), "(g p h) d -> p | (g h) d", {"p": (2, 1, 1), "h": 3})
    groups = torch.arange(48).view(2, 4, 3, 2)
    assert torch.equal(q, groups[:, :2].reshape(12, 2))
    assert torch.equal(k, groups[:, 2].reshape(6, 2))
    assert torch.equal(v, groups[:, 3].reshape(6, 2))


def test_matrices_stored_as_in_out_are_transposed() -> None:
    def stack(dims: str) -> MatrixStack:
        return stack_of("w", (4, 6), [Split(match="*", dims=dims)])

    assert stack("d f -> | f d").transposed
    assert not stack("f d -> | f d").transposed
    assert stack("d f -> | f d").matrices == stack("f d -> | f d").matrices


@pytest.mark.parametrize("dim", range(4))
def test_interleaved_pieces_are_few_rectangles(dim: int) -> None:
    """However experts' gate and up, (E, F, 2, D), are cut, a copy moves more than a row."""
    shape = (2, 64, 2, 8)
    stack = stack_of("w", shape, [Split(match="*", dims="e f g d -> e g | f d")])
    geometry = Geometry(Layout(shape, Mesh((2,), (0, 1)), (Shard(dim),)), stack)
    for rank in range(2):
        assert all(len(piece.rows) * len(piece.cols) == 1 for piece in geometry.pieces(rank).values())


def test_the_scale_follows_the_shape_of_the_matrix_not_of_the_storage() -> None:
    """A layer stored as (in, out) trains like the transpose."""
    values, grad = torch.randn(4, 12), torch.randn(4, 12)
    stored, turned = nn.Parameter(values.clone()), nn.Parameter(values.T.contiguous())
    stored.grad, turned.grad = grad.clone(), grad.T.contiguous()
    options = {"lr": 0.02, "adjust_lr_fn": "spectral_unclamped", "orthogonalize": "reference"}
    Muon([("w", stored)], **muon_keywords(**options, split=[Split(match="w", dims="d f -> | f d")])).step()
    Muon([("w", turned)], **muon_keywords(**options)).step()
    assert torch.equal(stored, turned.T)


def test_a_step_goes_on_after_a_refusal_to_offload_matrices_with_shared_rows() -> None:
    parameter = nn.Parameter(torch.zeros(6, 6))
    split = [Split(match="*", dims="(f g) d -> g | f d", lengths={"g": 2})]
    optimizer = Muon([("layers.0.w", parameter)], split=split)
    with pytest.raises(ValueError, match="share rows"):
        optimizer.offload()
    parameter.grad = torch.ones(6, 6)
    optimizer.step()
