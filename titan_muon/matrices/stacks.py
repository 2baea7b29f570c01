"""The matrices of a parameter by its shape and the option `split`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from math import prod

from ..engine.layout.types import MatrixStack
from ..options import Split
from .notation import stack_in


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
            f"another optimizer, as titan_muon.Hybrid(model) does, or {split_hint(len(shape))}"
            f"{flat if len(shape) == 1 else ''}"
        )
    whole = "f d -> | f d" if len(shape) == 2 else "e f d -> e | f d"
    dims, lengths = (whole, {}) if split is None else (split.dims, split.lengths)
    fixed = tuple((axis, part if isinstance(part, int) else tuple(part)) for axis, part in lengths.items())
    try:
        return stack_in(dims, tuple(shape), fixed)
    except ValueError as error:
        raise ValueError(f"{fqn}: muon.split: dims = {dims!r} {error}") from error


def split_hint(ndim: int) -> str:
    """How to describe the matrices of a parameter without a default."""
    leading = " ".join(f"b{number}" for number in range(1, ndim - 1))
    lines = (
        f", dims = '{leading} f d -> {leading} | f d' for a stack of matrices in the last two dims, or "
        f"'f {leading} d -> | f ({leading} d)' for one matrix, as of a convolution"
    )
    return f"describe its matrices by muon.split{lines if ndim > 3 else ' and dims'}"


def matrix_shapes(shape: Sequence[int], stack: MatrixStack) -> list[tuple[int, int]]:
    """Rows and columns of each matrix of a parameter, as (outputs, inputs)."""
    shapes = [matrix.shape(prod(shape[stack.row_dims :])) for matrix in stack.matrices]
    return [(cols, rows) for rows, cols in shapes] if stack.transposed else shapes


def has_matrices(fqn: str, shape: Sequence[int], splits: Sequence[Split] = ()) -> bool:
    """Whether a parameter is a matrix, a stack of matrices, or has a split, and is not empty."""
    return 0 not in shape and (len(shape) in (2, 3) or split_of(fqn, splits) is not None)


def split_of(fqn: str, splits: Sequence[Split]) -> Split | None:
    """The first matching split."""
    return next((split for split in splits if fnmatch.fnmatchcase(fqn, split.match)), None)


def check_splits(names: Iterable[str], splits: Sequence[Split]) -> None:
    """Raise ValueError for splits without a matching name."""
    known = tuple(names)
    unused = [s.match for s in splits if not any(fnmatch.fnmatchcase(name, s.match) for name in known)]
    if unused:
        raise ValueError(f"muon.split: {', '.join(map(repr, unused))} matches no Muon parameter; correct or remove it")
