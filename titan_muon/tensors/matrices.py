"""The matrices of a parameter."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..options import Split
from ..plan.terms.types import Layout, MatrixStack, Parameter
from .dims import stack_in
from .dtensor import layer_of, layout_of


def stack_of(fqn: str, shape: Sequence[int], splits: Sequence[Split] = ()) -> MatrixStack:
    """The matrices of a parameter, by the first split with a matching name.

    Without a split, a 2D parameter is one matrix and a 3D parameter a stack along dim 0 (experts). Raises ValueError
    for an empty parameter, for a shape without a default, and for a split that does not fit.
    """
    split = split_of(fqn, splits)
    if not has_matrices(fqn, shape, splits):
        flat = ". FSDP1 and DeepSpeed ZeRO keep flat pieces of matrices: shard the model by fully_shard (FSDP2)"
        raise ValueError(
            f"{fqn}: Muon takes matrices (2D) and stacks of matrices (3D), not shape {tuple(shape)}; give it to "
            "another optimizer, as titan_muon.Hybrid(model) does, or describe its matrices by muon.split and dims"
            f"{flat if len(shape) == 1 else ''}"
        )
    whole = "f d -> | f d" if len(shape) == 2 else "e f d -> e | f d"
    dims, lengths = (whole, {}) if split is None else (split.dims, split.lengths)
    try:
        return stack_in(dims, shape, lengths)
    except ValueError as error:
        raise ValueError(f"{fqn}: muon.split: dims = {dims!r} {error}") from error


def matrix_shapes(shape: Sequence[int], stack: MatrixStack) -> list[tuple[int, int]]:
    """Rows and columns of each matrix of a parameter, as (outputs, inputs)."""
    shapes = [matrix.shape(prod(shape[stack.row_dims :])) for matrix in stack.matrices]
    return [(cols, rows) for rows, cols in shapes] if stack.transposed else shapes


THINNEST = 16
"""Side of a matrix below which Newton-Schulz changes little."""


def is_thin(fqn: str, shape: Sequence[int], splits: Sequence[Split]) -> bool:
    """Whether a parameter has a matrix with a side under THINNEST."""
    return any(min(sides) < THINNEST for sides in matrix_shapes(shape, stack_of(fqn, shape, splits)))


def has_matrices(fqn: str, shape: Sequence[int], splits: Sequence[Split] = ()) -> bool:
    """Whether a parameter is a matrix, a stack of matrices, or has a split, and is not empty."""
    return 0 not in shape and (len(shape) in (2, 3) or split_of(fqn, splits) is not None)


def split_of(fqn: str, splits: Sequence[Split]) -> Split | None:
    """The first matching split."""
    return next((split for split in splits if fnmatch.fnmatchcase(fqn, split.match)), None)


def planned(fqn: str, tensor: Tensor, splits: Sequence[Split] = (), layout: Layout | None = None) -> Parameter:
    """The planner's record of a parameter, by default with its own layout."""
    layout = layout_of(fqn, tensor) if layout is None else layout
    return Parameter(fqn, layer_of(fqn), layout, stack_of(fqn, tensor.shape, splits), not isinstance(tensor, DTensor))


def check_splits(names: Iterable[str], splits: Sequence[Split]) -> None:
    """Raise ValueError for splits without a matching name."""
    known = tuple(names)
    unused = [s.match for s in splits if not any(fnmatch.fnmatchcase(name, s.match) for name in known)]
    if unused:
        raise ValueError(f"muon.split: {', '.join(map(repr, unused))} matches no Muon parameter; correct or remove it")
