"""The matrices of a bucket, and the timeline compared with a clock for every rank of the executor."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan.test_timeline import FREE
from tests.unit.plans import examples, plan_of, plans, ranks_of, recut
from titan_muon.plan.cost.timeline import timeline
from titan_muon.plan.program import make_program
from titan_muon.plan.search.owners import Task
from titan_muon.plan.search.rounds import rounds
from titan_muon.plan.summary import summarize
from titan_muon.plan.terms.schedule import Act, prefetch
from titan_muon.plan.terms.types import (
    Bucket,
    Interval,
    Layout,
    MatrixRows,
    MatrixStack,
    Mesh,
    Parameter,
    Plan,
    Shard,
)

GATHER, RETURN = "gather", "return"
PRODUCTS = replace(FREE, flops=dict.fromkeys(FREE.flops, 1.0))
"""A machine where nothing but products takes time: a second for each FLOP."""


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


class Clock:
    """Every rank of a plan in Muon.step, with a time of one second per FLOP of Newton-Schulz and zero for all else.

    A wait for a collective ends when the last rank of the group has launched.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = dict.fromkeys(ranks_of(plan), 0)
        self.work = dict.fromkeys(self.now, 0)
        self.launched: dict[tuple[int, str], dict[int, int]] = {}
        self.travels: list[set[str]] = [set() for _ in plan.buckets]
        for rank in self.now:
            mine = [number for number, bucket in enumerate(plan.buckets) if rank in bucket.group]
            travelling = [run for run in make_program(plan, rank).buckets if not run.local]
            for number, run in zip(mine, travelling, strict=True):
                phases = zip((GATHER, RETURN, RETURN), run.phases, strict=False)
                self.travels[number] |= {name for name, phase in phases if phase.travels}

    def run(self) -> int:
        """FLOPs until the last rank is done."""
        running = {rank: self._step(rank) for rank in self.now}
        waiting = {rank: next(steps, None) for rank, steps in running.items()}
        while running:
            ready = [rank for rank, collective in waiting.items() if collective is None or self._complete(collective)]
            assert ready, f"ranks {list(running)} wait for each other"
            for rank in ready:
                collective = waiting.pop(rank)
                if collective is None:
                    del running[rank]
                    continue
                self.now[rank] = max(self.now[rank], *self.launched[collective].values())
                waiting[rank] = next(running[rank], None)
        return max(self.now.values())

    def _complete(self, collective: tuple[int, str]) -> bool:
        return len(self.launched.get(collective, {})) == len(self.plan.buckets[collective[0]].group)

    def _step(self, rank: int) -> Iterator[tuple[int, str]]:
        program = make_program(self.plan, rank)
        buckets = [index for index, bucket in enumerate(self.plan.buckets) if rank in bucket.group]

        def launch(index: int, phase: str) -> None:
            if phase in self.travels[buckets[index]]:
                self.launched.setdefault((buckets[index], phase), {})[rank] = self.now[rank]

        def await_all(index: int, phase: str) -> Iterator[tuple[int, str]]:
            if phase in self.travels[buckets[index]]:
                yield buckets[index], phase

        for act, index in program.acts:
            run = program.buckets[index]
            if act is Act.GATHER and not run.local:
                launch(index, GATHER)
            elif act is Act.ORTHOGONALIZE:
                if not run.local:
                    yield from await_all(index, GATHER)
                for matrix in run.matrices:
                    self._orthogonalize(rank, matrix)
                if not run.local:
                    launch(index, RETURN)
            elif not run.local:
                yield from await_all(index, RETURN)

    def _orthogonalize(self, rank: int, matrix: int) -> None:
        flops = self.plan.matrices[matrix].flops
        self.now[rank] += flops
        self.work[rank] += flops


@examples(100)
@given(plans(exchanges=("all_to_all", "all_gather_reduce_scatter")), st.integers(0, 1000))
def test_a_step_without_link_time_takes_the_executors_waits(plan: Plan, seed: int) -> None:
    """On a machine with a cost only for Newton-Schulz, at one FLOP a second."""
    for candidate in (plan, recut(plan, Random(seed))):
        clock, summary = Clock(candidate), summarize(candidate)
        played, waited = timeline(candidate, PRODUCTS), clock.run()
        # The timeline lets collectives of several groups share the links, and owners of slices wait for each other.
        assert played.last.seconds >= waited * (1 - 1e-9)
        groups = {bucket.group for bucket in candidate.buckets}
        if len(groups) == 1 and not any(matrix.slice for matrix in candidate.matrices):
            assert played.last.seconds == pytest.approx(waited, rel=1e-9)
        assert {cost.rank: cost.ns_flops for cost in summary.ranks} == clock.work
        assert summary.ns_flops_max == max(clock.work.values())


def matrices_of(flops: Sequence[int]) -> Plan:
    """Matrices with the passed FLOPs in rows over two ranks, each in a separate round."""
    stack, layout = (
        MatrixStack(1, (MatrixRows("", (Interval(0, 2),)),)),
        Layout((2, 2), Mesh((2,), (0, 1)), (Shard(0),)),
    )
    plan = plan_of([Parameter(f"{i}", f"{i}", layout, stack) for i in range(len(flops))])
    works = tuple(replace(plan.works[0], flops=count, batch=1) for count in flops)
    matrices = tuple(replace(m, flops=flops[i], work=i) for i, m in enumerate(plan.matrices))
    return replace(plan, matrices=matrices, works=works, buckets=())


def bucket(matrix: int, owner: int) -> Bucket:
    return Bucket("all_to_all", (0, 1), (matrix,), (owner,), matrix)


def seconds(plan: Plan, buckets: Sequence[Bucket], buffer_sets: int) -> float:
    return timeline(replace(plan, buckets=tuple(buckets), buffer_sets=buffer_sets), PRODUCTS).last.seconds


def test_two_buffer_sets_make_ranks_wait_for_the_last_owner() -> None:
    """Buckets of one matrix each, owned in turn. With 2 buffer sets bucket 2 waits for bucket 0, without overlap."""
    plan, buckets = matrices_of([10] * 4), [bucket(i, i % 2) for i in range(4)]
    assert seconds(plan, buckets, 4) == pytest.approx(20)
    assert seconds(plan, buckets, 1) == pytest.approx(40)


def test_a_rank_waits_for_the_returns_into_a_single_buffer_set() -> None:
    """Rank 1's matrices come last: with a single buffer set the idle rank waits for each of rank 0's matrices."""
    assert seconds(matrices_of([30, 30, 1, 1]), [bucket(i, i // 2) for i in range(4)], 1) == pytest.approx(62)


def test_local_work_counts_without_buckets() -> None:
    plan = matrices_of([5, 7])
    assert seconds(replace(plan, local=((0,), (1,))), [], 2) == pytest.approx(7)
