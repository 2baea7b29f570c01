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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import on_all_ranks, on_ranks, run_ranks
from tests.dist.small_params import SECONDS, SHAPES, parameters, placed, set_gradients
from tests.shared import equal, message
from titan_muon import Expert, Hybrid, Muon, clip_grad_norm_
from titan_muon.engine.exchange.agreement import PlanReport, check_reports, report_of
from titan_muon.engine.layout.intervals import Geometries


@on_ranks(4)
def test_a_rank_without_matrices_takes_part_in_every_collective(rank: int) -> None:
    """Ranks 0 and 1 share a matrix, ranks 2 and 3 have none."""
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
    assert sum(on_all_ranks(muon.orthogonalized)) == 1


def built(rank: int, world_size: int, layers: int) -> list[tuple[str, int]]:
    params = [(f"layers.{i}.w", Parameter(placed(torch.ones(16, 24)))) for i in range(layers)]
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


Params, FIRST = dict[str, Parameter], next(iter(SHAPES))


def freeze(rank: int, params: Params, saved: dict[str, Any]) -> None:
    """A parameter that was frozen after the save, and whose states are in the state dict of rank 0."""
    params[FIRST].requires_grad_(False)
    if rank == 1:
        del saved["state"][0]


def in_group(change: Callable[[int, dict[str, Any]], object]) -> Callable[..., object]:
    return lambda rank, params, saved: change(rank, saved["param_groups"][0])


NO_MOMENTUM = "has no momentum_buffer with this optimizer's shape, mesh and placements; "
LOADED: dict[str, tuple[Callable[[int, Params, dict[str, Any]], object], str, bool]] = {
    "another rate": (in_group(lambda rank, group: group.update(lr=0.5)), "", True),
    "fewer iterations": (in_group(lambda rank, group: group.update(ns_steps=3)), "", False),
    "of torch": (in_group(lambda rank, group: group.pop("ns_coefficients")), "groups have no ns_coefficients", True),
    "out of range": (in_group(lambda rank, group: group.update(momentum=0.9 + 0.6 * rank)), "momentum = 1.5 is", True),
    "no momentum": (lambda rank, params, saved: rank and saved["state"][0].pop("momentum_buffer"), NO_MOMENTUM, True),
    "frozen": (freeze, "is frozen, and the state dict has its states on rank 0 and not on rank 1; load one", False),
}
"""Changes of a state dict: the error, and whether the plan stays."""


@on_ranks(2)
def test_a_wrong_state_on_a_rank_is_an_error_on_every_rank_and_a_step_can_follow(rank: int) -> None:
    for name, (change, text, same_plan) in LOADED.items():
        params = parameters()
        muon = Muon(params.items()).build()
        muon.step()
        plan, saved = muon.plan, muon.state_dict()
        momenta = [muon.state[param]["momentum_buffer"].full_tensor().clone() for param in params.values()]
        change(rank, params, saved)
        error = message(partial(muon.load_state_dict, saved))
        assert text in error, name
        assert bool(error) == bool(text), error
        assert (muon.plan is plan) == same_plan, "only another Newton-Schulz iteration needs a new plan"
        assert name != "no momentum" or error.endswith("(on rank 1)")
        if name == "fewer iterations":
            assert [5 * m.flops for m in muon.plan.matrices] == [3 * m.flops for m in plan.matrices]
            kept = [muon.state[param]["momentum_buffer"].full_tensor() for param in params.values()]
            assert equal(momenta, kept)
        if name != "frozen":
            set_gradients(params, 2)
            muon.step()


GROUPS: tuple[tuple[tuple[int, ...], tuple[Any, ...], int], ...] = (
    ((4, 2), (Shard(0), Replicate()), 0),
    ((4, 2), (Shard(0), Shard(1)), 0),
    # Three axes without a group of exactly the sharing ranks.
    ((2, 2, 2), (Replicate(), Shard(0), Shard(1)), 1),
)
"""A mesh, placements, and the new process groups of a Muon, beside those of mesh axes and of the world."""


@on_ranks(8)
def test_a_new_group_has_the_worlds_timeout_and_is_destroyed_with_the_optimizer(rank: int) -> None:
    groups = dist.distributed_c10d._world.pg_map
    for mesh, placements, made in GROUPS:
        whole = torch.ones(16, 24)
        param = Parameter(distribute_tensor(whole, init_device_mesh("cpu", mesh), placements, src_data_rank=None))
        before = len(groups)
        muon = Muon([("w", param)], expert=Expert(replicas="redundant")).build()
        assert len(groups) - before == made
        new = [group._get_backend(torch.device("cpu")).options._timeout for group in muon._agreement._new_groups]
        assert new == [timedelta(seconds=90)] * made
        muon.close()
        assert len(groups) == before


def test_a_tensor_learning_rate_is_compared_by_value() -> None:
    """The text of a tensor contains the device, and the index of the device differs between ranks."""

    def signature(lr: Any) -> Any:
        muon = Muon([("w", Parameter(torch.ones(4, 4)))], lr=lr).build()
        rank = muon.engine.rank
        geometries = Geometries(muon.plan.parameters)
        return report_of(muon.plan, geometries, rank.params, muon._options, muon.param_groups, {}, (0,)).parts

    assert signature(torch.tensor(0.5)) == signature(0.5) != signature(0.25)


def hybrid_trained(process_group: dist.ProcessGroup | None) -> list[Tensor]:
    """Weights of a small model after a step, a save and a load of Hybrid, and the norm of the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24))
    hybrid = Hybrid(model, 0.02, expert=Expert(orthogonalize="reference"), process_group=process_group)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.1)
    norm = clip_grad_norm_(model.parameters(), 1e9, optimizer=hybrid)
    hybrid.step()
    hybrid.check_replicas()
    deepcopy(hybrid).load_state_dict(hybrid.state_dict())
    return [norm, *(param.detach() for param in model.parameters())]


@on_ranks(4)
def test_an_optimizer_of_some_ranks_trains_as_one_process_and_refuses_the_others(rank: int) -> None:
    """Muon of two halves at once: tests/parity."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "fsdp"))["fsdp"]
    single = [dist.new_group([each]) for each in range(4)]
    if rank < 2:
        assert equal(hybrid_trained(pairs.get_group()), hybrid_trained(single[rank]))
    param = Parameter(placed(torch.ones(8, 24), pairs) if rank == 0 else torch.ones(16, 24))
    refused = message(lambda: Muon([("w", param)], process_group=single[0]).build())
    texts = {0: "w: its mesh has ranks [1], which are not in process_group, with ranks [0]; pass"}
    default = "process_group: this rank is not in the group; build the optimizer on"
    assert refused.startswith(texts.get(rank, default))
