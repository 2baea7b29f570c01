"""A parameter as a stack of matrices: itself, its experts, its heads or its fused projections."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..options import Split
from ..plan.terms.types import MatrixStack, Parameter
from .dims import stack_in
from .dtensor import layer_of, layout_of


def stack_of(fqn: str, shape: Sequence[int], splits: Sequence[Split] = ()) -> MatrixStack:
    """The matrices of a parameter, by the first split that matches its name.

    Without one, a 2D parameter is one matrix and a 3D one a stack of matrices along dim 0 (experts). Raises ValueError
    for other shapes, for empty ones, and for a split that does not fit.
    """
    split = split_of(fqn, splits)
    if 0 in shape or not (len(shape) in (2, 3) or split is not None):
        raise ValueError(
            f"{fqn}: Muon takes matrices (2D) and stacks of matrices (3D), not shape {tuple(shape)}; give it to "
            "another optimizer, or say with muon.split and dims how it is read"
        )
    whole = "f d -> | f d" if len(shape) == 2 else "e f d -> e | f d"
    dims, lengths = (whole, {}) if split is None else (split.dims, split.lengths)
    try:
        return stack_in(dims, shape, lengths)
    except ValueError as error:
        raise ValueError(f"{fqn}: muon.split: dims = {dims!r} {error}") from error


def split_of(fqn: str, splits: Sequence[Split]) -> Split | None:
    """The first split that matches a name."""
    return next((split for split in splits if fnmatch.fnmatchcase(fqn, split.match)), None)


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
