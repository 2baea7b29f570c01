"""Rounds: the order of matrices, swaps of equal matrices in a model's pass, and hidden rounds."""

from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.test_timeline import parameters
from tests.unit.plans import examples, plan_of, plans
from titan_muon.engine.layout.intervals import Geometries, Pieces
from titan_muon.engine.layout.types import Bucket, Plan
from titan_muon.engine.planning import Task
from titan_muon.engine.program.phases import prefetch
from titan_muon.options import Overlap
from titan_muon.planner.search import in_model_order, rounds
from titan_muon.planner.timeline import EARLY, ordered_rounds


@st.composite
def task_lists(draw: st.DrawFn) -> tuple[list[Task], list[tuple[int, ...]]]:
    count = draw(st.integers(1, 4))
    groups = [tuple(range(draw(st.integers(1, 8)))) for _ in range(count)]
    places = st.tuples(st.integers(0, count - 1), st.integers(1, 100))
    drawn = draw(st.lists(places, min_size=1, max_size=40))
    return [Task(i, group, size, size, "l") for i, (group, size) in enumerate(drawn)], groups


@examples(75)
@given(task_lists(), st.integers(1, 20))
def test_rounds_keep_the_order_and_every_task(case: tuple[list[Task], list[tuple[int, ...]]], count: int) -> None:
    tasks, groups = case
    chosen_rounds = rounds(tasks, count)
    assert 1 <= len(chosen_rounds) <= count
    assert all(chosen_rounds), "no round is empty"
    assert sorted((task for chosen in chosen_rounds for task in chosen), key=lambda t: t.matrix) == tasks
    for group in range(len(groups)):
        order = [task.matrix for chosen in chosen_rounds for task in chosen if task.group == group]
        assert order == sorted(order), "a group's matrices keep their order over all rounds"
    for chosen in chosen_rounds:
        assert [task.matrix for task in chosen] == sorted(task.matrix for task in chosen)


@examples(50)
@given(st.integers(1, 60), st.integers(1, 20))
def test_rounds_have_about_the_same_bytes(tasks: int, count: int) -> None:
    chosen_rounds = rounds([Task(i, 0, 1, 1, "l") for i in range(tasks)], count)
    assert len(chosen_rounds) == min(tasks, count)
    assert max(map(len, chosen_rounds)) - min(map(len, chosen_rounds)) <= 1


@pytest.mark.parametrize(
    ("buffer_sets", "count", "ahead"), [(2, 1, 0), (2, 2, 1), (2, 5, 1), (4, 4, 3), (4, 9, 2), (1, 3, 0)]
)
def test_prefetch_leaves_buffer_sets_for_returns(buffer_sets: int, count: int, ahead: int) -> None:
    assert prefetch(buffer_sets, count) == ahead


def tasks_of(plan: Plan) -> tuple[list[list[Task]], dict[tuple[int, int], int]]:
    """The plan's rounds as tasks, and the owners."""
    groups = list(dict.fromkeys(bucket.group for bucket in plan.buckets))
    dealt: list[list[Task]] = [[] for _ in range(plan.rounds)]
    owners = {}
    for bucket in plan.buckets:
        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True):
            matrix_data, group = plan.matrices[matrix], groups.index(bucket.group)
            dealt[bucket.round].append(Task(matrix, group, matrix_data.flops, matrix_data.numel, ""))
            owners[matrix, group] = owner
    return dealt, owners


def pieces_of(plan: Plan) -> Pieces:
    return Pieces(plan.matrices, Geometries(plan.parameters))


@examples(50)
@given(plans(exchanges=["all_to_all"]))
def test_model_order_follows_the_pass_and_keeps_the_cost_of_every_owner(plan: Plan) -> None:
    pieces, (dealt, owners) = pieces_of(plan), tasks_of(plan)
    ordered, owned = in_model_order(dealt, owners, pieces, {})
    assert sorted(task for tasks in ordered for task in tasks) == sorted(task for tasks in dealt for task in tasks)
    assert owned.keys() == owners.keys()
    for before, after in zip(dealt, ordered, strict=True):
        old, new = (
            Counter((of[task.matrix, task.group], task.group, pieces.kinds[task.matrix], task.flops) for task in tasks)
            for tasks, of in ((before, owners), (after, owned))
        )
        assert old == new, "each owner has as many of each kind in each round as before"
    kinds: dict[tuple[int, int], list[int]] = {}
    for tasks in ordered:
        for task in tasks:
            kinds.setdefault((task.group, pieces.kinds[task.matrix]), []).append(task.matrix)
    for matrices in kinds.values():
        assert matrices == sorted(matrices)


def test_a_matrix_stays_with_possible_owners() -> None:
    plan = plan_of(parameters(4, 4))
    pieces = pieces_of(plan)
    dealt = [[Task(number, 0, 1, 1, "")] for number in (3, 2, 1, 0)]
    owners = {(number, 0): number for number in range(4)}
    candidates = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    ordered, owned = in_model_order(dealt, owners, pieces, candidates)
    assert [tasks[0].matrix for tasks in ordered] == [2, 3, 0, 1]
    assert owned == {(2, 0): 3, (3, 0): 2, (0, 0): 1, (1, 0): 0}
    assert all(rank in candidates[matrix] for (matrix, _), rank in owned.items())


@pytest.mark.parametrize(
    ("matrices", "forward"),
    [
        # An eighth of 16 is two: a round with one of the first two matrices hides nothing, nor do rounds at the same
        # time.
        ([(12, 15), (8, 11), (4, 7), (0, 3)], 0),
        ([(0, 3), (4, 7), (8, 11), (12, 15)], 3),
        ([(0, 9), (2, 15), (3, 4)], 2),
        ([(3, 9), (1, 15), (2, 4)], 0),
        ([(5, 9)], 0),
    ],
)
def test_buckets_without_an_early_matrix_are_hidden(matrices: list[tuple[int, int]], forward: int) -> None:
    assert EARLY * 16 == 2
    bucket = plan_of(parameters(16, 4)).buckets[0]
    buckets: list[Bucket] = [replace(bucket, matrices=of, owners=(0, 1), round=k) for k, of in enumerate(matrices)]
    counts = [ordered_rounds(buckets, overlap) for overlap in get_args(Overlap)]
    assert counts == [0, forward]
