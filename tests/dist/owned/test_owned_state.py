"""Owned parameters between steps: checkpoints for any placement, whole values, and clear refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.owned_model import DIM, Block, Net, Setup, data_mesh, loss_of, make, place, whole
from tests.dist.harness import run_ranks
from titan_muon import Expert, Muon, Owners, own
from titan_muon.engine.layout.work import standard_flops
from titan_muon.engine.tensors.process_groups import fake_world
from titan_muon.owned import full_state_dict, gather, is_owned, load_full_state_dict

LAYOUTS = {
    "owned": Setup("owned"),
    "sharded": Setup("sharded"),
    "owned in replicas": Setup("owned", replicas=2),
    "owned pieces": Setup("owned", tensor=2),
}


def trained(rank: int, world_size: int, setup: Setup, steps: range, saved: str | None) -> tuple[Net, Muon]:
    """A model and the Muon of the matrices after some steps, from a checkpoint or from the start."""
    model = make(seed=0 if saved is None else 1)
    place(model, setup, data_mesh(world_size, setup, model))
    named = [(name, p) for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    optimizer = Muon(named, lr=0.01, expert=Expert(orthogonalize="reference")).build()
    if saved is not None:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=saved)
        model.load_state_dict(state["model"])
    for step in steps:
        loss_of(model, rank // setup.tensor, world_size // setup.tensor, step).backward()
        for parameter in set(model.parameters()) - {p for _, p in named}:
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: Net, optimizer: Muon) -> dict[str, Any]:
    """State of a checkpoint: parameters and momentum by name. Momentum is the optimizer's tensor."""
    names = optimizer.param_groups[0]["param_names"]
    state = [optimizer.state[p]["momentum_buffer"] for p in optimizer.param_groups[0]["params"]]
    return {"model": model.state_dict(), "momentum": dict(zip(names, state, strict=True))}


def everything(model: Net, optimizer: Muon) -> dict[str, np.ndarray]:
    """All parameters and momenta, whole; arrays travel between processes by value."""
    momentum = {f"momentum of {name}": gather(value) for name, value in state_of(model, optimizer)["momentum"].items()}
    return {name: value.numpy() for name, value in {**whole(model), **momentum}.items()}


def save(rank: int, world_size: int, layout: str, folder: str) -> dict[str, np.ndarray]:
    model, optimizer = trained(rank, world_size, LAYOUTS[layout], range(2), None)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return everything(model, optimizer)


def load(rank: int, world_size: int, layout: str, folder: str) -> dict[str, np.ndarray]:
    return everything(*trained(rank, world_size, LAYOUTS[layout], range(0), folder))


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ((4, "owned"), (2, "sharded")),
        ((4, "owned pieces"), (2, "owned")),
    ],
    ids=lambda side: f"{side[1]}@{side[0]}",
)
def test_a_checkpoint_does_not_depend_on_the_placement(
    saving: tuple[int, str], loading: tuple[int, str], tmp_path: Path
) -> None:
    """Parameters and momentum return bit for bit. tests/parity has chains of other owned and sharded weights."""
    (saved, *_) = run_ranks(save, *saving, str(tmp_path))
    for loaded in run_ranks(load, *loading, str(tmp_path)):
        assert list(loaded) == list(saved)
        assert [name for name in saved if not np.array_equal(saved[name], loaded[name])] == []
    metadata = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    chunks = [len(value.chunks) for key, value in metadata.items() if re.search(r"\.w\w\.weight$", key)]
    if "pieces" not in saving[1]:
        assert chunks == [1] * 36, "each matrix and its momentum are saved once, whole"


def read_by_mistake(rank: int, world_size: int) -> list[str]:
    """The error of reading a whole parameter like FSDP2's, or `whole`."""
    model = make()
    place(model, LAYOUTS["owned"], data_mesh(world_size, LAYOUTS["owned"], model))
    name = "layers.0.wq.weight"
    state = model.state_dict()
    loss_of(model, rank, world_size, 0).backward()
    owned_param = model.get_parameter(name)
    attempts: list[Callable[[], Tensor]] = [
        lambda: state[name].full_tensor(),
        lambda: model.state_dict()[name].full_tensor(),
        lambda: owned_param.full_tensor(),  # type: ignore[attr-defined, operator]
        lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))[name],
    ]
    return [message(attempt) for attempt in attempts]


def message(attempt: Callable[[], object]) -> str:
    try:
        value = attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "whole" if not isinstance(value, Tensor) or value.numel() == DIM * DIM else f"empty {tuple(value.shape)}"


def test_reading_a_parameter_stored_on_another_rank_is_refused() -> None:
    """A rank without the parameter gets an error, never an empty tensor."""
    by_rank = run_ranks(read_by_mistake, 2)
    for attempts in zip(*by_rank, strict=True):
        wrong = [a for a in attempts if a != "whole"]
        assert len(wrong) >= 1
        for text in wrong:
            assert re.search(r"layers\.\d\.w\w\.weight is stored whole on rank \d.*titan_muon\.owned\.gather", text), (
                text
            )


def whole_states(rank: int, world_size: int, setup: Setup) -> list[str]:
    """Read and load whole state dicts of a plain model. Returns the errors of wrong ones."""
    model, plain = make(), make()
    place(model, setup, data_mesh(world_size, setup, model))
    for factor in (1, 2):
        state = {name: factor * value for name, value in plain.state_dict().items()}
        if factor == 2:
            load_full_state_dict(model, state)
        read = full_state_dict(model)
        assert list(read) == list(state)
        assert all(torch.equal(read[name], value) for name, value in state.items())
    (name, *_) = state
    fewer = {key: value for key, value in state.items() if key != name} | {"extra": torch.ones(1)}
    return [message(partial(load_full_state_dict, model, w)) for w in ({**state, name: torch.ones(3, 3)}, fewer)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_state_dicts_are_gathered_and_loaded_on_every_rank(layout: str) -> None:
    for other_shape, other_names in run_ranks(whole_states, 4, LAYOUTS[layout]):
        assert "does not match (3, 3)" in other_shape
        assert "has extra ['extra']" in other_names


def from_meta(rank: int, world_size: int) -> tuple[list[str], bool]:
    """A model from the meta device: the error of a use without storage, and the training afterwards."""
    with torch.device("meta"):
        model, block = Net(), Block()
    own(block, mesh=init_device_mesh("cpu", (world_size,)))
    early = [message(partial(block, torch.ones(1, 2, DIM)))]
    place(model, LAYOUTS["owned"], data_mesh(world_size, LAYOUTS["owned"], model))
    early.append(message(lambda: Muon([(n, p) for n, p in model.named_parameters() if is_owned(p)]).build()))
    model.to_empty(device="cpu")
    source = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = source.get_parameter(name)
            if is_owned(parameter):
                parameter.to_local().copy_(value if parameter.to_local().numel() else value.new_empty(0))
            else:
                parameter.copy_(torch.distributed.tensor.distribute_tensor(value, parameter.device_mesh))
    loss_of(model, rank, world_size, 0).backward()
    return early, all(torch.equal(value, source.state_dict()[name]) for name, value in full_state_dict(model).items())


def test_a_model_may_be_built_on_the_meta_device() -> None:
    for early, equal in run_ranks(from_meta, 2):
        assert all(re.search("meta device.*to_empty", text) for text in early), early
        assert equal


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].wq.weight = self.layers[0].wv.weight


def wrong_calls(mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    """Refused calls by name."""
    other_block = Block()
    other = DeviceMesh("cpu", [1 - torch.distributed.get_rank()], _init_backend=False)

    def changed(change: Callable[[Block], object], **options: Any) -> Callable[[], object]:
        """A call for a changed block."""

        def call() -> object:
            block = Block()
            change(block)
            return own(block, mesh=mesh, **options)

        return call

    def owned(then: Callable[[Block], object]) -> Callable[[], object]:
        """A call with an owned block."""

        def call() -> object:
            block = Block()
            own(block, mesh=mesh)
            return then(block)

        return call

    def both() -> object:
        block = Block()
        return own(block, mesh=mesh, owners=Owners(block, mesh=mesh))

    return {
        "tied": lambda: Owners(Tied(), mesh=mesh),
        "vector": lambda: own(other_block, mesh=mesh, params=[other_block.norm1.weight]),
        "stranger": lambda: own(Block(), mesh=mesh, params=[other_block.wq.weight]),
        "nothing": lambda: own(nn.LayerNorm(4), mesh=mesh),
        "not in the mesh": lambda: own(Block(), mesh=other),
        "three axes": lambda: own(Block(), mesh=init_device_mesh("cpu", (1, 2, 1))),
        "sharded first": changed(lambda block: fully_shard(block, mesh=mesh)),
        "sharded after": owned(lambda block: fully_shard(block, mesh=mesh)),
        "twice": owned(lambda block: own(block, mesh=mesh)),
        "outside": owned(lambda block: block.wq(torch.ones(1, DIM))),
        "mixed": changed(lambda block: block.wq.bfloat16()),
        "grad_dtype": changed(lambda block: setattr(block.wq.weight, "grad_dtype", None)),
        "neither": lambda: own(Block()),
        "both": both,
        "elsewhere": lambda: own(Block(), owners=Owners(Block(), mesh=mesh)),
    }


REFUSALS = {
    "tied": r"layers\.0\.wv\.weight, layers\.2\.wq\.weight are one tied parameter.*fully_shard",
    "vector": r"norm1\.weight: shape \(32,\) is not a matrix; leave it to fully_shard.*split",
    "stranger": r"the model does not have, of shapes \[\(32, 32\)\]",
    "nothing": r"nothing to own",
    "not in the mesh": r"this rank is not in the mesh",
    "three axes": r"3 axes; give \(shard,\) or \(replicate, shard\)",
    "sharded first": r"wq\.weight: is placed on .*call own\(\) before fully_shard.*ignored_params",
    "sharded after": r"neither sharded nor gathered by PyTorch: give fully_shard what own\(\) returned as ignored",
    "twice": r"wq\.weight: owned already",
    "outside": r"Linear: its owned parameters are unsharded only within the forward of Block",
    "mixed": r"wq\.weight is torch\.bfloat16.*mp_policy\.param_dtype",
    "grad_dtype": r"wq\.weight: has grad_dtype None, which own\(\) cannot keep",
    "neither": r"own needs a mesh, or the owners",
    "both": r"own takes mesh, params and rules, or owners",
    "elsewhere": r"Block: has no parameter with an owner",
}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """Errors of the calls."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    return {name: message(call) for name, call in wrong_calls(mesh).items()}


def test_impossible_calls_are_refused() -> None:
    for errors in run_ranks(refusals, 2):
        assert errors.keys() == REFUSALS.keys()
        for name, text in errors.items():
            assert text.startswith("ValueError: "), name
            assert re.search(REFUSALS[name], text), text


def test_only_matrices_are_owned_by_default_with_the_users_weights() -> None:
    model = make()
    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,))
        plain, counted = Owners(model, mesh=mesh), Owners(model, mesh=mesh, flops=lambda rows, cols: rows)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.ndim == 2}
    assert set(plain.infos) == shapes.keys()
    assert [item.flops for item in plain.ownership.items] == [standard_flops(*shape, 5) for shape in shapes.values()]
    assert [item.flops for item in counted.ownership.items] == [rows for rows, _ in shapes.values()]
