"""Agreements between ranks: every rank takes part, no rank waits forever, and a Muon may be of some ranks only."""

from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, named, parameters, placed, set_gradients
from tests.shared import drawn, message, muon_keywords
from titan_muon import Expert, Hybrid, Muon, clip_grad_norm_
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


# A Muon of some ranks alone: one rank, half of the ranks, and two halves with different models


STEPS = 3
SHAPES = ((16, 24), (24, 16), (12, 12))


def tensors(count: int, seed: int) -> list[Tensor]:
    return list(drawn({str(shape): shape for shape in SHAPES[:count]}, seed).values())


def trained(count: int, mesh: DeviceMesh | None, steps: int, **options: Any) -> list[Tensor]:
    """The first matrices of SHAPES, plain or in rows over a mesh, after steps and all collective methods."""

    def placed(tensor: Tensor) -> Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)

    params = [nn.Parameter(placed(tensor)) for tensor in tensors(count, 0)]
    named = [(f"layers.{index}", param) for index, param in enumerate(params)]
    muon = Muon(named, **muon_keywords(lr=0.02, orthogonalize="reference", **options))
    for step in range(1, steps + 1):
        for param, grad in zip(params, tensors(count, step), strict=True):
            param.grad = placed(grad)
        norm = clip_grad_norm_(params, 1e9, optimizer=muon)
        assert float(norm) == pytest.approx(float(torch.cat([g.flatten() for g in tensors(count, step)]).norm()))
        muon.step()
    muon.check_replicas()
    muon.check_last_step()
    copied = deepcopy(muon)
    copied.load_state_dict(muon.state_dict())
    for optimizer in (muon, copied):
        optimizer.set_timeout(timedelta(seconds=30))
        optimizer.close()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in params]


def hybrid_trained(process_group: dist.ProcessGroup | None) -> list[Tensor]:
    """Weights of a small model after a step, a save and a load of Hybrid."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24))
    hybrid = Hybrid(model, 0.02, expert=Expert(orthogonalize="reference"), process_group=process_group)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.1)
    clip_grad_norm_(model.parameters(), 1e9, optimizer=hybrid)
    hybrid.step()
    hybrid.check_replicas()
    copied = deepcopy(hybrid)
    copied.load_state_dict(hybrid.state_dict())
    copied.close()
    hybrid.close()
    return [param.detach() for param in model.parameters()]


def on_four_ranks(rank: int, world_size: int) -> dict[str, Any]:
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "fsdp"))["fsdp"]
    alone, pair = dist.new_group([0]), pairs.get_group()
    results: dict[str, Any] = {}
    if rank == 0:
        # The other ranks do not take part.
        results["alone"] = trained(2, None, STEPS, process_group=alone)
        sharded = DTensor.from_local(torch.ones(8, 24), pairs, [Shard(0)], run_check=False)
        results["refused"] = message(Muon([("w", nn.Parameter(sharded))], process_group=alone).build)
    else:
        results["refused"] = message(lambda: Muon([("w", nn.Parameter(torch.ones(16, 24)))], process_group=alone))
    if rank < 2:
        results["half"] = trained(2, pairs, STEPS, process_group=pair)
        results["replicas"] = trained(2, None, STEPS, process_group=pair)
        results["hybrid"] = hybrid_trained(pair)
    # Both pairs at once. The pairs have different numbers of matrices and of steps.
    results["pair"] = trained(2 + rank // 2, pairs, STEPS + rank // 2, process_group=pair)
    return results


def test_one_rank_half_of_the_ranks_and_two_groups_train_as_one_process() -> None:
    results = run_ranks(on_four_ranks, 4, timeout=SECONDS)
    expected = {case: trained(2, None, STEPS) for case in ("alone", "half", "replicas")}
    expected["hybrid"] = hybrid_trained(None)
    for rank, result in enumerate(results):
        expected["pair"] = trained(2 + rank // 2, None, STEPS + rank // 2)
        for case, wholes in result.items():
            if case != "refused":
                assert all(torch.equal(a, b) for a, b in zip(wholes, expected[case], strict=True)), (rank, case)
    assert [len(result) for result in results] == [6, 5, 2, 2]
    outside = results[0]["refused"]
    assert outside.startswith("w: its mesh has ranks [1], which are not in process_group, with ranks [0]; pass")
    for result in results[1:]:
        assert result["refused"].startswith("process_group: this rank is not in the group; build the optimizer on")
