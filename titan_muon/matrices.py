"""A parameter as a stack of matrices, and which optimizer takes which parameter, with the reason."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from .dtensor import layer_of, layout_of
from .plan.types import Block, Interval, Parameter, Stack


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the parameters whose name matches the glob `match` are cut into matrices.

    Attributes:
        match: glob on the name; `*` also crosses dots.
        rows: rows of the matrices, in order; the pattern repeats down the parameter, within each matrix of a stack. One
            number cuts heads; q, k and v fused are three numbers.
        joined: entries at the same place of the repeated pattern are one matrix. TorchTitan fuses q, k and v of each
            group of heads: rows = [query heads x head_dim, head_dim, head_dim], joined.
        row_dims: leading dims that are flattened to rows, the others to columns; by default all but the last. It makes
            matrices of convolutions: 1 reads (out, in, height, width) as out x (in height width).
    """

    match: str
    rows: tuple[int, ...] = ()
    joined: bool = False
    row_dims: int | None = None


def stack_of(fqn: str, shape: Sequence[int], splits: Sequence[Split] = ()) -> Stack:
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
    return Stack(row_dims, tuple(_blocks(fqn, total, height, pattern, split is not None and split.joined)))


def _blocks(fqn: str, total: int, height: int, pattern: Sequence[int], joined: bool) -> Iterator[Block]:
    """Blocks of `total` rows, a stack of matrices of `height` rows that are each cut by the pattern."""
    if min(pattern) < 1 or height % sum(pattern):
        raise ValueError(f"{fqn}: muon.split has rows = {list(pattern)}, which do not fill {height} rows evenly")
    repeats = height // sum(pattern)
    for base in range(0, total, height):
        cuts = accumulate(tuple(pattern) * repeats, initial=base)
        parts = [Interval(a, b) for a, b in pairwise(cuts)]
        if joined:
            yield from (Block(f"{base // height}.{i}", tuple(parts[i :: len(pattern)])) for i in range(len(pattern)))
        else:
            yield from (Block(f"{base // height}.{i}", (part,)) for i, part in enumerate(parts))


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


@dataclass(frozen=True)
class Rule:
    """Parameters whose name matches the glob `match` (`*` also crosses dots) go to `optimizer`, because of `reason`."""

    match: str
    optimizer: str
    reason: str


@dataclass(frozen=True)
class Assignment:
    """The optimizer that takes a parameter. `rule` is the index of the rule that decided, or None for its shape."""

    fqn: str
    shape: tuple[int, ...]
    optimizer: str
    reason: str
    rule: int | None


EMBEDDINGS_AND_HEADS = (
    Rule("*embed*", "adamw", "embedding: its rows are looked up, not multiplied"),
    Rule("*lm_head*", "adamw", "output head"),
    Rule("output.weight", "adamw", "output head"),
)
"""What no shape tells: these are matrices that Muon is not meant for (Keller Jordan, 2024)."""


def default_rules(router: str = "adamw") -> tuple[Rule, ...]:
    """Rules for what a recipe leaves open, before shapes decide. `router` takes the gates of mixtures of experts."""
    return (
        *EMBEDDINGS_AND_HEADS,
        Rule("*.router.*weight", router, "router of a mixture of experts (optimizer.router)"),
    )


def assign(
    parameters: Iterable[tuple[str, Sequence[int]]],
    rules: Sequence[Rule],
    defaults: Sequence[Rule] | None,
    *,
    all_rules: bool = True,
) -> tuple[Assignment, ...]:
    """An optimizer for each (name, shape), from the first rule that matches.

    What no rule matches follows `defaults` and then its shape: Muon takes matrices and stacks of experts, AdamW the
    rest. With `defaults` None there is nothing to follow. Raises ValueError naming the parameters that nothing matches
    and, with `all_rules`, the rules that take nothing.
    """
    assigned = [_assign_one(fqn, tuple(shape), rules, defaults) for fqn, shape in parameters]
    decisive = {assignment.rule for assignment in assigned}
    unused = [rule.match for index, rule in enumerate(rules) if index not in decisive]
    if all_rules and unused:
        raise ValueError(
            f"optimizer.rule: {', '.join(map(repr, unused))} takes no parameter: nothing has such a name, or "
            "rules before it take all that have; correct it, move it up or remove it"
        )
    open_ = [a.fqn for a in assigned if a.optimizer == ""]
    if open_:
        raise ValueError(
            f"optimizer.rule: no rule matches {', '.join(open_[:5])}{' ...' if len(open_) > 5 else ''} "
            f"({len(open_)} parameters); add a rule, or set optimizer.defaults = true"
        )
    return tuple(assigned)


def _assign_one(fqn: str, shape: tuple[int, ...], rules: Sequence[Rule], defaults: Sequence[Rule] | None) -> Assignment:
    for index, rule in enumerate(rules):
        if fnmatch.fnmatchcase(fqn, rule.match):
            return Assignment(fqn, shape, rule.optimizer, rule.reason, index)
    if defaults is None:
        return Assignment(fqn, shape, "", "", None)
    for rule in defaults:
        if fnmatch.fnmatchcase(fqn, rule.match):
            return Assignment(fqn, shape, rule.optimizer, rule.reason, None)
    return Assignment(fqn, shape, *_by_shape(fqn, shape), None)


def _by_shape(fqn: str, shape: tuple[int, ...]) -> tuple[str, str]:
    if len(shape) == 2:
        return "muon", "hidden matrix"
    if len(shape) == 3 and "expert" in fqn:
        return "muon", "stack of expert matrices"
    if len(shape) < 2:
        return "adamw", "vector: norm, bias or scale"
    return "adamw", f"{len(shape)}D and not a stack of experts"
