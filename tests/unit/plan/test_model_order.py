"""Rounds in the order of a model's pass: swaps of equal matrices, and hidden rounds."""

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.test_timeline import parameters
from tests.unit.plans import examples, plan_of, plans
from titan_muon.options import Overlap
from titan_muon.plan.search.owners import Task
from titan_muon.plan.search.rounds import in_model_order
from titan_muon.plan.terms.layout import Geometries
from titan_muon.plan.terms.pieces import Pieces
from titan_muon.plan.terms.schedule import EARLY, ordered_rounds
from titan_muon.plan.terms.types import Bucket, Plan


def tasks_of(plan: Plan) -> tuple[list[list[Task]], dict[tuple[int, int], int]]:
    """The plan's rounds as tasks, and the owners."""
    groups = list(dict.fromkeys(bucket.group for bucket in plan.buckets))
    rounds: list[list[Task]] = [[] for _ in range(plan.rounds)]
    owners = {}
    for bucket in plan.buckets:
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            matrix_data, group = plan.matrices[matrix], groups.index(bucket.group)
            rounds[bucket.round].append(Task(matrix, group, matrix_data.flops, matrix_data.numel, ""))
            owners[matrix, group] = owner
    return rounds, owners


def pieces_of(plan: Plan) -> Pieces:
    return Pieces(plan.matrices, Geometries(plan.parameters))


@examples(50)
@given(plans(exchanges=["all_to_all"]), st.sampled_from(["backward", "forward"]))
def test_model_order_keeps_the_cost_of_every_owner(plan: Plan, overlap: Overlap) -> None:
    pieces, (rounds, owners) = pieces_of(plan), tasks_of(plan)
    ordered, owned = in_model_order(rounds, owners, overlap, pieces, {})
    assert sorted(task for tasks in ordered for task in tasks) == sorted(task for tasks in rounds for task in tasks)
    assert owned.keys() == owners.keys()
    for before, after in zip(rounds, ordered, strict=True):
        old, new = (
            Counter((of[task.matrix, task.group], task.group, pieces.kinds[task.matrix], task.flops) for task in tasks)
            for tasks, of in ((before, owners), (after, owned))
        )
        assert old == new, "each owner has as many of each kind in each round as before"
    sliced = [matrix for matrix, entry in enumerate(plan.matrices) if entry.slice is not None]
    assert all(owned[key] == owners[key] for key in owners if key[0] in sliced)


@examples(50)
@given(plans(exchanges=["all_to_all"]), st.sampled_from(["backward", "forward"]))
def test_equal_rounds_are_in_the_order_of_the_pass(plan: Plan, overlap: Overlap) -> None:
    pieces, (rounds, owners) = pieces_of(plan), tasks_of(plan)
    ordered, _ = in_model_order(rounds, owners, overlap, pieces, {})
    kinds: dict[tuple[int, int], list[int]] = {}
    for tasks in ordered:
        for task in tasks:
            if plan.matrices[task.matrix].slice is None:
                kinds.setdefault((task.group, pieces.kinds[task.matrix]), []).append(task.matrix)
    for matrices in kinds.values():
        assert matrices == sorted(matrices, reverse=overlap == "backward")


def test_a_matrix_stays_with_possible_owners() -> None:
    plan = plan_of(parameters(4, 4))
    pieces = pieces_of(plan)
    rounds = [[Task(number, 0, 1, 1, "")] for number in (3, 2, 1, 0)]
    owners = {(number, 0): number for number in range(4)}
    candidates = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    ordered, owned = in_model_order(rounds, owners, "forward", pieces, candidates)
    assert [tasks[0].matrix for tasks in ordered] == [2, 3, 0, 1]
    assert owned == {(2, 0): 3, (3, 0): 2, (0, 0): 1, (1, 0): 0}
    assert all(rank in candidates[matrix] for (matrix, _), rank in owned.items())


@pytest.mark.parametrize(
    ("matrices", "backward", "forward"),
    [
        # An eighth of 16 is two: a round with one of the first two matrices hides nothing, nor do rounds at the same
        # time.
        ([(12, 15), (8, 11), (4, 7), (0, 3)], 3, 0),
        ([(0, 3), (4, 7), (8, 11), (12, 15)], 0, 3),
        ([(0, 9), (2, 15), (3, 4)], 0, 2),
        ([(3, 9), (1, 15), (2, 4)], 1, 0),
        ([(5, 9)], 0, 0),
    ],
)
def test_buckets_without_an_early_matrix_are_hidden(
    matrices: list[tuple[int, int]], backward: int, forward: int
) -> None:
    assert EARLY * 16 == 2
    bucket = plan_of(parameters(16, 4)).buckets[0]
    buckets: list[Bucket] = [replace(bucket, matrices=of, owners=(0, 1), round=k) for k, of in enumerate(matrices)]
    counts = [ordered_rounds(buckets, overlap) for overlap in get_args(Overlap)]
    assert counts == [0, backward, forward]
