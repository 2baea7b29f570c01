"""With owned matrices an optimizer step communicates nothing, and the passes no more than FSDP2's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.owned_model import Net, Setup, data_mesh, loss_of, make, matrices, place, summed_plainly
from tests.dist.harness import run_ranks
from tests.reference_muon import ReferenceMuon
from tests.shared import muon_keywords
from titan_muon import Muon
from titan_muon.owned import gather, is_owned

MUON = {"lr": 0.02, "weight_decay": 0.1}
MATRICES, EXPERTS = 18, 8


@dataclass(frozen=True)
class Case:
    """Owned matrices on some ranks, and what a step does.

    `groups`: sizes of the groups that communicate. `repeats`: how often a matrix is orthogonalized in the world.
    `joined`: the ranks of both replicas own matrices together.
    """

    world: int
    setup: Setup
    groups: tuple[int, ...] = ()
    repeats: int = 1
    experts: bool = False
    replicas: str = "split"
    joined: bool = False


REPLICAS = Setup("owned", replicas=2)
CASES = {
    "1 rank": Case(1, Setup("owned")),
    "2 ranks and experts": Case(2, Setup("owned"), experts=True),
    "4 ranks": Case(4, Setup("owned")),
    "replicas and experts": Case(4, REPLICAS, repeats=2, experts=True, replicas="redundant"),
    "replicas that share the work": Case(4, REPLICAS, groups=(2, 4)),
    "joined replicas": Case(4, Setup("owned"), joined=True),
    "pieces of tensor parallelism": Case(4, Setup("owned", tensor=2), groups=(2,)),
}


@dataclass(frozen=True)
class Step:
    """A rank's step: sizes of communicating groups, matrices, wrong parameters, and elements of matrices at rest."""

    groups: set[int]
    matrices: int
    different: list[str]
    held: int


def with_experts(model: Net, mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """Stacks of experts beside a model, whole on the ranks of `mesh`: as under expert parallelism."""
    placements = [Replicate(), Shard(0)][-mesh.ndim :]
    stacks = {}
    for index in range(2):
        full = torch.randn(4, 12, 20, generator=torch.Generator().manual_seed(index))
        stacks[f"layers.{index}.experts"] = nn.Parameter(distribute_tensor(full, mesh, placements, src_data_rank=None))
    return stacks


def set_gradients(params: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    """Give every holder an equal gradient. Returns whole gradients."""
    whole = {}
    for index, (name, parameter) in enumerate(params.items()):
        full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + index))
        whole[name] = full
        placed = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        if not is_owned(parameter):
            parameter.grad = placed
        elif parameter.to_local().numel() > 0:
            parameter.grad = torch.empty_like(parameter).copy_(placed)
    return whole


def steps(rank: int, world_size: int, case: Case) -> list[Step]:
    """Steps of Muon on owned parameters, beside the reference on whole parameters with equal gradients."""
    model = make()
    mesh = data_mesh(world_size, case.setup, model)
    if case.joined:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))._flatten()
    place(model, case.setup, mesh)
    owned = {name: p for name, p in model.named_parameters() if is_owned(p)}
    named = {**owned, **(with_experts(model, mesh) if case.experts else {})}
    optimizer = Muon(named.items(), **muon_keywords(orthogonalize="reference", replicas=case.replicas, **MUON)).build()  # type: ignore[arg-type]
    reference = ReferenceMuon({name: gather(p).detach().clone() for name, p in named.items()}, **MUON)
    results = []
    for step in range(3):
        gradients = set_gradients(named, step)
        with CollectiveCounter() as counter:
            optimizer.step()
        reference.step(gradients)
        different = [name for name, p in named.items() if not torch.equal(gather(p), reference.params[name])]
        held = sum(p.to_local().numel() for p in owned.values())  # type: ignore[operator]
        results.append(Step({call.group_size for call in counter.calls}, optimizer.orthogonalized, different, held))
    return results


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_owned_matrices_communicates_nothing_and_has_torchs_bits(name: str) -> None:
    """But for pieces of tensor parallelism, and for replicas that share the work."""
    case = CASES[name]
    ranks = run_ranks(steps, case.world, case)
    for step in (step for steps_of_rank in ranks for step in steps_of_rank):
        assert step.different == []
        assert bool(step.groups) == bool(case.groups)
        assert step.groups <= set(case.groups)
    expected = (MATRICES + EXPERTS * case.experts) * case.repeats
    # Both ranks of a tensor-parallel group report a matrix that one of the two orthogonalizes.
    assert sum(steps_of_rank[0].matrices for steps_of_rank in ranks) == expected
    copies = case.setup.replicas if not case.joined else 1
    assert sum(steps_of_rank[0].held for steps_of_rank in ranks) == copies * sum(p.numel() for p in matrices(make()))


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


@pytest.mark.parametrize(("world_size", "reshard"), [(2, True), (4, False), (8, True)])
def test_forward_and_backward_move_no_more_than_fsdp(world_size: int, reshard: bool) -> None:
    """Over all ranks; FSDP2 pads its shards."""
    setup = Setup("owned", reshard=reshard)
    ours = run_ranks(passes, world_size, setup)
    theirs = run_ranks(passes, world_size, replace(setup, placement="sharded"))
    for phase in (0, 1):
        assert sum(sent[phase] for sent in ours) <= 1.02 * sum(sent[phase] for sent in theirs)
    assert 0 < sum(sent[2] for sent in ours) <= sum(sent[0] + sent[1] for sent in ours)


def documented(rank: int, world_size: int) -> tuple[int, float]:
    """The example of docs/placements.md: the collectives of the step, and the change of a matrix."""
    page = Path(__file__).parents[3] / "docs" / "placements.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
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
    return len(counter.calls), float((gather(model.layers[0].wq.weight) - start).abs().max())


def test_the_example_of_the_docs_runs() -> None:
    for calls, moved in run_ranks(documented, 2):
        assert calls == 0
        assert moved > 0
