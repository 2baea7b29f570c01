"""Ranks store whole matrices and experts: steps without collectives, passes with FSDP2's bytes. Bits: tests/parity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks import owned_model
from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.owned_model import Setup, summed_plainly
from tests.dist.harness import on_ranks, run_ranks
from titan_muon import Expert, Muon, Owners, own
from titan_muon.forecast.fake_world import fake_world
from titan_muon.options import PlacementRule, Split
from titan_muon.owned import gather
from titan_muon.owned.param import held_elements, holders

DIM, HIDDEN, LAYERS = 32, 96, 4


@dataclass(frozen=True)
class Layout:
    """Experts of a model, the owners, and the degrees."""

    experts: int
    placement: str = "owned"
    replicas: int = 1
    expert_parallel: int = 1
    rules: tuple[PlacementRule, ...] = ()


class Mixture(nn.Module):
    """A dense matrix, and experts; every expert gets every token."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM, bias=False)
        self.up = nn.Parameter(torch.zeros(experts, HIDDEN, DIM))
        self.down = nn.Parameter(torch.zeros(experts, DIM, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (w.to_local() if hasattr(w, "to_local") else w for w in (self.up, self.down))
        hidden = torch.einsum("td,ehd->eth", self.dense(x), up).relu()
        return x + torch.einsum("eth,edh->td", hidden, down)


def make(experts: int) -> nn.Sequential:
    return nn.Sequential(*(Mixture(experts) for _ in range(LAYERS)))


def place(net: nn.Sequential, layout: Layout, world_size: int) -> list[Owners]:
    """Shard a model, or own the parameters, by `layout`."""
    shards = world_size // layout.replicas // layout.expert_parallel
    names = ("replicate", "shard", "ep")
    mesh = init_device_mesh("cpu", (layout.replicas, shards, layout.expert_parallel), mesh_dim_names=names)
    stacks = [w for layer in net for w in (layer.up, layer.down)]
    data, stack_mesh = mesh["replicate", "shard"] if layout.replicas > 1 else mesh["shard"], mesh["shard"]
    if layout.expert_parallel > 1:
        data = mesh["shard", "ep"]._flatten("data")
        for layer in net:
            for name in ("up", "down"):
                cut = distribute_tensor(getattr(layer, name).data, mesh["ep"], [Shard(0)], src_data_rank=None)
                setattr(layer, name, nn.Parameter(cut))
        stacks = [w for layer in net for w in (layer.up, layer.down)]
    if layout.placement == "sharded":
        for layer in net:
            fully_shard(layer.dense, mesh=data)
            fully_shard(layer, mesh=data, shard_placement_fn=lambda p: Shard(1))
        fully_shard(net, mesh=data)
        summed_plainly(net)
        return []
    dense = [layer.dense.weight for layer in net]
    if layout.expert_parallel == 1:
        owners = [Owners(net, mesh=data, params=[*dense, *stacks], rules=layout.rules)]
    else:
        owners = [Owners(net, mesh=data, params=dense), Owners(net, mesh=stack_mesh, params=stacks)]
    for layer in net:
        for owner in owners:
            own(layer, owners=owner, gradient_divide_factor=world_size)
    return owners


def loss_of(net: nn.Module, share: int, shares: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, DIM, generator=generator).chunk(shares)[share]
    return net(x).square().mean()


def passes(rank: int, world_size: int, layout: Layout) -> tuple[int, int]:
    """Bytes sent by this rank in forward and in backward."""
    net = make(layout.experts)
    place(net, layout, world_size)
    with CollectiveCounter() as forward:
        loss = loss_of(net, rank, world_size, 0)
    with CollectiveCounter() as backward:
        loss.backward()
    return forward.sent, backward.sent


def dense_passes(rank: int, world_size: int, setup: Setup) -> tuple[int, int]:
    """`passes` of a dense model, in the second step."""
    model = owned_model.make(dim=64, hidden=192)
    owners = owned_model.place(model, setup, owned_model.data_mesh(world_size, setup, model))
    owned_model.loss_of(model, rank, world_size, 0).backward()
    before = 0 if owners is None else owners.traffic.bytes_sent
    with CollectiveCounter() as forward:
        loss = owned_model.loss_of(model, rank, world_size, 1)
    with CollectiveCounter() as backward:
        loss.backward()
    assert owners is None or owners.traffic.bytes_sent - before <= forward.sent + backward.sent
    return forward.sent, backward.sent


PASSES: list[tuple[Callable[..., tuple[int, int]], int, Any]] = [
    # More ranks than experts.
    (passes, 4, Layout(3)),
    (dense_passes, 2, Setup("owned", reshard=True)),
    (dense_passes, 4, Setup("owned", reshard=False)),
    (dense_passes, 8, Setup("owned", reshard=True)),
]


@pytest.mark.parametrize(("count", "ranks", "owned"), PASSES, ids=["experts", "2 ranks", "4 ranks", "8 ranks"])
def test_passes_of_owned_matrices_move_no_more_than_fsdp(count: Any, ranks: int, owned: Any) -> None:
    """Over all ranks; FSDP2 pads its shards."""
    ours, theirs = (run_ranks(count, ranks, each) for each in (owned, replace(owned, placement="sharded")))
    for mine, fsdps in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert 0 < sum(mine) <= 1.02 * sum(fsdps)


@on_ranks(2)
def test_the_example_of_the_docs_runs(rank: int) -> None:
    """docs/placements.md: the step starts no collective, and changes a matrix."""
    page = Path(__file__).parents[3] / "docs" / "placements.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    model = owned_model.make()
    start = model.layers[0].wq.weight.detach().clone()
    names: dict[str, Any] = {"model": model, "mesh": init_device_mesh("cpu", (2,))}
    names["matrices"] = owned_model.matrices(model)
    exec(code, names)
    summed_plainly(model)
    owned_model.loss_of(model, rank, 2, 0).backward()
    names["optimizer"].build()
    with CollectiveCounter() as counter:
        names["optimizer"].step()
    assert not counter.calls
    assert "owner" in names["owners"].table()
    assert not torch.equal(gather(model.layers[0].wq.weight), start)


@dataclass(frozen=True)
class Silent:
    """A step in a fake world: calls, holders of each stack, and elements of each rank."""

    calls: int
    held_by: list[tuple[int, ...]]
    placements: list[tuple[object, ...]]
    held: Counter[int]

    @property
    def fullest(self) -> float:
        """Elements on the fullest rank over the mean."""
        return max(self.held.values()) * len(self.held) / self.held.total()


def fake_step(rank: int, world_size: int, layout: Layout) -> Silent:
    with fake_world(world_size, rank):
        net = make(layout.experts)
        place(net, layout, world_size)
        for parameter in net.parameters():
            if parameter.to_local().numel() > 0:  # type: ignore[operator]
                parameter.grad = torch.ones_like(parameter)
        optimizer = Muon(net.named_parameters(), expert=Expert(replicas="redundant")).build()
        with CollectiveCounter() as counter:
            optimizer.step()
        stacks = [w for layer in net for w in (layer.up, layer.down)]
        held = Counter(dict.fromkeys(range(world_size), 0))
        for parameter in net.parameters():
            held.update(held_elements(parameter))  # type: ignore[arg-type]
        return Silent(len(counter.calls), [holders(w) for w in stacks], [tuple(w.placements) for w in stacks], held)


@pytest.mark.parametrize(
    ("world_size", "ranks", "layout"),
    [(32, (0, 17, 31), Layout(16)), (4, (0, 3), Layout(3, replicas=2)), (8, (0, 3, 6), Layout(4, expert_parallel=2))],
    ids=["32 ranks", "HSDP 2 x 2", "EP 2 x 4"],
)
def test_a_step_of_owned_experts_starts_no_collective(world_size: int, ranks: tuple[int, ...], layout: Layout) -> None:
    """All ranks find the same owners, and hold about equally much."""
    by_rank = [fake_step(rank, world_size, layout) for rank in ranks]
    for result in by_rank:
        assert result.calls == 0
        assert result.fullest <= 1.1
        assert result.held_by == by_rank[0].held_by
    for owners in by_rank[0].held_by:
        if layout.replicas > 1:
            assert {owner // 2 for owner in owners} == {0, 1}, "both replicas hold every expert"
        elif layout.expert_parallel > 1:
            # Experts 0 and 1 belong to the first expert-parallel rank, with even ranks.
            assert [owner % 2 for owner in owners] == [0, 0, 1, 1]
            assert set(by_rank[0].placements) == {(Shard(0), Shard(0))}, "of the experts of a rank, one by one"
        assert len(set(owners)) == min(layout.experts * layout.replicas, world_size), "as many ranks as there can be"
    assert len({frozenset(owners) for owners in by_rank[0].held_by}) > 1 or world_size < 32, "layers have other owners"


def test_matrices_of_one_parameter_have_separate_owners() -> None:
    """Three of 4 ranks store 5 experts in pairs, and two a gate with up, (2, F, D); ranks hold about equally much."""
    rules = (PlacementRule(match="*", placement="owned"),)
    gated = nn.ModuleList(nn.ParameterDict({"w13": torch.empty(2, HIDDEN, DIM)}) for _ in range(LAYERS))
    kernel = nn.ParameterDict({"kernel": torch.empty(32, 3, 4, 4)})
    with fake_world(4):
        experts = place(make(5), Layout(5, rules=rules), 4)[0]
        mesh = init_device_mesh("cpu", (4,))
        joint = Owners(gated, mesh=mesh, rules=rules, split=[Split(match="*.w13", dims="g f d -> g | f d")])
        split = [Split(match="kernel", dims="o i h w -> | o (i h w)")]
        own(kernel, owners=Owners(kernel, mesh=mesh, params=list(kernel.parameters()), split=split))
        assert len(holders(kernel["kernel"])) == 1
    for owners, count in ((experts, 3), (joint, 2)):
        ownership = owners.ownership
        stacks = [ranks for item, ranks in zip(ownership.items, ownership.owners, strict=True) if item.units > 1]
        assert [len(set(ranks)) for ranks in stacks] == [count] * len(stacks)
        held = [load.bytes for load in ownership.loads()]
        assert max(held) <= 1.1 * sum(held) / 4
