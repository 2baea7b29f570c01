"""A Muon of some ranks alone: one rank, half of the ranks, and two halves with different models."""

from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.shared import drawn, message, muon_keywords
from titan_muon import Expert, Hybrid, Muon, clip_grad_norm_

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
