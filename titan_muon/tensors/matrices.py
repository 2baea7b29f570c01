"""A parameter as a stack of matrices: itself, its experts, its heads or its fused projections."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..options import Split
from ..plan.terms.types import MatrixStack, Parameter
from .dims import Lengths, stack_in
from .dtensor import layer_of, layout_of


def stack_of(fqn: str, shape: Sequence[int], splits: Sequence[Split] = ()) -> MatrixStack:
    """The matrices of a parameter, by the first split that matches its name.

    Without one, a 2D parameter is one matrix and a 3D one a stack of matrices along dim 0 (experts). Raises ValueError
    for other shapes, for empty ones, and for a split that does not fit.
    """
    split = split_of(fqn, splits)
    read = split is not None and (split.dims or split.row_dims is not None)
    if 0 in shape or not (len(shape) in (2, 3) or read):
        raise ValueError(
            f"{fqn}: Muon takes matrices (2D) and stacks of matrices (3D), not shape {tuple(shape)}; give it to "
            "another optimizer, or say with muon.split and dims how it is read"
        )
    dims, lengths = _notation(fqn, shape, split)
    try:
        return stack_in(dims, shape, lengths)
    except ValueError as error:
        raise ValueError(f"{fqn}: muon.split: dims = {dims!r} {error}") from error


def split_of(fqn: str, splits: Sequence[Split]) -> Split | None:
    """The first split that matches a name."""
    return next((split for split in splits if fnmatch.fnmatchcase(fqn, split.match)), None)


def _notation(fqn: str, shape: Sequence[int], split: Split | None) -> tuple[str, Lengths]:
    """How a parameter is read, in the notation of `dims`, and the lengths that it needs. Raises ValueError."""
    if split is None:
        split = Split(match=fqn)
    if split.dims:
        if split.rows or split.joined or split.row_dims is not None:
            raise ValueError(f"{fqn}: muon.split has dims and rows, joined or row_dims; dims says all of them")
        return split.dims, split.lengths
    row_dims = len(shape) - 1 if split.row_dims is None else split.row_dims
    if not 0 < row_dims < len(shape):
        raise ValueError(
            f"{fqn}: muon.split has row_dims = {row_dims}; shape {tuple(shape)} takes 1 to {len(shape) - 1}"
        )
    names = [f"d{number}" for number in range(len(shape))]
    experts = names[:1] if len(shape) == 3 and row_dims == 2 else []
    rows, cols = names[len(experts) : row_dims], names[row_dims:]
    if not split.rows:
        return f"{' '.join(names)} -> {' '.join(experts)} | ({' '.join(rows)}) ({' '.join(cols)})", {}
    return _pattern(fqn, shape, split, (experts, rows, cols))


def _pattern(
    fqn: str, shape: Sequence[int], split: Split, names: tuple[list[str], list[str], list[str]]
) -> tuple[str, Lengths]:
    """`rows` and `joined` in the notation of `dims`: r repeats of p parts, of h rows where nothing else says them."""
    (experts, rows, cols), pattern = names, split.rows
    height = shape[len(experts)]
    if len(rows) > 1:
        raise ValueError(f"{fqn}: muon.split has rows of {len(rows)} dims together; say with dims how it is read")
    if min(pattern) < 1 or height % sum(pattern):
        raise ValueError(f"{fqn}: muon.split has rows = {list(pattern)}, which do not fill {height} rows evenly")
    count, down = (["p"], "(r h)") if split.joined else (["r", "p"], "h")
    left = " ".join([*experts, "(r p h)", *cols])
    return f"{left} -> {' '.join([*experts, *count])} | {down} ({' '.join(cols)})", {"p": tuple(pattern), "h": 1}


def planned(fqn: str, tensor: Tensor, splits: Sequence[Split] = (), *, own: bool = False) -> Parameter:
    """A parameter as the planner sees it; `own` is Parameter's. Raises ValueError as `stack_of` and `layout_of` do."""
    plain = not isinstance(tensor, DTensor)
    return Parameter(fqn, layer_of(fqn), layout_of(fqn, tensor), stack_of(fqn, tensor.shape, splits), plain, own)


def check_splits(names: Iterable[str], splits: Sequence[Split]) -> None:
    """Raise ValueError naming the splits that match none of the names."""
    known = tuple(names)
    unused = [s.match for s in splits if not any(fnmatch.fnmatchcase(name, s.match) for name in known)]
    if unused:
        raise ValueError(f"muon.split: {', '.join(map(repr, unused))} matches no Muon parameter; correct or remove it")
