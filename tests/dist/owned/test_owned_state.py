"""Owned parameters between steps: whole values, and clear refusals. Checkpoints: tests/parity."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.owned_model import DIM, Block, Net, Setup, data_mesh, loss_of, make, place
from tests.dist.harness import on_all_ranks, on_ranks
from tests.shared import equal
from titan_muon import Muon, Owners, own
from titan_muon.engine.layout.work import standard_flops
from titan_muon.forecast.fake_world import fake_world
from titan_muon.owned import full_state_dict, is_owned, load_full_state_dict

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
    return "whole" if not isinstance(value, Tensor) or value.numel() == DIM * DIM else f"empty {tuple(value.shape)}"


@on_ranks(2)
def test_reading_a_parameter_stored_on_another_rank_is_refused(rank: int) -> None:
    """A rank without the parameter gets an error, never an empty tensor."""
    model = make()
    place(model, LAYOUTS["owned"], data_mesh(2, LAYOUTS["owned"], model))
    name = "layers.0.wq.weight"
    state = model.state_dict()
    loss_of(model, rank, 2, 0).backward()
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
    model, plain = make(), make()
    place(model, LAYOUTS[layout], data_mesh(4, LAYOUTS[layout], model))
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
    place(model, LAYOUTS["owned"], data_mesh(2, LAYOUTS["owned"], model))
    owned = [(name, p) for name, p in model.named_parameters() if is_owned(p)]
    for early in (partial(block, torch.ones(1, 2, DIM)), lambda: Muon(owned).build()):
        assert re.search("meta device.*to_empty", message(early))
    model.to_empty(device="cpu")
    source = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = source.get_parameter(name)
            if is_owned(parameter):
                parameter.to_local().copy_(value if parameter.to_local().numel() else value.new_empty(0))
            else:
                parameter.copy_(torch.distributed.tensor.distribute_tensor(value, parameter.device_mesh))
    loss_of(model, rank, 2, 0).backward()
    assert equal(full_state_dict(model).values(), source.state_dict().values())


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].wq.weight = self.layers[0].wv.weight


def refusals(mesh: DeviceMesh) -> dict[str, tuple[Callable[[], object], str]]:
    """Refused calls by name, and their errors."""
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

    def both() -> object:
        block = Block()
        return own(block, mesh=mesh, owners=Owners(block, mesh=mesh))

    return {
        "tied": (lambda: Owners(Tied(), mesh=mesh), r"layers\.0\.wv.* are one tied parameter.*fully_shard"),
        "vector": (lambda: own(other_block, mesh=mesh, params=[other_block.norm1.weight]), "is not a matrix; leave"),
        "stranger": (lambda: own(Block(), mesh=mesh, params=[other_block.wq.weight]), r"the model does not have, of"),
        "nothing": (lambda: own(nn.LayerNorm(4), mesh=mesh), "nothing to own"),
        "not in the mesh": (lambda: own(Block(), mesh=other), "this rank is not in the mesh"),
        "three axes": (lambda: own(Block(), mesh=init_device_mesh("cpu", (1, 2, 1))), r"3 axes; give \(shard,\) or"),
        "sharded first": (changed(lambda block: fully_shard(block, mesh=mesh)), r"wq\.weight: is.*call own\(\) before"),
        "sharded after": (changed(lambda block: fully_shard(block, mesh=mesh), owned=True), r"what own\(\) returned"),
        "twice": (changed(lambda block: own(block, mesh=mesh), owned=True), r"wq\.weight: owned already"),
        "outside": (changed(lambda block: block.wq(torch.ones(1, DIM)), owned=True), "only within the forward of"),
        "mixed": (changed(lambda block: block.wq.bfloat16()), r"wq\.weight is torch\.bfloat16.*mp_policy\.param_dtype"),
        "grad_dtype": (
            changed(lambda block: setattr(block.wq.weight, "grad_dtype", None)),
            r"wq\.weight: has grad_dtype None, which own\(\) cannot keep",
        ),
        "neither": (lambda: own(Block()), "own needs a mesh, or the owners"),
        "both": (both, "own takes mesh, params and rules, or owners"),
        "elsewhere": (lambda: own(Block(), owners=Owners(Block(), mesh=mesh)), "Block: has no parameter with an owner"),
    }


@on_ranks(2)
def test_impossible_calls_are_refused(rank: int) -> None:
    for name, (call, expected) in refusals(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))).items():
        text = message(call)
        assert text.startswith("ValueError: "), name
        assert re.search(expected, text), text


def test_only_matrices_are_owned_by_default_with_the_users_weights() -> None:
    model = make()
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,))
        plain, counted = Owners(model, mesh=mesh), Owners(model, mesh=mesh, flops=lambda rows, cols: rows)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.ndim == 2}
    assert set(plain.infos) == shapes.keys()
    assert [item.flops for item in plain.ownership.items] == [standard_flops(*shape, 5) for shape in shapes.values()]
    assert [item.flops for item in counted.ownership.items] == [rows for rows, _ in shapes.values()]
