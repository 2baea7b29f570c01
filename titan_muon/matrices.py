"""A parameter as a stack of matrices: itself, its experts, its heads or its fused projections."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from .dtensor import layer_of, layout_of
from .options import Split
from .plan.types import Interval, MatrixRows, MatrixStack, Parameter


def stack_of(fqn: str, shape: Sequence[int], splits: Sequence[Split] = ()) -> MatrixStack:
    """The matrices of a parameter, by the first split that matches its name.

    Without one, a 2D parameter is one matrix and a 3D one a stack of matrices along dim 0 (experts). Raises ValueError
    for other shapes, for empty ones, and for a split that does not fit.
    """
    split = next((s for s in splits if fnmatch.fnmatchcase(fqn, s.match)), None)
    row_dims = len(shape) - 1 if split is None or split.row_dims is None else split.row_dims
    if 0 in shape or not (len(shape) in (2, 3) or (split is not None and split.row_dims is not None)):
        raise ValueError(
            f"{fqn}: Muon takes matrices (2D) and stacks of matrices (3D), not shape {tuple(shape)}; give it to "
            "another optimizer, or say with muon.split and row_dims how it is read"
        )
    if not 0 < row_dims < len(shape):
        raise ValueError(
            f"{fqn}: muon.split has row_dims = {row_dims}; shape {tuple(shape)} takes 1 to {len(shape) - 1}"
        )
    total = prod(shape[:row_dims])
    height = shape[row_dims - 1] if len(shape) == 3 and row_dims == 2 else total
    pattern = (height,) if split is None or not split.rows else split.rows
    return MatrixStack(row_dims, tuple(_matrices(fqn, total, height, pattern, split is not None and split.joined)))


def _matrices(fqn: str, total: int, height: int, pattern: Sequence[int], joined: bool) -> Iterator[MatrixRows]:
    """The matrices of `total` rows: a stack of matrices of `height` rows that are each cut by the pattern."""
    if min(pattern) < 1 or height % sum(pattern):
        raise ValueError(f"{fqn}: muon.split has rows = {list(pattern)}, which do not fill {height} rows evenly")
    repeats = height // sum(pattern)
    for base in range(0, total, height):
        cuts = accumulate(tuple(pattern) * repeats, initial=base)
        parts = [Interval(a, b) for a, b in pairwise(cuts)]
        if joined:
            yield from (
                MatrixRows(f"{base // height}.{i}", tuple(parts[i :: len(pattern)])) for i in range(len(pattern))
            )
        else:
            yield from (MatrixRows(f"{base // height}.{i}", (part,)) for i, part in enumerate(parts))


def planned(fqn: str, tensor: Tensor, splits: Sequence[Split] = ()) -> Parameter:
    """A parameter as the planner sees it. Raises ValueError as `stack_of` and `layout_of` do."""
    plain = not isinstance(tensor, DTensor)
    return Parameter(fqn, layer_of(fqn), layout_of(fqn, tensor), stack_of(fqn, tensor.shape, splits), plain)


def check_splits(names: Iterable[str], splits: Sequence[Split]) -> None:
    """Raise ValueError naming the splits that match none of the names."""
    known = tuple(names)
    unused = [s.match for s in splits if not any(fnmatch.fnmatchcase(name, s.match) for name in known)]
    if unused:
        raise ValueError(f"muon.split: {', '.join(map(repr, unused))} matches no Muon parameter; correct or remove it")
