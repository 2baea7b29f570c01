"""What looks wrong in who takes which parameter: warnings in words, and the fused layouts that were known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

from ..options import Split
from ..plan.terms.types import MatrixStack
from ..state.groups import THINNEST
from ..tensors.matrices import stack_of
from .rules import EMBEDDING, HEAD, Assignment, splits_with

LEAST_SHARE = 0.9
"""Muon's share of the parameters below which something was most likely left out."""
OUTSIDE = ("embedding", "head", "table")
SHOWN = 3


def family(fqn: str) -> str:
    """A parameter's name without numbers: equal for what all layers have alike."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", fqn)


def matrix_shapes(shape: Sequence[int], stack: MatrixStack) -> list[tuple[int, int]]:
    """Rows and columns of each matrix of a parameter, as they multiply."""
    found = [matrix.shape(prod(shape[stack.row_dims :])) for matrix in stack.matrices]
    return [(cols, rows) for rows, cols in found] if stack.transposed else found


def split_lines(assigned: Sequence[Assignment], splits: Sequence[Split]) -> Iterator[str]:
    """Which parameters are split without being asked, a line for each layout."""
    known = {split.match: split for split in splits_with(splits, assigned)[len(splits) :]}
    by_layout: dict[str, list[str]] = {}
    for fqn, split in known.items():
        lengths = ", ".join(f"{axis} = {length}" for axis, length in split.lengths.items())
        by_layout.setdefault(f"{split.dims}{f' with {lengths}' if lengths else ''}", []).append(family(fqn))
    for layout, names in by_layout.items():
        yield f"split, as its layout is known: {_some(names)} as {layout}"


def doubts(assigned: Sequence[Assignment], splits: Sequence[Split]) -> Iterator[str]:
    """Warnings where Muon takes little, takes thin matrices, or takes some of a family alone."""
    # No embedding and no output head: what share they have of a model says nothing of what Muon was to take.
    inside = [a for a in assigned if a.role not in OUTSIDE and a.reason not in (EMBEDDING, HEAD)]
    taken = sum(prod(a.shape) for a in inside if a.optimizer == "muon")
    total = sum(prod(a.shape) for a in inside)
    if total and taken < LEAST_SHARE * total:
        left = sorted((a for a in inside if a.optimizer != "muon"), key=lambda a: -prod(a.shape))
        yield (
            f"warning: Muon takes {100 * taken / total:.1f} % of the parameters besides embeddings and output head; "
            f"the largest of the others: {_some([family(a.fqn) for a in left])}"
        )
    every = splits_with(splits, assigned)
    muon = [a for a in assigned if a.optimizer == "muon"]
    thin = [a for a in muon if any(min(s) < THINNEST for s in matrix_shapes(a.shape, stack_of(a.fqn, a.shape, every)))]
    if thin:
        yield f"warning: matrices with a side under {THINNEST}, which Muon does little for: {_some_shapes(thin)}"
    takers: dict[str, set[str]] = {}
    for a in assigned:
        takers.setdefault(family(a.fqn), set()).add(a.optimizer)
    if apart := [f"{name} ({', '.join(sorted(taking))})" for name, taking in takers.items() if len(taking) > 1]:
        yield f"warning: matrices of one name go to different optimizers: {_some(apart)}"


def _some_shapes(assigned: Sequence[Assignment]) -> str:
    return _some([f"{family(a.fqn)} ({'x'.join(map(str, a.shape))})" for a in assigned])


def _some(names: Sequence[str]) -> str:
    """A few of the names, each once."""
    different = list(dict.fromkeys(names))
    more = len(different) - SHOWN
    return ", ".join(different[:SHOWN]) + (f" and {more} more" if more > 0 else "")
