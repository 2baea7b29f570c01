"""When results go over copies by all-gathers, and not from each owner to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..exchange.all_gather import PATTERNS
from .search import Draft, Problem
from .slices import WORTH


def over_copies(problems: Sequence[Problem]) -> list[Problem]:
    """The same problems by the hierarchical all-to-all, those of whole matrices with several copies."""
    pattern = PATTERNS["hierarchical"]
    return [replace(problem, pattern=pattern) for problem in problems if _has_copies(problem)]


def _has_copies(problem: Problem) -> bool:
    pieces = problem.costs.pieces
    if problem.pattern is not PATTERNS["all_to_all"] or any(matrix.slice is not None for matrix in pieces.matrices):
        return False
    kinds = {(pieces.kinds[task.matrix], task.group) for task in problem.tasks}
    return any(len(pieces.copies(kind, problem.groups[group])) > 1 for kind, group in kinds)


def copies_reason(draft: Draft) -> str:
    """Why owners do not send their results to all copies; empty if they do."""
    if not any(PATTERNS[bucket.exchange].spreads for bucket in draft.buckets):
        return ""
    gain = 100 * (1 - WORTH)
    return (
        "owners return results to their own copy, and copies all-gather them among each other (hierarchical): at least "
        f"{gain:.0f} % less than from owners to all copies, in time and what its memory is worth"
    )
