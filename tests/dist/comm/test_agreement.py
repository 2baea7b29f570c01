"""Agreements between ranks before a step and at a load: every rank takes part, and no rank waits forever."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, named, parameters, placed, set_gradients
from tests.shared import message
from titan_muon import Expert, Muon
from titan_muon.engine.engine import report_of
from titan_muon.engine.exchange.agreement import PlanReport, check_reports
from titan_muon.engine.layout.intervals import Geometries


def some_without_matrices(rank: int, world_size: int) -> int:
    """Ranks 0 and 1 share a matrix, ranks 2 and 3 have none. Returns the number of orthogonalized matrices."""
    mesh = DeviceMesh("cpu", [0, 1])
    params = [("w", Parameter(placed(torch.ones(16, 24), mesh)))] if rank < 2 else []
    for _, param in params:
        param.grad = placed(torch.ones(16, 24), mesh)
    muon = Muon(params).build()
    muon.step()
    # A fresh optimizer continues from the state, which is empty without matrices.
    fresh, saved = Muon(params), muon.state_dict()
    assert "momentum" in message(lambda: fresh.load_state_dict({**saved, "state": {key: {} for key in saved["state"]}}))
    fresh.load_state_dict(saved)
    fresh.step()
    fresh.check_replicas()
    fresh.check_last_step()
    return muon.orthogonalized


def test_a_rank_without_matrices_takes_part_in_every_collective() -> None:
    assert sum(run_ranks(some_without_matrices, 4, timeout=SECONDS)) == 1


def built(rank: int, world_size: int, layers: int) -> list[tuple[str, int]]:
    """The collectives of a construction."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = [(f"layers.{i}.w", Parameter(placed(torch.ones(16, 24), mesh))) for i in range(layers)]
    with CollectiveCounter() as counter:
        muon = Muon(params).build()
    muon.engine.rank.buffers.memory.take()
    muon.exchange.warm_up(muon.plan)
    return [(call.name, call.payload) for call in counter.calls]


def test_a_construction_opens_connections_and_compares_plans_of_any_size_by_the_same_bytes() -> None:
    few, many = (run_ranks(built, 2, layers, timeout=SECONDS) for layers in (2, 40))
    assert few == many
    assert all(any("alltoall" in name for name, _ in calls) for calls in few)


def test_equal_reports_of_a_thousand_ranks_are_compared_once() -> None:
    """Sixteen pipeline stages of 64 ranks, and a single differing rank."""
    reports = {}
    for stage in range(16):
        ranks = tuple(range(64 * stage, 64 * stage + 64))
        report = PlanReport(ranks, (ranks,), (ranks,), sharing=(ranks,), parts=(("plan", str(stage)),))
        reports |= dict.fromkeys(ranks, report)
    check_reports(reports)
    with pytest.raises(ValueError, match=r"ranks \[70\] planned another Muon step than rank 64"):
        check_reports(reports | {70: reports[0]})


NO_MOMENTUM = "has no momentum_buffer with this optimizer's shape, mesh and placements; "
LOADED: dict[str, tuple[Callable[[int, dict[str, Any], dict[str, Any]], object], str, bool]] = {
    "another rate": (lambda rank, group, states: group.update(lr=0.5), "", True),
    "fewer iterations": (lambda rank, group, states: group.update(ns_steps=3), "", False),
    "of torch": (lambda rank, group, states: group.pop("ns_coefficients"), "groups have no ns_coefficients", True),
    "out of range": (
        lambda rank, group, states: group.update(momentum=(0.9, 1.5)[rank]),
        "momentum = 1.5 is not",
        True,
    ),
    "no momentum": (lambda rank, group, states: rank == 0 or states.pop("momentum_buffer"), NO_MOMENTUM, True),
}
"""Changes of a group and of a parameter's states: the error, and whether the plan stays."""


def load_each(rank: int, world_size: int) -> dict[str, tuple[str, bool]]:
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    for name, (change, _, _) in LOADED.items():
        params = parameters(mesh)
        muon = Muon(named(params)).build()
        muon.step()
        plan, state = muon.plan, muon.state_dict()
        change(rank, state["param_groups"][0], state["state"][0])
        found[name] = message(partial(muon.load_state_dict, state)), muon.plan is plan
        set_gradients(params, mesh, 2)
        muon.step()
    return found


def test_a_wrong_state_on_a_rank_is_an_error_on_every_rank_and_a_step_can_follow() -> None:
    for found in run_ranks(load_each, 2, timeout=SECONDS):
        for name, (_, text, same_plan) in LOADED.items():
            error, stayed = found[name]
            assert text in error
            assert bool(error) == bool(text)
            assert stayed == same_plan, "only another Newton-Schulz iteration needs a new plan"
        assert found["no momentum"][0].endswith("(on rank 1)")


def timeouts(muon: Muon) -> set[timedelta]:
    return {group._get_backend(torch.device("cpu")).options._timeout for group in muon._agreement._new_groups}


def groups_made(rank: int, world_size: int, mesh: tuple[int, ...], placements: Any) -> tuple[int, int, Any]:
    """Process groups made by a Muon, those left after close, and timeouts before and after a change."""
    devices = init_device_mesh("cpu", mesh)
    param = Parameter(distribute_tensor(torch.ones(16, 24), devices, placements, src_data_rank=None))
    before = len(dist.distributed_c10d._world.pg_map)
    muon = Muon([("w", param)], expert=Expert(replicas="redundant")).build()
    made, first = len(dist.distributed_c10d._world.pg_map) - before, timeouts(muon)
    muon.set_timeout(timedelta(seconds=7))
    changed = timeouts(muon)
    muon.close()
    return made, len(dist.distributed_c10d._world.pg_map) - before, (first, changed)


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Shard(0), Shard(1))], ids=str)
def test_buckets_reuse_the_groups_of_mesh_axes_and_of_the_world(placements: Any) -> None:
    assert run_ranks(groups_made, 4, (2, 2), placements, timeout=SECONDS) == [(0, 0, (set(), set()))] * 4


def test_a_new_group_has_the_worlds_timeout_and_is_destroyed_with_the_optimizer() -> None:
    """For three axes without a group of exactly the sharing ranks."""
    expected = 1, 0, ({timedelta(seconds=90)}, {timedelta(seconds=7)})
    assert run_ranks(groups_made, 8, (2, 2, 2), (Replicate(), Shard(0), Shard(1)), timeout=SECONDS) == [expected] * 8


def test_a_tensor_learning_rate_is_compared_by_value() -> None:
    """The text of a tensor contains the device, and the index of the device differs between ranks."""

    def signature(lr: Any) -> Any:
        muon = Muon([("w", Parameter(torch.ones(4, 4)))], lr=lr).build()
        rank = muon.engine.rank
        geometries = Geometries(muon.plan.parameters)
        return report_of(muon.plan, geometries, rank.params, muon._options, muon.param_groups, {}, (0,)).parts

    assert signature(torch.tensor(0.5)) == signature(0.5) != signature(0.25)
