"""`state = "owner"`: the owner alone keeps the momentum of replicas."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.shared import drawn, local, message
from titan_muon import Muon, own
from titan_muon.options import OptionError, Split
from titan_muon.plan.summary import summarize

SHAPES = {"wide": (8, 24), "tall": (21, 10), "experts": (5, 8, 12), "fused": (12, 8), "last": (16, 8)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "orthogonalize": "reference"}
OPTIONS["split"] = (Split(match="fused", dims="(g f) d -> g | f d", lengths={"g": 2}),)
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

    def __init__(self, place: Placed, state: str) -> None:
        self.place = place
        self.params = {name: nn.Parameter(place(value)) for name, value in full(0).items()}
        self.muon = Muon(list(self.params.items()), state=state, **OPTIONS).build()

    def step(self, seed: int) -> None:
        for name, grad in full(seed).items():
            self.params[name].grad = self.place(grad)
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


def beside(rank: int, world_size: int, kind: str) -> tuple[int, int, list[int]]:
    """Local bytes of momentum, bytes of a replica, and planned bytes of each rank."""
    place = Placed.of(kind, world_size)
    ours, theirs = (Training(place, state) for state in ("owner", "replicated"))
    planned = [FLOAT32 * cost.state_elements for cost in summarize(ours.muon.plan).ranks]
    everywhere = [FLOAT32 * cost.state_elements for cost in summarize(theirs.muon.plan).ranks]
    assert everywhere[rank] == theirs.state_bytes()
    return ours.state_bytes(), theirs.state_bytes(), planned


@pytest.mark.parametrize(("kind", "world_size"), KINDS)
def test_every_momentum_is_stored_once(kind: str, world_size: int) -> None:
    results = run_ranks(beside, world_size, kind, timeout=SECONDS)
    held = [elements for elements, _, _ in results]
    assert sum(held) == FLOAT32 * sum(value.numel() for value in full(0).values())
    assert max(held) < max(everywhere for _, everywhere, _ in results)
    for *_, planned in results:
        assert planned == held


def load_directly(rank: int, world_size: int) -> tuple[list[str], str, str]:
    """Differences after a load of replicated state, and the errors of a load of an owner's state and of a read."""
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
    return owner.differs(everyone), refused, message(elsewhere.full_tensor)


def test_a_replicated_state_dict_is_loaded_and_an_owners_state_dict_is_refused() -> None:
    for differs, refused, read in run_ranks(load_directly, 2, timeout=SECONDS):
        assert differs == []
        assert "wide: the state dict has no momentum" in refused
        assert "muon.state with torch.distributed.checkpoint" in refused
        assert "the momentum is on its owner alone" in read, "an empty tensor would be taken for the momentum"


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
