"""Matrices with several owners: choice, owners and cost."""

from dataclasses import replace

import pytest

from tests.unit.plan.test_timeline import FREE
from tests.unit.plans import SLICING, mesh_of, parameter_of, plan_of, teams
from titan_muon.options import OptionError
from titan_muon.plan.cost.timeline import Clock, timeline
from titan_muon.plan.cost.walk import PlanCost, batches
from titan_muon.plan.program import make_program
from titan_muon.plan.summary import summarize
from titan_muon.plan.terms.machine import MACHINES, Link, MachineRates, Work
from titan_muon.plan.terms.types import Matrix, Parameter, Replicate, Shard, Slice


def parameters(count: int, ranks: int, shape: tuple[int, int] = (64, 32), transposed: bool = False) -> list[Parameter]:
    """Matrices of one shape, in rows over all ranks."""
    entries = [parameter_of(f"layers.{index}.w", shape, mesh_of(ranks), Shard(0)) for index in range(count)]
    return [replace(entry, stack=replace(entry.stack, transposed=transposed)) for entry in entries]


def test_slices_divide_the_flops_without_repeated_work() -> None:
    alone, shared = (plan_of(parameters(1, 4), machine=SLICING, split_over=over) for over in (1, 4))
    assert teams(alone) == []
    assert teams(shared) == [(0, 1, 2, 3)]
    assert [(m.rows, m.cols) for m in shared.matrices] == [(16, 32)] * 4
    assert sum(m.flops for m in shared.matrices) == alone.matrices[0].flops
    assert 4 * summarize(shared).ns_flops_max == summarize(alone).ns_flops_max
    assert summarize(shared).muon_matrices == summarize(shared).orthogonalizations == 1


def test_local_slices_are_not_exchanged() -> None:
    """Rows over as many ranks as owners: a rank stores the slice, and no phase sends bytes."""
    plan = plan_of(parameters(1, 4), machine=SLICING, split_over=4)
    runs = [run for rank in range(4) for run in make_program(plan, rank).buckets]
    assert len(runs) == 4
    assert not any(phase.travels for run in runs for phase in (run.gathering, run.returning) if phase)
    [team] = {work.team for work in plan.works}
    assert team is not None
    assert summarize(plan).collectives_per_step == team.calls
    assert summarize(plan).bytes_sent_max == team.sent


def test_slices_divide_the_longer_side_and_keep_the_learning_rate_of_the_whole() -> None:
    for shape in ((64, 32), (32, 64), (32, 32)):
        for transposed in (False, True):
            plan = plan_of(parameters(1, 2, shape, transposed), machine=SLICING, split_over=2)
            cut = plan.matrices[0]
            assert plan.matrices[1].slice is not None
            assert (cut.rows, cut.cols) == ((32, 32) if shape != (32, 32) else (16, 32))
            assert {plan.out_in(number) for number in (0, 1)} == {shape[::-1] if transposed else shape}


@pytest.mark.parametrize(
    ("machine", "shape"),
    [
        pytest.param(replace(SLICING, node=replace(SLICING.node, bandwidth=1e-3)), (64, 32), id="slow links"),
        pytest.param(replace(SLICING, ranks_per_node=1), (64, 32), id="one rank a node"),
        pytest.param(SLICING, (63, 31), id="sides that do not divide"),
    ],
)
def test_a_matrix_without_a_gain_from_slices_stays_whole(machine: MachineRates, shape: tuple[int, int]) -> None:
    plan = plan_of(parameters(1, 4, shape), machine=machine, split_over=8)
    assert teams(plan) == []
    assert len(plan.matrices) == 1


def test_slices_are_found_where_a_few_ranks_have_two_large_matrices() -> None:
    """10 of the 80 layers of Llama 3 70B on 64 of 512 ranks: 70 matrices, of which 30 set the end of the step."""
    shapes = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (8192, 28672), (28672, 8192)]
    [by_shape] = zip(*(parameters(1, 64, shape) for shape in shapes), strict=True)
    layers = [replace(p, fqn=f"layers.{i}.{j}") for i in range(10) for j, p in enumerate(by_shape)]
    whole, sliced = (plan_of(layers, split_over=over) for over in (1, 8))
    assert len(teams(sliced)) >= 30
    machine = MACHINES["h100x8"]
    assert timeline(sliced, machine).last.seconds < 0.85 * timeline(whole, machine).last.seconds


def test_the_owners_of_a_sliced_matrix_share_a_node() -> None:
    plan = plan_of(parameters(4, 8), machine=replace(SLICING, ranks_per_node=2), split_over=8)
    assert teams(plan)
    assert all(len({rank // 2 for rank in team}) == 1 for team in teams(plan))


def test_split_over_limits_the_ranks_of_a_sliced_matrix() -> None:
    assert {len(team) for team in teams(plan_of(parameters(1, 8), machine=SLICING, split_over=4))} == {4}


def test_redundant_replicas_have_whole_matrices() -> None:
    matrix = parameter_of("w", (64, 32), mesh_of(2, 2), Replicate(), Shard(0))
    assert teams(plan_of([matrix], machine=SLICING, split_over=4, replicas="redundant")) == []


@pytest.mark.parametrize(
    "options",
    [{"orthogonalize": "reference"}, {"exchange": "all_gather"}],
    ids=str,
)
def test_slices_are_refused_without_an_exchange_between_owners(options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"^split_over = 2: .*, or split_over = 1$"):
        plan_of(parameters(1, 4), split_over=2, **options)
    assert plan_of(parameters(1, 4), split_over=1, **options).matrices
    automatic = plan_of(parameters(1, 4), machine=SLICING, split_over="auto", **options)
    assert teams(automatic) == []
    assert "no matrix in slices: " in automatic.reason


@pytest.mark.parametrize(("beside", "cut"), [(0, True), (25, False)])
def test_automatic_slices_must_save_3_percent_of_the_step(beside: int, cut: bool) -> None:
    """A matrix on only one of two ranks, after `beside` matrices on each."""
    matrices = parameters(2 * beside + 1, 2)
    assert teams(plan_of(matrices, machine=SLICING, split_over=2)), "a gain of 2 % is one"
    plan = plan_of(matrices, machine=SLICING, split_over="auto")
    assert bool(teams(plan)) == cut
    assert ("none would save 3% of the step" in plan.reason) != cut


def test_modelled_slices_count_flops_and_node_traffic() -> None:
    plan = plan_of(parameters(1, 2), machine=SLICING, split_over=2)
    [work] = plan.works
    assert work.team is not None
    assert timeline(plan, replace(FREE, flops={"bfloat16": work.flops})).last.seconds == pytest.approx(1)
    sent = timeline(plan, replace(FREE, node=Link(work.team.sent, 0))).last.orthogonalize
    assert sent == pytest.approx(1)
    called = timeline(plan, replace(FREE, node=Link(1e30, 1))).last.orthogonalize
    assert called == pytest.approx(work.team.calls)


def test_slices_start_when_the_last_owner_is_ready() -> None:
    """Rank 1 has 1 s of local work; rank 0's remaining work follows."""
    cost = PlanCost.from_plan(plan_of(parameters(1, 2), machine=SLICING, split_over=2), FREE)
    [bucket] = cost.buckets
    shares = [
        share._replace(
            owned=share.owned._replace(seconds=seconds), pack=0.0, copies=0.0, apply=0.0, gather=0.0, back=0.0
        )
        for share, seconds in zip(bucket.shares, (1.5, 1.0), strict=True)
    ]
    cost.local = [share._replace(pack=seconds) for share, seconds in zip(cost.local, (0.0, 1.0), strict=True)]
    for owners, ends in (((), [1.5, 2.0]), ((((0, 1), 1.0),), [2.5, 2.0])):
        cost.buckets = [bucket._replace(shares=tuple(shares), teams=owners)]
        assert Clock(cost, 1).now == pytest.approx(ends)


def test_owners_compute_slices_first_and_in_the_same_order() -> None:
    """A different order would deadlock; an order after whole matrices would take longer."""
    whole = Matrix(0, 0, 8, 8, 1)
    first, second = (replace(whole, work=1, slice=Slice(place, 2, True)) for place in (1, 0))
    matrices = [whole, first, second, whole]
    works = [Work("whole", 1, batch=8), Work("sliced", 1, batch=8)]
    assert batches((3, 2, 0, 1), matrices, works) == ((1,), (2,), (3, 0))
    assert batches((1, 2), matrices, works) == batches((2, 1), matrices, works) == ((1,), (2,))


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (8, [8]), (9, [5, 4]), (16, [8, 8]), (17, [6, 6, 5])])
def test_batches_are_even_and_as_few_as_the_limit_allows(count: int, sizes: list[int]) -> None:
    matrices, works = [Matrix(0, place, 8, 8, 1) for place in range(count)], [Work("whole", 1, batch=8)]
    assert [len(batch) for batch in batches(range(count), matrices, works)] == sizes
