"""Owners: balanced by FLOPs within a soft cap on bytes, the same on every rank."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plans import examples, mesh_of, parameter_of
from titan_muon.engine.layout.types import Shard
from titan_muon.engine.layout.work import Work
from titan_muon.engine.planning import OwnerOf, Task
from titan_muon.options import MuonOptions
from titan_muon.planner.owners import BYTES_OVER_MEAN, STRATEGIES, Assign, balanced
from titan_muon.planner.planner import make_plan

GROUP = ((0, 1, 2, 3),)


def tasks_of(flops: list[int], group: int = 0, per_layer: int = 1) -> list[Task]:
    return [Task(i, group, f, f, f"layers.{i // per_layer}") for i, f in enumerate(flops)]


def loads(owners: OwnerOf, tasks: list[Task], load: dict[int, int] | None = None) -> Counter[int]:
    total = Counter(load or {})
    for task in tasks:
        total[owners[task.matrix, task.group]] += task.flops
    return total


@examples(100)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 12))
def test_balanced_is_within_four_thirds_of_the_best(flops: list[int], ranks: int) -> None:
    """Graham's bound, against max(mean, largest, two of the ranks + 1 largest), a lower bound of the optimum."""
    tasks = tasks_of(flops)
    path = max(loads(balanced(tasks, [tuple(range(ranks))], {}), tasks).values())
    ordered = sorted(flops, reverse=True)
    pair = ordered[ranks - 1] + ordered[ranks] if len(flops) > ranks else 0
    mean = -(-sum(flops) // ranks)
    assert path <= 4 / 3 * max(mean, ordered[0], pair) + ordered[0]
    if len(flops) <= ranks:
        assert path == ordered[0]


@examples(75)
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=60), st.integers(1, 8))
def test_bytes_stay_below_the_cap_unless_every_rank_is_full(sizes: list[tuple[int, int]], ranks: int) -> None:
    tasks = [Task(i, 0, flops, bytes_, "l") for i, (flops, bytes_) in enumerate(sizes)]
    owners = balanced(tasks, [tuple(range(ranks))], {})
    mean, largest = sum(b for _, b in sizes) / ranks, max(b for _, b in sizes)
    held = Counter[int]()
    for task in tasks:
        held[owners[task.matrix, 0]] += task.bytes
    cap = max(BYTES_OVER_MEAN * mean, largest)
    # Once all ranks are at the cap, FLOPs alone decide.
    if max(held.values()) > cap:
        assert all(held[rank] + largest > cap for rank in range(ranks))


@pytest.mark.parametrize("assign", STRATEGIES)
def test_every_matrix_has_a_single_owner_in_the_group(assign: Assign) -> None:
    groups = ((0, 1, 2, 3), (0, 2), (1, 3))
    tasks = [Task(i, i % 3, 10 + i, 10 + i, f"layers.{i // 4}") for i in range(40)]
    owners = assign(tasks, groups, {})
    assert set(owners) == {(task.matrix, task.group) for task in tasks}
    assert all(owner in groups[group] for (_, group), owner in owners.items())


def test_a_large_group_evens_out_a_small_group() -> None:
    """Ranks 0 and 1 alone can own the experts; the dense matrices then go to ranks 2 and 3."""
    groups = ((0, 1, 2, 3), (0, 1))
    tasks = [*(Task(i, 0, 10, 10, "d") for i in range(4)), *(Task(i, 1, 10, 10, "e") for i in range(4, 8))]
    owners = balanced(tasks, groups, {})
    assert max(loads(owners, tasks).values()) == 20


def test_matrices_of_a_layer_are_spread() -> None:
    """4 identical layers of 4 matrices over 4 ranks: each rank owns one matrix of each layer."""
    tasks = tasks_of([400, 300, 200, 100] * 4, per_layer=4)
    owners = balanced(tasks, GROUP, {})
    assert len({(task.layer, owners[task.matrix, 0]) for task in tasks}) == len(tasks)


def test_the_states_of_matrices_spread_over_the_ranks() -> None:
    """Two matrices have large states and little work. By FLOPs alone one rank would own both."""
    mesh = mesh_of(2)
    shapes = {"large": (512, 512), "stateful.0": (64, 64), "stateful.1": (64, 64)}
    parameters = [parameter_of(name, shape, mesh, Shard(0)) for name, shape in shapes.items()]
    holders = []
    for size in (0, 10**8):

        def work_of(parameter: int, rows: int, cols: int, size: int = size) -> Work:
            return Work("soap", flops=rows * cols * cols, bytes=1, state_bytes=size if parameter else 0)

        plan = make_plan(parameters, work_of, MuonOptions())
        owner = {m: o for bucket in plan.buckets for m, o in zip(bucket.matrices, bucket.owners, strict=True)}
        holders.append(len({owner[1], owner[2]}))
    assert holders == [1, 2]
