"""Hybrid saves the state that its optimizers train, whatever happens to parameters, states and groups."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.test_hybrid import OPTIONS, Decoder, equal, train
from titan_muon import Hybrid, Rule, registry
from titan_muon.options import OptionError

MUON, ADAMW, OTHER = "layers.0.up.weight", "embed.weight", "lm_head.weight"
"""A parameter of each optimizer."""


@dataclass
class Run:
    """A model and its Hybrid, where torch.optim.Adam trains the output head."""

    model: nn.Module
    hybrid: Hybrid


def run_of(
    seed: int = 0, shard: Callable[[nn.Module], object] | None = None, frozen: str = "", others: bool = True
) -> Run:
    model = Decoder(seed)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    if shard is not None:
        shard(model)
    rules = [Rule(match=OTHER, optimizer="torch_adam")] if others else []
    return Run(model, Hybrid(model, rules=rules, others={"torch_adam": {"lr": 0.02}} if others else {}, **OPTIONS))


@contextmanager
def torch_adam() -> Iterator[None]:
    registry.optimizers.register("torch_adam", registry.OptimizerEntry(torch.optim.Adam))
    try:
        yield
    finally:
        del registry.optimizers._values["torch_adam"]


_registered = pytest.fixture(autouse=True)(torch_adam.__wrapped__)


# Events that change no digit


def replace_parameters(run: Run) -> None:
    new: dict[Any, nn.Parameter] = {}
    for module in run.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            new[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(module, name, new[parameter])
    for group in run.hybrid.param_groups:
        group["params"] = [new[parameter] for parameter in group["params"]]
    run.hybrid.rebuild()


def load_its_own(run: Run) -> None:
    run.hybrid.load_state_dict(copy.deepcopy(run.hybrid.state_dict()))


def add_a_group(run: Run) -> None:
    for optimizer in (run.hybrid, run.hybrid.optimizers["adamw"]):
        with pytest.raises(ValueError, match="build a new Hybrid"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))], "param_names": ["new"]})


def refuse_to_offload(run: Run) -> None:
    with pytest.raises(OptionError, match="torch_adam cannot move its states"):
        run.hybrid.offload()


def load_after_a_refused_load(run: Run) -> None:
    saved = copy.deepcopy(run.hybrid.state_dict())
    wrong = copy.deepcopy(saved)
    key = next(
        key for g in saved["param_groups"] for key, n in zip(g["params"], g["param_names"], strict=True) if n == ADAMW
    )
    if key in saved["state"]:
        for state in wrong["state"].values():
            for value in state.values():
                value.mul_(2)
        wrong["state"][key]["exp_avg"] = torch.zeros(3, 3)
        with pytest.raises(ValueError, match=r"^embed\.weight: the state dict has no exp_avg with this optimizer's"):
            run.hybrid.load_state_dict(wrong)


def copied_by(copying: Callable[[Any], Any]) -> Callable[[Run], None]:
    def event(run: Run) -> None:
        run.model, run.hybrid = copying((run.model, run.hybrid))

    return event


def freeze_and_thaw(run: Run) -> None:
    for needed in (False, True):
        for name in (MUON, ADAMW, OTHER):
            run.model.get_parameter(name).requires_grad_(needed)
        run.hybrid.rebuild()


SAME: dict[str, Callable[[Run], Any]] = {
    "read_state": lambda run: [run.hybrid.state[parameter] for parameter in run.model.parameters()],
    "rebuild": lambda run: run.hybrid.rebuild(),
    "replace_parameters": replace_parameters,
    "load_its_own": load_its_own,
    "load_into_the_parts": lambda run: [
        part.load_state_dict(copy.deepcopy(part.state_dict())) for part in run.hybrid.optimizers.values()
    ],
    "add_a_group": add_a_group,
    "deep_copy": copied_by(copy.deepcopy),
    "pickled": copied_by(lambda things: pickle.loads(pickle.dumps(things))),
    "refuse_to_offload": refuse_to_offload,
    "freeze_and_thaw": freeze_and_thaw,
    "load_after_a_refused_load": load_after_a_refused_load,
}
MOMENTS = ("before the first step", "between steps", "after a load")


def shares_one_state(run: Run) -> bool:
    parts = run.hybrid.optimizers.values()
    groups = [group for part in parts for group in part.param_groups]
    same_groups = all(mine is group for mine, group in zip(run.hybrid.param_groups, groups, strict=True))
    known = {parameter for group in groups for parameter in group["params"]}
    same_states = all(run.hybrid.state[p] is values for part in parts for p, values in part.state.items())
    names = [name for name, part in run.hybrid.optimizers.items() for _ in part.param_groups]
    named = [group["optimizer"] for group in run.hybrid.param_groups] == names
    return same_groups and same_states and named and set(run.hybrid.state) <= known


def problems_of(run: Run, moment: str, event: Callable[[Run], Any], shard: Any = None) -> list[str]:
    """Failed claims about a run with an event at a moment, beside a run without."""
    reference = run_of(shard=shard)
    if moment != "before the first step":
        for each in (run, reference):
            train(each.model, each.hybrid, range(2))
    if moment == "after a load":
        load_its_own(run)
    event(run)
    for each in (run, reference):
        train(each.model, each.hybrid, range(2, 4))
    problems = [] if equal(run.model, reference.model) else ["the event changed digits"]
    problems += [] if shares_one_state(run) else ["parts and Hybrid have different states or groups"]
    resumed = run_of(seed=1, shard=shard)
    resumed.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    resumed.hybrid.load_state_dict(copy.deepcopy(run.hybrid.state_dict()))
    for each in (run, resumed):
        train(each.model, each.hybrid, range(4, 6))
    return problems + ([] if equal(run.model, resumed.model) else ["the saved state is not the trained one"])


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("event", SAME)
def test_the_saved_state_is_the_trained_state(event: str, moment: str) -> None:
    assert problems_of(run_of(), moment, SAME[event]) == []


def test_offload_and_reload_keep_the_state() -> None:
    run, reference = run_of(others=False), run_of(others=False)
    for each in (run, reference):
        train(each.model, each.hybrid, range(2))
    run.hybrid.offload()
    train(run.model, run.hybrid, range(2, 3))
    run.hybrid.reload()
    train(run.model, run.hybrid, range(3, 4))
    train(reference.model, reference.hybrid, range(2, 4))
    assert equal(run.model, reference.model)
    assert shares_one_state(run)
    saved, expected = run.hybrid.state_dict()["state"], reference.hybrid.state_dict()["state"]
    assert all(torch.equal(saved[key][name], value) for key, s in expected.items() for name, value in s.items())


@pytest.mark.parametrize("name", [MUON, ADAMW, OTHER])
def test_a_parameter_frozen_at_the_start_trains_after_it_is_thawed(name: str) -> None:
    run = run_of(frozen=name)
    parameter = run.model.get_parameter(name)
    before = parameter.detach().clone()
    train(run.model, run.hybrid, range(2))
    assert torch.equal(parameter, before)
    assert name in run.hybrid.table().splitlines()[-1]
    parameter.requires_grad_(True)
    if name != OTHER:
        with pytest.raises(ValueError, match=r"frozen when the optimizer was built need a gradient now; call rebuild"):
            train(run.model, run.hybrid, range(2, 4))
    run.hybrid.zero_grad()
    run.hybrid.rebuild()
    train(run.model, run.hybrid, range(4, 6))
    assert not torch.equal(parameter, before)
    assert parameter in run.hybrid.state


def test_a_write_to_the_state_reaches_the_part_of_the_parameter() -> None:
    run = run_of()
    parts = run.hybrid.optimizers
    for name, part in ((MUON, "muon"), (ADAMW, "adamw")):
        parameter, values = run.model.get_parameter(name), {"mine": torch.ones(1)}
        assert parameter not in run.hybrid.state
        run.hybrid.state[parameter] = values
        assert parts[part].state[parameter] is run.hybrid.state[parameter] is values
    assert [len(part.state) for part in parts.values()].count(1) == len(run.hybrid.state) == 2
    run.hybrid.state = defaultdict(dict)
    assert not run.hybrid.state
    assert not any(part.state for part in parts.values())
    with pytest.raises(KeyError):
        run.hybrid.state[nn.Parameter(torch.ones(1))]
