"""With owned matrices an optimizer step communicates nothing, and the passes no more than FSDP2's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.c10d_counter import Call, CollectiveCounter
from benchmarks.owned_model import Net, Setup, data_mesh, loss_of, make, matrices, place, summed_plainly
from tests.dist.harness import run_ranks
from titan_muon import Muon
from titan_muon.owned import gather, is_owned
from titan_muon.owned.param import peer_elements

MUON = {"lr": 0.02, "weight_decay": 0.1}
STEPS = 3


@dataclass(frozen=True)
class Step:
    """An optimizer step on a rank: collectives, orthogonalized matrices, and parameters different from torch."""

    calls: list[Call]
    matrices: int
    different: list[str]


def with_experts(model: Net, mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """Stacks of experts beside a model, whole on the ranks of `mesh`: as under expert parallelism."""
    placements = [Replicate(), Shard(0)][-mesh.ndim :]
    stacks = {}
    for index in range(2):
        full = torch.randn(4, 12, 20, generator=torch.Generator().manual_seed(index))
        stacks[f"layers.{index}.experts"] = nn.Parameter(distribute_tensor(full, mesh, placements, src_data_rank=None))
    return stacks


def set_gradients(params: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    """Give owned parameters equal gradients on every holder. Returns whole gradients."""
    whole = {}
    for index, (name, parameter) in enumerate(params.items()):
        full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + index))
        whole[name] = full
        if not is_owned(parameter):
            parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        elif parameter.to_local().numel() > 0:
            parameter.grad = torch.empty_like(parameter).copy_(
                distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            )
    return whole


def steps(rank: int, world_size: int, setup: Setup, experts: bool) -> list[Step]:
    """Steps of Muon on owned parameters and of torch.optim.Muon on whole parameters, with equal gradients."""
    model = make()
    mesh = data_mesh(world_size, setup, model)
    place(model, setup, mesh)
    params = {name: p for name, p in model.named_parameters() if any(p is m for m in matrices(model))}
    stacks = with_experts(model, mesh) if experts else {}
    named = {**params, **stacks}
    replicas = "redundant" if setup.replicas > 1 else "split"
    optimizer = Muon(named.items(), orthogonalize="reference", replicas=replicas, idle="hold", **MUON).build()
    reference = {name: nn.Parameter(gather(p)) for name, p in named.items()}
    loose = {name: list(p.detach()) if p.ndim == 3 else [p.detach()] for name, p in reference.items()}
    alone = torch.optim.Muon(
        [nn.Parameter(m) for ms in loose.values() for m in ms], adjust_lr_fn="match_rms_adamw", **MUON
    )
    results = []
    for step in range(STEPS):
        gradients = set_gradients(named, step)
        flat = [m for g in gradients.values() for m in (g if g.ndim == 3 else [g])]
        for parameter, gradient in zip(alone.param_groups[0]["params"], flat, strict=True):
            parameter.grad = gradient
        with CollectiveCounter() as counter:
            optimizer.step()
        alone.step()
        pieces = iter(alone.param_groups[0]["params"])
        whole = {name: torch.stack([next(pieces) for _ in ms]).detach() for name, ms in loose.items()}
        results.append(
            Step(
                counter.calls,
                optimizer.orthogonalized,
                [name for name, p in named.items() if not torch.equal(gather(p), whole[name].view(p.shape))],
            )
        )
    return results


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_a_step_starts_no_collective_and_equals_torchs_muon_bit_for_bit(
    world_size: int, replicas: int, experts: bool
) -> None:
    ranks = run_ranks(steps, world_size, Setup("owned", replicas=replicas), experts)
    for steps_of_rank in ranks:
        for step in steps_of_rank:
            assert step.calls == []
            assert step.different == []
    matrices_in_all = 18 + (8 if experts else 0)
    assert sum(steps_of_rank[0].matrices for steps_of_rank in ranks) == matrices_in_all * replicas


@pytest.mark.parametrize("tensor", [2])
def test_a_step_communicates_only_within_tensor_parallel_groups(tensor: int) -> None:
    """Bytes and groups: only ranks of a tensor-parallel group communicate."""
    for steps_of_rank in run_ranks(steps, 4, Setup("owned", tensor=tensor), False):
        for step in steps_of_rank:
            assert step.different == []
            assert {call.group_size for call in step.calls} == {tensor}


def held(rank: int, world_size: int, setup: Setup) -> int:
    """Elements of matrices at rest on this rank."""
    model = make()
    place(model, setup, data_mesh(world_size, setup, model))
    return sum(p.to_local().numel() for p in matrices(model))  # type: ignore[operator]


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_a_step_with_whole_tensor_parallel_matrices_starts_no_collective(world_size: int, replicas: int) -> None:
    """Every replica stores each matrix once, and the holder orthogonalizes."""
    setup = Setup("owned", replicas=replicas, tensor=2, tensor_parallel="whole")
    ranks = run_ranks(steps, world_size, setup, False)
    for steps_of_rank in ranks:
        for step in steps_of_rank:
            assert step.calls == []
            assert step.different == []
    assert sum(steps_of_rank[0].matrices for steps_of_rank in ranks) == 18 * replicas
    assert all(steps_of_rank[0].matrices > 0 for steps_of_rank in ranks)
    assert sum(run_ranks(held, world_size, setup)) == sum(p.numel() for p in matrices(make())) * replicas


def passes(rank: int, world_size: int, setup: Setup) -> tuple[int, int, int]:
    """Bytes sent by this rank in forward and backward of the second step, and Owners' count."""
    model = make(dim=64, hidden=192)
    owners = place(model, setup, data_mesh(world_size, setup, model))
    loss_of(model, rank, world_size, 0).backward()
    before = 0 if owners is None else owners.traffic.bytes_sent
    with CollectiveCounter() as forward:
        loss = loss_of(model, rank, world_size, 1)
    with CollectiveCounter() as backward:
        loss.backward()
    counted_bytes = 0 if owners is None else owners.traffic.bytes_sent - before
    return forward.sent, backward.sent, counted_bytes


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("reshard", [True, False])
def test_forward_and_backward_move_no_more_than_fsdp(world_size: int, reshard: bool) -> None:
    """Over all ranks; FSDP2 pads its shards."""
    setup = Setup("owned", reshard=reshard)
    ours = run_ranks(passes, world_size, setup)
    theirs = run_ranks(passes, world_size, replace(setup, placement="sharded"))
    for phase in (0, 1):
        assert sum(sent[phase] for sent in ours) <= 1.02 * sum(sent[phase] for sent in theirs)
    assert 0 < sum(sent[2] for sent in ours) <= sum(sent[0] + sent[1] for sent in ours)


def sent_to_peers(rank: int, world_size: int) -> tuple[int, int, int]:
    """Bytes sent to peers in forward and in backward, and the elements of the dry run."""
    model = make()
    setup = Setup("owned", reshard=False, tensor=2, tensor_parallel="whole")
    owners = place(model, setup, data_mesh(world_size, setup, model))
    assert owners is not None, "the matrices are owned"
    loss = loss_of(model, 0, 1, 0)
    forward = owners.traffic.bytes_sent
    loss.backward()
    elements = sum(peer_elements(p).get(rank, 0) for p in matrices(model) if isinstance(p, DTensor))
    return forward, owners.traffic.bytes_sent - forward, elements


def test_holders_send_the_dry_runs_bytes_to_tensor_parallel_peers() -> None:
    """Half of each matrix goes to the other rank in forward, and the gradient returns in backward."""
    ranks = run_ranks(sent_to_peers, 2)
    for (forward, _, elements), (_, backward, _) in zip(ranks, ranks[::-1], strict=True):
        assert forward == backward == 4 * elements > 0
    assert sum(elements for *_, elements in ranks) == sum(p.numel() for p in matrices(make())) / 2


def replicated(rank: int, world_size: int) -> tuple[int, int]:
    """Calls of a step with work split over replicas, and matrices orthogonalized."""
    model = make()
    setup = Setup("owned", replicas=2)
    place(model, setup, data_mesh(world_size, setup, model))
    named = {name: p for name, p in model.named_parameters() if is_owned(p)}
    optimizer = Muon(named.items(), replicas="split", **MUON).build()
    set_gradients(named, 0)
    with CollectiveCounter() as counter:
        optimizer.step()
    return len(counter.calls), optimizer.orthogonalized


def test_replicas_may_share_the_work() -> None:
    results = run_ranks(replicated, 4)
    assert sum(matrices for _, matrices in results) == 18
    assert all(calls > 0 for calls, _ in results)


def joined(rank: int, world_size: int) -> tuple[int, int]:
    """With one owner among all replicas: matrices of this rank, and calls of the step."""
    model = make()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    place(model, Setup("owned"), mesh._flatten())
    named = {name: p for name, p in model.named_parameters() if is_owned(p)}
    optimizer = Muon(named.items(), **MUON).build()
    set_gradients(named, 0)
    with CollectiveCounter() as counter:
        optimizer.step()
    return optimizer.orthogonalized, len(counter.calls)


def test_joined_replicas_have_a_single_owner_per_matrix() -> None:
    results = run_ranks(joined, 4)
    assert sum(matrices for matrices, _ in results) == 18
    assert all(matrices > 0 and calls == 0 for matrices, calls in results)


def documented(rank: int, world_size: int) -> tuple[list[Call], float]:
    """The example of docs/placements.md: the collectives of the step, and the change of a matrix."""
    (code,) = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs" / "placements.md").read_text(), re.S
    )
    model = make()
    start = model.layers[0].wq.weight.detach().clone()
    names = {"model": model, "mesh": init_device_mesh("cpu", (world_size,)), "matrices": matrices(model)}
    exec(code, names)
    summed_plainly(model)
    loss_of(model, rank, world_size, 0).backward()
    names["optimizer"].build()
    with CollectiveCounter() as counter:
        names["optimizer"].step()
    assert "owner" in names["owners"].table()
    return counter.calls, float((gather(model.layers[0].wq.weight) - start).abs().max())


def test_the_example_of_the_docs_runs() -> None:
    for calls, moved in run_ranks(documented, 2):
        assert calls == []
        assert moved > 0
