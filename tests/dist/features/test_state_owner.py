"""`state = "owner"`: the owner alone keeps the momentum of replicas, steps are equal, and checkpoints load anywhere."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn, local, message
from titan_muon import Muon, own
from titan_muon.options import OptionError, Split
from titan_muon.plan.summary import summarize

SHAPES = {"wide": (8, 24), "tall": (21, 10), "experts": (5, 8, 12), "fused": (12, 8), "last": (16, 8)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "orthogonalize": "reference"}
OPTIONS["split"] = (Split(match="fused", dims="(g f) d -> g | f d", lengths={"g": 2}),)
FUSED = {"fused": (2, 6, 8)}
FLOAT32 = 4


full = partial(drawn, SHAPES)


@dataclass
class Placed:
    """How parameters are placed: `plain` tensors, `replicate` DTensors, or `hsdp` with two replicas."""

    kind: str
    mesh: DeviceMesh

    @classmethod
    def of(cls, kind: str, world_size: int) -> "Placed":
        shape = (2, world_size // 2) if kind == "hsdp" else (world_size,)
        return cls(kind, init_device_mesh("cpu", shape))

    def __call__(self, value: Tensor) -> Tensor:
        placements: list[Placement] = [Replicate()] if self.kind == "replicate" else [Replicate(), Shard(0)]
        if self.kind == "plain":
            return value.clone()
        return distribute_tensor(value.clone(), self.mesh, placements, src_data_rank=None)


class Training:
    """A model of the shapes, and the Muon."""

    def __init__(self, place: Placed, state: str, weights: dict[str, Tensor] | None = None, **options: Any) -> None:
        values = full(0) if weights is None else weights
        self.place, self.dtype = place, options.pop("dtype", torch.float32)
        self.model = nn.Module()
        for name, value in values.items():
            self.model.register_parameter(name, nn.Parameter(place(value.to(self.dtype))))
        self.params = dict(self.model.named_parameters())
        self.muon = Muon(list(self.params.items()), state=state, **(OPTIONS | options)).build()

    def step(self, seed: int, spoil: Callable[[str, Tensor], Tensor | None] = lambda name, grad: grad) -> None:
        for name, grad in full(seed).items():
            spoiled = spoil(name, grad.to(self.dtype))
            self.params[name].grad = None if spoiled is None else self.place(spoiled)
        self.muon.step()

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: local(param).clone() for name, param in self.params.items()}

    @property
    def averages(self) -> dict[str, Tensor]:
        return {name: self.muon.state[param]["momentum_buffer"] for name, param in self.params.items()}

    def state_bytes(self) -> int:
        return sum(local(average).nbytes for average in self.averages.values())

    def differs(self, other: "Training") -> list[str]:
        theirs = other.weights
        return [name for name, value in self.weights.items() if not torch.equal(value, theirs[name])]


KINDS = [("plain", 2), ("plain", 4), ("replicate", 4), ("hsdp", 4)]


def beside(rank: int, world_size: int, kind: str, **options: Any) -> tuple[list[str], int, int, list[int]]:
    """After four steps: differences from replicated momentum, local bytes of momentum, bytes of a replica, and
    planned bytes of each rank."""
    place = Placed.of(kind, world_size)
    ours, theirs = (Training(place, state, **options) for state in ("owner", "replicated"))
    for seed in range(1, 5):
        ours.step(seed)
        theirs.step(seed)
    planned = [FLOAT32 * cost.state_elements for cost in summarize(ours.muon.plan).ranks]
    everywhere = [FLOAT32 * cost.state_elements for cost in summarize(theirs.muon.plan).ranks]
    assert everywhere[rank] == theirs.state_bytes()
    return ours.differs(theirs), ours.state_bytes(), theirs.state_bytes(), planned


@pytest.mark.parametrize(("kind", "world_size"), KINDS)
def test_steps_are_bitwise_equal_and_every_momentum_is_stored_once(kind: str, world_size: int) -> None:
    results = run_ranks(beside, world_size, kind, timeout=SECONDS)
    assert [wrong for wrong, *_ in results] == [[]] * world_size
    held = [elements for _, elements, _, _ in results]
    assert sum(held) == FLOAT32 * sum(value.numel() for value in full(0).values())
    assert max(held) < max(everywhere for _, _, everywhere, _ in results)
    for *_, planned in results:
        assert planned == held


STAGES = (("plain", 4, "owner"), ("replicate", 2, "replicated"), ("hsdp", 4, "owner"), ("plain", 2, "owner"))


def resumed(
    rank: int, world_size: int, kind: str, state: str, folders: tuple[str | None, str], seed: int, path: str
) -> list[str]:
    """A step from a checkpoint, if any, and a new checkpoint; differences from one process."""
    source, target = folders
    # Random weights and momentum, so that a missing load is noticed.
    start = {name: value + 1 for name, value in full(0).items()} if source else None
    ours = Training(Placed.of(kind, world_size), state, start)
    if source is not None:
        ours.step(90)
        loaded = saved(ours, path)
        dcp.load(loaded, checkpoint_id=source)
        load(ours, loaded, path)
    ours.step(seed)
    dcp.save(saved(ours, path), checkpoint_id=target)
    reference = ReferenceMuon(unfused(full(0)))
    for step in range(1, seed + 1):
        reference.step(unfused(full(step)))
    return [
        name
        for name, value in reference.params.items()
        if not torch.equal(ours.weights[name], local(ours.place(value.view(SHAPES[name]))))
    ]


def unfused(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.view(FUSED.get(name, value.shape)) for name, value in values.items()}


def saved(ours: Training, path: str) -> dict[str, Any]:
    """State to save, and to load, by PyTorch's functions or by TorchTitan's. The ranks import torchtitan: an import
    at the top would precede `compat.install` when all tests are collected."""
    if path == "titan":
        from torchtitan.components.optimizer.utils import get_flat_optim_state_dict

        state = get_flat_optim_state_dict(ours.muon)
    else:
        state = get_optimizer_state_dict(ours.model, ours.muon)
    return {"model": ours.model.state_dict(), "optimizer": state}


def load(ours: Training, loaded: dict[str, Any], path: str) -> None:
    if path == "titan":
        from torchtitan.components.optimizer.utils import load_flat_optim_state_dict

        load_flat_optim_state_dict(ours.muon, loaded["optimizer"])
    else:
        set_optimizer_state_dict(ours.model, ours.muon, loaded["optimizer"])


@pytest.mark.parametrize("path", ["torch", "titan"])
def test_checkpoints_load_anywhere(path: str, tmp_path: Path) -> None:
    """From the owners to every replica and back, between worlds, with the bits of one process."""
    source = None
    for seed, (kind, world_size, state) in enumerate(STAGES, start=1):
        target = str(tmp_path / str(seed))
        results = run_ranks(resumed, world_size, kind, state, (source, target), seed, path, timeout=SECONDS)
        assert results == [[]] * world_size, f"{state} on {world_size} ranks"
        source = target


def not_finite(name: str, grad: Tensor) -> Tensor:
    return torch.where(torch.arange(grad.numel()).view_as(grad) == 5, torch.nan, grad) if name != "wide" else grad


def missing(name: str, grad: Tensor) -> Tensor | None:
    return None if name in ("experts", "tall") else grad


def moved(muon: Muon) -> None:
    muon.offload()
    muon.step()
    muon.reload()


def fewer_steps(muon: Muon) -> None:
    """Plan again with the same momentum."""
    state = muon.state_dict()
    state["param_groups"][0]["ns_steps"] = 3
    muon.load_state_dict(state)


VARIANTS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "without nesterov": ({"nesterov": False}, None, None),
    "on the host": ({"offload": "state"}, None, None),
    "moved to the host and back": ({}, None, moved),
    "stochastic rounding": ({"dtype": torch.bfloat16}, None, None),
    "bfloat16 momentum": ({"state_dtype": "bfloat16"}, None, None),
    "not finite": ({"nonfinite": "skip"}, not_finite, None),
    "missing": ({"missing_grad": "skip"}, missing, None),
    "released": ({"release_grads": True}, None, None),
    "planned again": ({}, None, fewer_steps),
}
"""Options, a change of the second step's gradients, and a call after that step."""


def vary(rank: int, world_size: int) -> dict[str, list[str]]:
    """By variant, differences from steps with replicated momentum."""
    place = Placed.of("plain", world_size)
    return {name: varied(place, *variant) for name, variant in VARIANTS.items()}


def varied(place: Placed, options: dict[str, Any], spoil: Any, then: Any) -> list[str]:
    pair = [Training(place, state, **options) for state in ("owner", "replicated")]
    for training in pair:
        training.step(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training.step(2, *([] if spoil is None else [spoil]))
            for seed in (3, 4):
                if seed == 3 and then is not None:
                    then(training.muon)
                training.step(seed)
            training.muon.check_last_step()
    return pair[0].differs(pair[1])


def test_options_with_state_owner_change_no_bit() -> None:
    for differences in run_ranks(vary, 2, timeout=2 * SECONDS):
        assert differences == {name: [] for name in VARIANTS}


def load_directly(rank: int, world_size: int) -> tuple[list[str], str, str, str]:
    """Differences after loads between replicated and owner state, reads, and the momentum of a thawed matrix."""
    place = Placed.of("plain", world_size)
    owner, everyone = Training(place, "owner"), Training(place, "replicated")
    everyone.step(1)
    owner.step(1)
    kept = copy.deepcopy(owner.muon.state_dict())
    owner.step(50)
    for name, param in owner.params.items():
        param.data.copy_(everyone.params[name].data)
    owner.muon.load_state_dict(everyone.muon.state_dict())
    for training in (owner, everyone):
        training.step(2)
    refused = message(lambda: everyone.muon.load_state_dict(kept))
    elsewhere: Any = next(average for average in owner.averages.values() if local(average).numel() == 0)
    return owner.differs(everyone), refused, message(elsewhere.full_tensor), thaw(place)


def thaw(place: Placed) -> str:
    """Names with a difference from a training with replicated momentum, for a parameter trained from step 2 on."""
    pair = [Training(place, state) for state in ("owner", "replicated")]
    for training in pair:
        for seed, trains in ((1, False), (2, True), (3, False), (4, True)):
            training.params["experts"].requires_grad_(trains)
            training.muon.load_state_dict(training.muon.state_dict())
            training.step(seed)
    return " ".join(pair[0].differs(pair[1]))


def test_a_replicated_state_dict_is_loaded_and_an_owners_state_dict_is_refused() -> None:
    for differs, refused, read, thawed in run_ranks(load_directly, 2, timeout=SECONDS):
        assert differs == []
        assert "wide: the state dict has no momentum" in refused
        assert "muon.state with torch.distributed.checkpoint" in refused
        assert "the momentum is on its owner alone" in read, "an empty tensor would be taken for the momentum"
        assert thawed == ""


REFUSED = {
    "exchange": "all_gather_reduce_scatter",
    "replicas": "redundant",
}


@pytest.mark.parametrize(("option", "value"), REFUSED.items())
def test_options_with_the_momentum_of_every_replica_are_refused(option: str, value: Any) -> None:
    options = OPTIONS | {"orthogonalize": "auto", option: value}
    with pytest.raises(OptionError, match=f"state = 'owner': {option} = {value!r}.* or state = 'replicated'"):
        Muon([("w", nn.Parameter(torch.ones(4, 4)))], state="owner", **(options | {"split": ()})).build()


def test_a_matrix_of_several_owners_is_refused() -> None:
    params = [("w", nn.Parameter(torch.ones(4, 4)))]
    with pytest.raises(OptionError, match=r"split_over = 2: state = 'owner' .* or split_over = 1"):
        Muon(params, state="owner", split_over=2).build()
    assert Muon(params, state="owner", split_over="auto").build().plan.whole_matrices == 1


def own_it(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    own(model, mesh=init_device_mesh("cpu", (world_size,)))
    return message(lambda: Muon(model.named_parameters(), state="owner").build())


def test_owned_placement_refuses_state_owner() -> None:
    for text in run_ranks(own_it, 2, timeout=SECONDS):
        assert 'state = "owner": 0.weight is owned, and its momentum is on its owner alone already' in text


def test_a_single_process_keeps_every_momentum() -> None:
    params = {name: nn.Parameter(value) for name, value in full(0).items()}
    muon = Muon(list(params.items()), state="owner", **OPTIONS).build()
    assert [muon.state[param]["momentum_buffer"].shape for param in params.values()] == [
        p.shape for p in params.values()
    ]
