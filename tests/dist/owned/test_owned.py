"""Ranks store whole matrices and experts: traffic of steps and passes, whole values, refusals. Bits: tests/parity."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks import owned_model
from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.owned_model import Block, Net, Setup, summed_plainly
from tests.dist.harness import on_all_ranks, on_ranks, run_ranks
from tests.shared import equal
from titan_muon import Expert, Muon, Owners, own
from titan_muon.engine.layout.work import standard_flops
from titan_muon.forecast.fake_world import fake_world
from titan_muon.options import Split
from titan_muon.owned import full_state_dict, gather, is_owned, load_full_state_dict
from titan_muon.owned.param import held_elements, holders
from titan_muon.planner.ownership import PlacementRule

DIM, HIDDEN, LAYERS = 32, 96, 4


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


def stacks_of(net: nn.Sequential) -> list[nn.Parameter]:
    return [w for layer in net for w in (layer.up, layer.down)]


def place(
    net: nn.Sequential, ranks: int, replicas: int = 1, ep: int = 1, rules: tuple[PlacementRule, ...] = ()
) -> list[Owners]:
    """Own all parameters, with experts on the ranks of expert parallelism."""
    names = ("replicate", "shard", "ep")
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas // ep, ep), mesh_dim_names=names)
    dense = [layer.dense.weight for layer in net]
    if ep == 1:
        data = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
        owners = [Owners(net, mesh=data, params=[*dense, *stacks_of(net)], rules=rules)]
    else:
        for layer in net:
            for name in ("up", "down"):
                cut = distribute_tensor(getattr(layer, name).data, mesh["ep"], [Shard(0)], src_data_rank=None)
                setattr(layer, name, nn.Parameter(cut))
        owners = [Owners(net, mesh=mesh["shard", "ep"]._flatten("data"), params=dense)]
        owners.append(Owners(net, mesh=mesh["shard"], params=stacks_of(net)))
    for layer in net:
        for owner in owners:
            own(layer, owners=owner, gradient_divide_factor=ranks)
    return owners


def loss_of(net: nn.Module, share: int, shares: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, DIM, generator=generator).chunk(shares)[share]
    return net(x).square().mean()


def passes(rank: int, world_size: int, experts: int, reshard: bool) -> tuple[float, float]:
    """Bytes sent in forward and in backward of the second step, by the bytes that move if each parameter does once."""
    setup, loss_function = Setup("owned", reshard=reshard), loss_of if experts else owned_model.loss_of
    net: Any = make(experts) if experts else owned_model.make(dim=64, hidden=192)
    moved = 4 * (world_size - 1) * sum(p.numel() for p in net.parameters())
    if experts:
        (owners,) = place(net, world_size)
    else:
        owners = owned_model.place(net, setup, owned_model.data_mesh(world_size, setup, net))
    loss_function(net, rank, world_size, 0).backward()
    before = owners.traffic.bytes_sent
    with CollectiveCounter() as forward:
        loss = loss_function(net, rank, world_size, 1)
    with CollectiveCounter() as backward:
        loss.backward()
    assert 0 < owners.traffic.bytes_sent - before <= forward.sent + backward.sent
    return forward.sent / moved, backward.sent / moved


# More ranks than experts, and dense models.
PASSES = {"experts": (4, 3, True), "2 ranks": (2, 0, True), "4 ranks": (4, 0, False), "8 ranks": (8, 0, True)}


@pytest.mark.parametrize(("ranks", "experts", "reshard"), PASSES.values(), ids=PASSES)
def test_passes_of_owned_matrices_move_no_more_than_fsdp(ranks: int, experts: int, reshard: bool) -> None:
    """Over all ranks: FSDP2 gathers each shard in forward, and again in backward if it was freed, and reduces."""
    forward, backward = (sum(shares) for shares in zip(*run_ranks(passes, ranks, experts, reshard), strict=True))
    assert 0 < forward <= 1.02
    assert 0 < backward <= 1.02 * (1 + reshard)


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


def fake_step(rank: int, ranks: int, experts: int, replicas: int, ep: int) -> list[tuple[int, ...]]:
    """The holders of each stack on a rank of a fake world, after a step without collectives."""
    with fake_world(ranks, rank):
        net = make(experts)
        place(net, ranks, replicas, ep)
        for parameter in net.parameters():
            if parameter.to_local().numel() > 0:  # type: ignore[operator]
                parameter.grad = torch.ones_like(parameter)
        optimizer = Muon(net.named_parameters(), expert=Expert(replicas="redundant")).build()
        with CollectiveCounter() as counter:
            optimizer.step()
        assert not counter.calls
        held = Counter(dict.fromkeys(range(ranks), 0))
        for parameter in net.parameters():
            held.update(held_elements(parameter))  # type: ignore[arg-type]
        assert max(held.values()) * ranks <= 1.1 * held.total(), "ranks hold about equally much"
        placements = {tuple(w.placements) for w in stacks_of(net)}  # type: ignore[attr-defined]
        assert ep == 1 or placements == {(Shard(0), Shard(0))}, "of the experts of a rank, one by one"
        return [holders(w) for w in stacks_of(net)]


STEPS = {"32 ranks": (32, 16, 1, 1), "HSDP 2 x 2": (4, 3, 2, 1), "EP 2 x 4": (8, 4, 1, 2)}


@pytest.mark.parametrize(("ranks", "experts", "replicas", "ep"), STEPS.values(), ids=STEPS)
def test_a_step_of_owned_experts_starts_no_collective(ranks: int, experts: int, replicas: int, ep: int) -> None:
    held, *others = (fake_step(rank, ranks, experts, replicas, ep) for rank in (0, ranks // 2, ranks - 1))
    assert others == [held, held], "all ranks find the same owners"
    for owners in held:
        assert replicas == 1 or {owner // 2 for owner in owners} == {0, 1}, "both replicas hold every expert"
        # Experts 0 and 1 belong to the first expert-parallel rank, with even ranks.
        assert ep == 1 or [owner % 2 for owner in owners] == [0, 0, 1, 1]
        assert len(set(owners)) == min(experts * replicas, ranks), "as many ranks as there can be"
    assert len({frozenset(owners) for owners in held}) > 1 or ranks < 32, "layers have other owners"


def test_matrices_of_one_parameter_have_separate_owners() -> None:
    """Three of 4 ranks store 5 experts in pairs, and two a gate with up, (2, F, D); ranks hold about equally much."""
    rules = (PlacementRule(match="*", placement="owned"),)
    gated = nn.ModuleList(nn.ParameterDict({"w13": torch.empty(2, HIDDEN, DIM)}) for _ in range(LAYERS))
    kernel = nn.ParameterDict({"kernel": torch.empty(32, 3, 4, 4)})
    with fake_world(4):
        experts = place(make(5), 4, rules=rules)[0]
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


# --- between steps: whole values, and clear refusals ---


LAYOUTS = {
    "owned": Setup("owned"),
    "sharded": Setup("sharded"),
    "owned in replicas": Setup("owned", replicas=2),
    "owned pieces": Setup("owned", tensor=2),
}


def message(attempt: Callable[[], object]) -> str:
    try:
        value = attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return (
        "whole"
        if not isinstance(value, Tensor) or value.numel() == owned_model.DIM * owned_model.DIM
        else f"empty {tuple(value.shape)}"
    )


@on_ranks(2)
def test_reading_a_parameter_stored_on_another_rank_is_refused(rank: int) -> None:
    """A rank without the parameter gets an error, never an empty tensor."""
    model = owned_model.make()
    owned_model.place(model, LAYOUTS["owned"], owned_model.data_mesh(2, LAYOUTS["owned"], model))
    name = "layers.0.wq.weight"
    state = model.state_dict()
    owned_model.loss_of(model, rank, 2, 0).backward()
    owned_param = model.get_parameter(name)
    attempts: list[Callable[[], Tensor]] = [
        lambda: state[name].full_tensor(),
        lambda: model.state_dict()[name].full_tensor(),
        lambda: owned_param.full_tensor(),  # type: ignore[attr-defined, operator]
        lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))[name],
    ]
    for texts in zip(*on_all_ranks([message(attempt) for attempt in attempts]), strict=True):
        wrong = [text for text in texts if text != "whole"]
        assert wrong
        for text in wrong:
            assert re.search(r"layers\.\d\.w\w\.weight is stored whole on rank \d.*titan_muon\.owned\.gather", text), (
                text
            )


@on_ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_state_dicts_are_gathered_and_loaded_on_every_rank(rank: int, layout: str) -> None:
    model, plain = owned_model.make(), owned_model.make()
    owned_model.place(model, LAYOUTS[layout], owned_model.data_mesh(4, LAYOUTS[layout], model))
    for factor in (1, 2):
        state = {name: factor * value for name, value in plain.state_dict().items()}
        if factor == 2:
            load_full_state_dict(model, state)
        read = full_state_dict(model)
        assert list(read) == list(state)
        assert equal(read.values(), state.values())
    (name, *_) = state
    fewer = {key: value for key, value in state.items() if key != name} | {"extra": torch.ones(1)}
    for wrong, text in (({**state, name: torch.ones(3, 3)}, "does not match (3, 3)"), (fewer, "has extra ['extra']")):
        assert text in message(partial(load_full_state_dict, model, wrong))


@on_ranks(2)
def test_a_model_may_be_built_on_the_meta_device(rank: int) -> None:
    """A use without storage is an error, and the training follows."""
    with torch.device("meta"):
        model, block = Net(), Block()
    own(block, mesh=init_device_mesh("cpu", (2,)))
    owned_model.place(model, LAYOUTS["owned"], owned_model.data_mesh(2, LAYOUTS["owned"], model))
    owned = [(name, p) for name, p in model.named_parameters() if is_owned(p)]
    for early in (partial(block, torch.ones(1, 2, owned_model.DIM)), lambda: Muon(owned).build()):
        assert re.search("meta device.*to_empty", message(early))
    model.to_empty(device="cpu")
    source = owned_model.make()
    load_full_state_dict(model, source.state_dict())
    owned_model.loss_of(model, rank, 2, 0).backward()
    assert equal(full_state_dict(model).values(), source.state_dict().values())


def tied() -> Net:
    net = Net()
    net.layers[2].wq.weight = net.layers[0].wv.weight
    return net


def refusals(mesh: DeviceMesh) -> dict[str, tuple[Callable[[], object], str]]:
    other_block = Block()
    other = DeviceMesh("cpu", [1 - torch.distributed.get_rank()], _init_backend=False)

    def changed(change: Callable[[Block], object], *, owned: bool = False) -> Callable[[], object]:
        """A call of `own` for a changed block, or a change of an owned block."""

        def call() -> object:
            block = Block()
            if owned:
                own(block, mesh=mesh)
                return change(block)
            change(block)
            return own(block, mesh=mesh)

        return call

    return {
        "tied": (lambda: Owners(tied(), mesh=mesh), r"layers\.0\.wv.* are one tied parameter.*fully_shard"),
        "vector": (lambda: own(other_block, mesh=mesh, params=[other_block.norm1.weight]), "is not a matrix; leave"),
        "stranger": (lambda: own(Block(), mesh=mesh, params=[other_block.wq.weight]), r"the model does not have, of"),
        "nothing": (lambda: own(nn.LayerNorm(4), mesh=mesh), "nothing to own"),
        "not in the mesh": (lambda: own(Block(), mesh=other), "this rank is not in the mesh"),
        "three axes": (lambda: own(Block(), mesh=init_device_mesh("cpu", (1, 2, 1))), r"3 axes; give \(shard,\) or"),
        "sharded first": (changed(lambda block: fully_shard(block, mesh=mesh)), r"wq\.weight: is.*call own\(\) before"),
        "sharded after": (changed(lambda block: fully_shard(block, mesh=mesh), owned=True), r"what own\(\) returned"),
        "twice": (changed(lambda block: own(block, mesh=mesh), owned=True), r"wq\.weight: owned already"),
        "outside": (changed(lambda block: block.wq(torch.ones(1, 32)), owned=True), "only within the forward of"),
        "mixed": (changed(lambda block: block.wq.bfloat16()), r"wq\.weight is torch\.bfloat16.*mp_policy\.param_dtype"),
        "grad_dtype": (
            changed(lambda block: setattr(block.wq.weight, "grad_dtype", None)),
            "has grad_dtype None, which",
        ),
        "neither": (lambda: own(Block()), "own needs a mesh, or the owners"),
        "both": (
            lambda: (block := Block()) and own(block, mesh=mesh, owners=Owners(block, mesh=mesh)),
            "own takes mesh, params and rules, or owners",
        ),
        "elsewhere": (lambda: own(Block(), owners=Owners(Block(), mesh=mesh)), "Block: has no parameter with an owner"),
    }


@on_ranks(2)
def test_impossible_calls_are_refused(rank: int) -> None:
    for name, (call, expected) in refusals(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))).items():
        text = message(call)
        assert text.startswith("ValueError: "), name
        assert re.search(expected, text), text


def test_only_matrices_are_owned_by_default_with_the_users_weights() -> None:
    model = owned_model.make()
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,))
        plain, counted = Owners(model, mesh=mesh), Owners(model, mesh=mesh, flops=lambda rows, cols: rows)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.ndim == 2}
    assert set(plain.infos) == shapes.keys()
    assert [item.flops for item in plain.ownership.items] == [standard_flops(*shape, 5) for shape in shapes.values()]
    assert [item.flops for item in counted.ownership.items] == [rows for rows, _ in shapes.values()]
