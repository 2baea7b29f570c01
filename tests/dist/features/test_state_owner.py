"""`state = "owner"`: the owner alone keeps the momentum of replicas. Bits and checkpoints: tests/parity."""

import copy
from typing import Any

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.parity.table import row
from tests.parity.training import Training
from tests.shared import local, message
from titan_muon.planner.summary import summarize

SHAPES = ("wide", "tall", "experts")


def made(world_size: int, layout: str, state: str) -> Training:
    return Training(row("states", world_size, (layout,), shapes=SHAPES, options={"state": state}))


def state_bytes(training: Training) -> int:
    return sum(local(training.muon.state[param]["momentum_buffer"]).nbytes for param in training.params.values())


def stored(rank: int, world_size: int) -> dict[str, tuple[int, int, list[int]]]:
    """By layout: local bytes of momentum, bytes of a replica, and planned bytes of each rank."""
    results = {}
    for layout in ("plain", "replicated", "hsdp"):
        ours, theirs = (made(world_size, layout, state) for state in ("owner", "replicated"))
        for training in (ours, theirs):
            training.step_on(1)
        planned = [4 * cost.state_elements for cost in summarize(ours.muon.plan).ranks]
        assert 4 * summarize(theirs.muon.plan).ranks[rank].state_elements == state_bytes(theirs)
        results[layout] = state_bytes(ours), state_bytes(theirs), planned
    return results


def test_every_momentum_is_stored_once() -> None:
    results = run_ranks(stored, 4, timeout=SECONDS)
    for layout in results[0]:
        held = [result[layout][0] for result in results]
        replica = [result[layout][1] for result in results]
        shards = 1 if layout != "hsdp" else 2
        assert sum(held) == shards * replica[0] > max(held)
        assert all(result[layout][2] == held for result in results)


def load_directly(rank: int, world_size: int) -> tuple[bool, str, str]:
    """Whether a load of replicated state continues, and the errors of a load of an owner's state and of a read."""
    owner, everyone = (made(world_size, "plain", state) for state in ("owner", "replicated"))
    for training in (everyone, owner):
        training.step_on(1)
    kept = copy.deepcopy(owner.muon.state_dict())
    owner.step_on(50)
    for name, param in owner.params.items():
        param.data.copy_(everyone.params[name].data)
    owner.muon.load_state_dict(everyone.muon.state_dict())
    for training in (owner, everyone):
        training.step_on(2)
    same = all(param.equal(everyone.params[name]) for name, param in owner.params.items())
    refused = message(lambda: everyone.muon.load_state_dict(kept))
    momenta: list[Any] = [owner.muon.state[param]["momentum_buffer"] for param in owner.params.values()]
    elsewhere = next(momentum for momentum in momenta if local(momentum).numel() == 0)
    return same, refused, message(elsewhere.full_tensor)


def test_a_replicated_state_dict_is_loaded_and_an_owners_state_dict_is_refused() -> None:
    for same, refused, read in run_ranks(load_directly, 2, timeout=SECONDS):
        assert same
        assert "wide: the state dict has no momentum" in refused
        assert "muon.state with torch.distributed.checkpoint" in refused
        assert "the momentum is on its owner alone" in read, "an empty tensor would be taken for the momentum"
