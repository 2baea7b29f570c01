"""Candidates for a plan: ways to pose the problem, each with the part of the step's price that it has to save."""

# A candidate is searched for its best plan. The planner takes the least price / (1 - must_save). A candidate that makes
# a step harder to follow, as slices do, has to save a part of the price, so that small modelled gains do not decide.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..exchange.all_gather import PATTERNS
from ..terms.work import WorkOf
from .problem import Problem
from .slices import MUST_SAVE, slices_reason, with_cuts
from .tensor_parallel import given_to_groups, with_peers


@dataclass(frozen=True)
class Candidate:
    """A problem whose best plan may be taken.

    Attributes:
        problem: what is searched.
        must_save: part of the price of other candidates that this one has to save.
        reason: note for the user if it is taken.
    """

    problem: Problem
    must_save: float = 0.0
    reason: str = ""


Make = Callable[[Problem, WorkOf], Iterable[Candidate]]


def whole(problem: Problem, work_of: WorkOf) -> Iterable[Candidate]:
    """Each matrix whole on one rank of each group that assembles it."""
    if not given_to_groups(problem.options):
        yield Candidate(problem, reason=slices_reason(problem))


def tensor_parallel(problem: Problem, work_of: WorkOf) -> Iterable[Candidate]:
    """Matrices that tensor parallelism cuts on its groups, if the option `tensor_parallel` says so."""
    if given_to_groups(problem.options):
        found = with_peers(problem, work_of)
        yield Candidate(found, reason=slices_reason(found))


def sliced(problem: Problem, work_of: WorkOf) -> Iterable[Candidate]:
    """Late matrices in slices on several ranks of a node, if the option `split_over` allows it."""
    must_save = MUST_SAVE if problem.options.split_over == "auto" else 0.0
    found = with_cuts(problem, work_of)
    if found is not None:
        yield Candidate(found, must_save, slices_reason(found))


def over_replicas(problem: Problem, work_of: WorkOf) -> Iterable[Candidate]:
    """Owners return results to their own replica, and replicas all-gather results from each other."""
    pieces = problem.costs.pieces
    kinds = {(pieces.kinds[task.matrix], task.group) for task in problem.tasks}
    has_replicas = any(len(pieces.replicas(kind, problem.groups[group])) > 1 for kind, group in kinds)
    if has_replicas and problem.pattern is PATTERNS["all_to_all"] and not given_to_groups(problem.options):
        reason = (
            "owners return results to their own copy, and copies all-gather them among each other (hierarchical): at "
            f"least {100 * MUST_SAVE:.0f} % less than from owners to all copies, in time and what its memory is worth"
        )
        found = replace(problem, pattern=PATTERNS["hierarchical"])
        yield Candidate(found, MUST_SAVE, "; ".join(filter(None, (reason, slices_reason(found)))))


CANDIDATES: tuple[Make, ...] = (whole, tensor_parallel, sliced, over_replicas)
"""In the order in which they are searched. Of equal prices the first is taken."""
