"""Candidate problems for a plan."""

# Complications, such as slices, must save a share of the price, so that small modelled gains do not decide.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..exchange.all_gather import PATTERNS
from ..terms.work import WorkOf
from .problem import Problem
from .slices import MUST_SAVE, slices_reason, with_cuts
from .tensor_parallel import distributes, with_peers


@dataclass(frozen=True)
class Candidate:
    """A problem to search, the share of the price to save, and a note for the user."""

    problem: Problem
    must_save: float = 0.0
    reason: str = ""


Make = Callable[[Problem, WorkOf], Iterable[Candidate]]


def whole(problem: Problem, work_of: WorkOf) -> Iterable[Candidate]:
    """Each matrix whole on a single rank of each group."""
    if not distributes(problem.options):
        yield Candidate(problem, reason=slices_reason(problem))


def tensor_parallel(problem: Problem, work_of: WorkOf) -> Iterable[Candidate]:
    """Matrices cut by tensor parallelism on tensor-parallel groups."""
    if distributes(problem.options):
        variant = with_peers(problem, work_of)
        yield Candidate(variant, reason=slices_reason(variant))


def sliced(problem: Problem, work_of: WorkOf) -> Iterable[Candidate]:
    """Late matrices in slices on several ranks of a node."""
    must_save = MUST_SAVE if problem.options.split_over == "auto" else 0.0
    variant = with_cuts(problem, work_of)
    if variant is not None:
        yield Candidate(variant, must_save, slices_reason(variant))


def over_replicas(problem: Problem, work_of: WorkOf) -> Iterable[Candidate]:
    """Owners return results to their own replica, and replicas all-gather the results."""
    pieces = problem.costs.pieces
    kinds = {(pieces.kinds[task.matrix], task.group) for task in problem.tasks}
    has_replicas = any(len(pieces.replicas(kind, problem.groups[group])) > 1 for kind, group in kinds)
    if has_replicas and problem.pattern is PATTERNS["all_to_all"] and not distributes(problem.options):
        reason = (
            "owners return results to their own replica, and replicas all-gather the results (hierarchical): at least "
            f"{100 * MUST_SAVE:.0f} % less price (step time and memory) than with returns to all replicas"
        )
        variant = replace(problem, pattern=PATTERNS["hierarchical"])
        yield Candidate(variant, MUST_SAVE, "; ".join(filter(None, (reason, slices_reason(variant)))))


CANDIDATES: tuple[Make, ...] = (whole, tensor_parallel, sliced, over_replicas)
"""The first wins at equal prices."""
