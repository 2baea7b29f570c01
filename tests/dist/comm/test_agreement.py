"""Agreements between ranks before a step and at a load: every rank takes part, and no rank waits forever."""

from datetime import timedelta
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
from tests.reference_muon import ReferenceMuon
from titan_muon import Muon
from titan_muon.comm.agreement import PlanReport, check_reports
from titan_muon.engine import report_of
from titan_muon.plan.terms.layout import Geometries


def some_without_matrices(rank: int, world_size: int) -> tuple[bool, int]:
    """Ranks 0 and 1 share a matrix, ranks 2 and 3 have none. Returns whether the step equals the reference, and the
    number of orthogonalized matrices."""
    mesh = DeviceMesh("cpu", [0, 1])
    whole = [torch.randn(16, 24, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    reference = ReferenceMuon({"w": whole[0].clone()})
    reference.step({"w": whole[1]})
    params = []
    if rank < 2:
        params = [("w", Parameter(placed(whole[0], mesh)))]
        params[0][1].grad = placed(whole[1], mesh)
    muon = Muon(params, lr=0.02, orthogonalize="reference").build()
    muon.step()
    orthogonalized = muon.orthogonalized
    # A fresh optimizer continues from the state, which is empty without matrices.
    fresh = Muon(params, lr=0.02, orthogonalize="reference")
    fresh.load_state_dict(muon.state_dict())
    fresh.step()
    reference.step({"w": whole[1]})
    return all(torch.equal(p.to_local(), reference.params["w"].chunk(2)[rank]) for _, p in params), orthogonalized


def test_a_rank_without_matrices_takes_part_in_every_collective() -> None:
    results = run_ranks(some_without_matrices, 4, timeout=SECONDS)
    assert [same for same, _ in results] == [True] * 4
    assert sum(done for _, done in results) == 1


def none_at_all(rank: int, world_size: int) -> str:
    try:
        Muon([]).build()
    except ValueError as error:
        return str(error)
    return ""


def test_a_world_without_matrices_is_refused_on_every_rank() -> None:
    assert all("no parameter to train" in text for text in run_ranks(none_at_all, 2, timeout=SECONDS))


def payload_of_construction(rank: int, world_size: int, layers: int) -> int:
    mesh = init_device_mesh("cpu", (world_size,))
    params = [(f"layers.{i}.w", Parameter(placed(torch.ones(16, 24), mesh))) for i in range(layers)]
    with CollectiveCounter() as counter:
        Muon(params).build()
    return sum(call.payload for call in counter.calls)


def test_the_comparison_at_construction_does_not_grow_with_the_plan() -> None:
    assert run_ranks(payload_of_construction, 2, 2, timeout=SECONDS) == run_ranks(
        payload_of_construction, 2, 40, timeout=SECONDS
    )


def test_equal_reports_of_a_thousand_ranks_are_compared_once() -> None:
    """Sixteen pipeline stages of 64 ranks, and a single differing rank."""
    reports, digests = {}, []
    for stage in range(16):
        ranks = tuple(range(64 * stage, 64 * stage + 64))
        report = PlanReport(
            ranks=ranks, buckets=(ranks,), groups=(ranks,), sharing=(ranks,), parts=(("plan", str(stage)),)
        )
        reports[report.digest()] = report
        digests += [report.digest()] * 64
    check_reports(dict(enumerate(digests)), reports)
    digests[70] = digests[0]
    with pytest.raises(ValueError, match=r"ranks \[70\] planned another Muon step than rank 64"):
        check_reports(dict(enumerate(digests)), reports)


def load(rank: int, world_size: int, change: str) -> tuple[str, int, bool]:
    """The error of a load with a bad rank, the number of plans, and whether a step can follow."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = parameters(mesh)
    muon = Muon(named(params)).build()
    set_gradients(params, mesh, 1)
    muon.step()
    state: dict[str, Any] = muon.state_dict()
    plan = muon.plan
    if change == "ns_steps":
        state["param_groups"][0]["ns_steps"] = 3
    elif change == "lr":
        state["param_groups"][0]["lr"] = 0.5
    elif change == "torch":
        for name in ("adjust_lr_fn", "ns_coefficients"):
            state["param_groups"][0].pop(name, None)
    elif change == "range" and rank == 1:
        state["param_groups"][0]["momentum"] = 1.5
    elif change == "momentum" and rank == 1:
        del state["state"][0]["momentum_buffer"]
    error = ""
    try:
        muon.load_state_dict(state)
    except ValueError as raised:
        error = str(raised)
    set_gradients(params, mesh, 2)
    muon.step()
    return error, muon.param_groups[0]["ns_steps"], muon.plan is plan


def test_a_wrong_state_on_a_rank_is_an_error_on_every_rank() -> None:
    for error, _, same_plan in run_ranks(load, 2, "momentum", timeout=SECONDS):
        assert "has no momentum_buffer with this optimizer's shape, mesh and placements; " in error
        assert error.endswith("(on rank 1)")
        assert same_plan


def test_a_value_out_of_range_in_a_ranks_state_is_an_error_on_every_rank() -> None:
    for error, _, _ in run_ranks(load, 2, "range", timeout=SECONDS):
        assert "momentum = 1.5 is not accepted" in error


def test_another_optimizers_state_is_refused_with_the_missing_key() -> None:
    for error, _, _ in run_ranks(load, 2, "torch", timeout=SECONDS):
        assert "of another optimizer: its groups have no ns_coefficients, adjust_lr_fn" in error


def test_a_load_plans_again_only_if_newton_schulz_changed() -> None:
    assert run_ranks(load, 2, "lr", timeout=SECONDS) == [("", 5, True)] * 2
    assert run_ranks(load, 2, "ns_steps", timeout=SECONDS) == [("", 3, False)] * 2


def loaded_momentum(rank: int, world_size: int) -> bool:
    """Whether the step after a load starts from the loaded momentum and sees changes of the scheduler."""
    mesh = init_device_mesh("cpu", (world_size,))
    params, other = parameters(mesh), parameters(mesh)
    muon, fresh = Muon(named(params)).build(), Muon(named(other)).build()
    for step in (1, 2):
        set_gradients(params, mesh, step)
        muon.step()
    for param, copy in zip(params.values(), other.values(), strict=True):
        copy.data.copy_(param.data)
    fresh.load_state_dict(muon.state_dict())
    for optimizer, trained in ((muon, params), (fresh, other)):
        optimizer.param_groups[0]["lr"] = 0.5
        set_gradients(trained, mesh, 3)
        optimizer.step()
    return all(torch.equal(params[name].to_local(), other[name].to_local()) for name in params)


def test_a_loaded_optimizer_continues_with_the_saved_momentum() -> None:
    assert run_ranks(loaded_momentum, 2, timeout=SECONDS) == [True] * 2


def groups_made(rank: int, world_size: int, joint: bool) -> tuple[int, int, bool]:
    """Process groups made by a Muon and left after close, and whether the groups have the world's timeout."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = (Shard(0), Shard(1)) if joint else (Shard(0), Replicate())
    param = Parameter(distribute_tensor(torch.ones(16, 24), mesh, placements, src_data_rank=None))
    before = len(dist.distributed_c10d._world.pg_map)
    muon = Muon([("w", param)], replicas="redundant").build()
    made = len(dist.distributed_c10d._world.pg_map) - before
    param.grad = distribute_tensor(torch.ones(16, 24), mesh, placements, src_data_rank=None)
    muon.step()
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in muon._agreement._new_groups}
    muon.close()
    left = len(dist.distributed_c10d._world.pg_map) - before
    return made, left, timeouts <= {timedelta(seconds=60)}


@pytest.mark.parametrize("joint", [False, True])
def test_buckets_reuse_the_groups_of_mesh_axes_and_of_the_world(joint: bool) -> None:
    assert run_ranks(groups_made, 4, joint, timeout=SECONDS) == [(0, 0, True)] * 4


def own_group(rank: int, world_size: int) -> tuple[int, int, bool]:
    """Like `groups_made`, for three axes without a group of exactly the sharing ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 2))
    param = Parameter(
        distribute_tensor(torch.ones(16, 24), mesh, (Replicate(), Shard(0), Shard(1)), src_data_rank=None)
    )
    before = len(dist.distributed_c10d._world.pg_map)
    muon = Muon([("w", param)], replicas="redundant").build()
    made = len(dist.distributed_c10d._world.pg_map) - before
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in muon._agreement._new_groups}
    muon.set_timeout(timedelta(seconds=7))
    changed = {group._get_backend(torch.device("cpu")).options._timeout for group in muon._agreement._new_groups}
    muon.close()
    left = len(dist.distributed_c10d._world.pg_map) - before
    return made, left, timeouts == {timedelta(seconds=60)} and changed == {timedelta(seconds=7)}


def test_a_new_group_has_the_worlds_timeout_and_is_destroyed_with_the_optimizer() -> None:
    assert run_ranks(own_group, 8, timeout=SECONDS) == [(1, 0, True)] * 8


def opened(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    param = Parameter(placed(torch.ones(16, 24), mesh))
    with CollectiveCounter() as counter:
        muon = Muon([("w", param)]).build()
    muon.engine.rank.buffers.memory.take()
    muon.exchange.warm_up(muon.plan)
    return [call.name for call in counter.calls]


def test_connections_are_opened_at_construction() -> None:
    """The CPU sends an element to every rank; other devices connect by the exchange."""
    for names in run_ranks(opened, 2, timeout=SECONDS):
        assert any("alltoall" in name for name in names)


def test_a_tensor_learning_rate_is_compared_by_value() -> None:
    """The text of a tensor contains the device, and the index of the device differs between ranks."""

    def signature(lr: Any) -> str:
        muon = Muon([("w", Parameter(torch.ones(4, 4)))], lr=lr).build()
        rank = muon.engine.rank
        geometries = Geometries(muon.plan.parameters)
        return report_of(muon.plan, geometries, rank.params, muon._options, muon.param_groups, {}, (0,)).parts

    assert signature(torch.tensor(0.5)) == signature(0.5) != signature(0.25)


def test_a_step_ignores_the_users_default_device() -> None:
    param = Parameter(torch.ones(4, 4))
    param.grad = torch.ones(4, 4)
    with torch.device("meta"):
        Muon([("w", param)]).build().step()
    assert not torch.equal(param.detach(), torch.ones(4, 4))
