"""Warnings about suspicious assignments, and notes about known fused layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

from ..options import Split
from ..tensors.matrices import THINNEST, is_thin
from ..tensors.names import listed
from .rules import EMBEDDING, HEAD, Assignment, splits_with

LEAST_SHARE = 0.9
"""Least share of Muon without a warning."""
OUTSIDE = ("embedding", "head", "table")
SHOWN = 3


def family(fqn: str) -> str:
    """A parameter's name with * for layer numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", fqn)


def split_lines(assigned: Sequence[Assignment], splits: Sequence[Split]) -> Iterator[str]:
    """Automatically split parameters, a line for each layout."""
    known = {split.match: split for split in splits_with(splits, assigned)[len(splits) :]}
    by_layout: dict[str, list[str]] = {}
    for fqn, split in known.items():
        lengths = ", ".join(f"{axis} = {length}" for axis, length in split.lengths.items())
        by_layout.setdefault(f"{split.dims}{f' with {lengths}' if lengths else ''}", []).append(family(fqn))
    for layout, names in by_layout.items():
        yield f"split, as its layout is known: {_some(names)} as {layout}"


def doubts(assigned: Sequence[Assignment], splits: Sequence[Split]) -> Iterator[str]:
    """Warnings if Muon takes few parameters, thin matrices, or only some matrices of a family."""
    inside = [a for a in assigned if a.role not in OUTSIDE and a.reason not in (EMBEDDING, HEAD)]
    muon_elements = sum(prod(a.shape) for a in inside if a.optimizer == "muon")
    total = sum(prod(a.shape) for a in inside)
    if total and muon_elements < LEAST_SHARE * total:
        left = sorted((a for a in inside if a.optimizer != "muon"), key=lambda a: -prod(a.shape))
        yield (
            f"warning: Muon takes {100 * muon_elements / total:.1f} % of the parameters besides embeddings and output "
            f"head; the largest of the rest: {_some([family(a.fqn) for a in left])}"
        )
    all_splits = splits_with(splits, assigned)
    if thin := [a for a in assigned if a.optimizer == "muon" and is_thin(a.fqn, a.shape, all_splits)]:
        sizes = [f"{family(a.fqn)} ({'x'.join(map(str, a.shape))})" for a in thin]
        yield f"warning: matrices with a side under {THINNEST}, with little effect of Muon: {_some(sizes)}"
    takers: dict[str, set[str]] = {}
    for a in assigned:
        takers.setdefault(family(a.fqn), set()).add(a.optimizer)
    if divided := [f"{name} ({', '.join(sorted(names))})" for name, names in takers.items() if len(names) > 1]:
        yield f"warning: matrices of one name go to different optimizers: {_some(divided)}"


def _some(names: Sequence[str]) -> str:
    return listed(list(dict.fromkeys(names)), SHOWN)
