"""Hybrid takes the schedulers of PyTorch and Transformers, and groups with keys of other packages."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from tests.unit.test_hybrid import OPTIONS, Decoder, train
from titan_muon import Expert, Hybrid

Arguments = Callable[[Hybrid], dict[str, Any]]
TORCH: dict[str, Arguments] = {
    "LambdaLR": lambda hybrid: {"lr_lambda": lambda step: 0.9**step},
    "SequentialLR": lambda hybrid: {
        "schedulers": [torchs.ConstantLR(hybrid), torchs.ExponentialLR(hybrid, 0.9)],
        "milestones": [2],
    },
    "ReduceLROnPlateau": lambda hybrid: {"patience": 0, "factor": 0.5},
    "CyclicLR": lambda hybrid: {"base_lr": 0.001, "max_lr": 0.02, "step_size_up": 3, "cycle_momentum": False},
    "OneCycleLR": lambda hybrid: {"max_lr": 0.02, "total_steps": 9, "cycle_momentum": False},
}
TRANSFORMERS: dict[str, dict[str, Any]] = {"cosine": {}, "warmup_stable_decay": {"num_decay_steps": 7}}


def scheduler_of(name: str, hybrid: Hybrid) -> Any:
    if name in TORCH:
        return getattr(torchs, name)(hybrid, **TORCH[name](hybrid))
    return pytest.importorskip("transformers").get_scheduler(name, hybrid, 1, 10, TRANSFORMERS[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*TORCH, *TRANSFORMERS])
def test_a_scheduler_sets_the_rate_of_every_group(name: str) -> None:
    model = Decoder()
    hybrid = Hybrid(model, **OPTIONS)
    scheduler = scheduler_of(name, hybrid)
    needs_loss = "metrics" in inspect.signature(scheduler.step).parameters
    rates = []
    for step in range(5):
        train(model, hybrid, range(step, step + 1))
        scheduler.step(1.0 + step) if needs_loss else scheduler.step()
        rates.append({float(group["lr"]) for group in hybrid.param_groups})
    assert all(len(of_step) == 1 for of_step in rates), rates
    assert len(set.union(*rates)) > 1, rates


def test_defaults_have_the_rate_and_the_decay() -> None:
    defaults = Hybrid(Decoder(), lr=0.01, weight_decay=0.2).defaults
    assert (defaults["lr"], defaults["weight_decay"]) == (0.01, 0.2)


def test_a_key_of_another_package_passes_through_a_checkpoint() -> None:
    model = Decoder()
    hybrid = Hybrid(model, **OPTIONS)
    for group in hybrid.param_groups:
        group["foreign"] = 0.65
    train(model, hybrid, range(1))
    other = Hybrid(Decoder(1), **OPTIONS)
    other.load_state_dict(hybrid.state_dict())
    assert [group["foreign"] for group in other.param_groups] == [0.65] * 3


def test_the_remedy_for_a_missing_gradient_works_as_written() -> None:
    model = Decoder()
    for expert, error in (
        (Expert(), "expert.on_bad_gradient = 'skip_missing'"),
        (Expert(on_bad_gradient="skip_missing"), None),
    ):
        hybrid = Hybrid(model, expert=expert)
        if error is None:
            hybrid.step()
        else:
            with pytest.raises(ValueError, match=error):
                hybrid.step()


# State dicts of torch.optim.AdamW


def adamw_run(named: bool, groups: int = 1) -> tuple[Decoder, torch.optim.AdamW]:
    model = Decoder()
    params: list[Any] = list(model.named_parameters() if named else model.parameters())
    split = params if groups == 1 else [{"params": params[:3]}, {"params": params[3:]}]
    optimizer = torch.optim.AdamW(split, lr=0.02)
    train(model, optimizer, range(3))
    return model, optimizer


@pytest.mark.parametrize(("named", "groups"), [(False, 1), (True, 1), (True, 2)])
def test_an_adamw_run_continues_under_hybrid(named: bool, groups: int) -> None:
    model, adamw = adamw_run(named, groups)
    other = Decoder(1)
    hybrid = Hybrid(other, **OPTIONS)
    with pytest.warns(UserWarning, match=r"no momentum for layers\.0\.up\.weight, .* and 2 more, whose momentum stays"):
        hybrid.load_state_dict(adamw.state_dict())
    theirs = {name: adamw.state[p] for name, p in model.named_parameters()}
    for name, parameter in other.named_parameters():
        state = hybrid.state.get(parameter, {})
        if "layers" in name and "weight" in name and "norm" not in name:
            assert not state, name
        else:
            assert all(torch.equal(state[key], theirs[name][key]) for key in ("step", "exp_avg", "exp_avg_sq")), name
    train(other, hybrid, range(1))


def test_an_adamw_state_dict_without_names_is_refused_with_several_groups() -> None:
    _, adamw = adamw_run(named=False, groups=2)
    with pytest.raises(
        ValueError, match="its parameters have no names; add to each of its groups the key 'param_names'"
    ):
        Hybrid(Decoder(), **OPTIONS).load_state_dict(adamw.state_dict())


def test_a_state_dict_with_other_groups_loads_by_name() -> None:
    model = Decoder()
    saved = Hybrid(model, decay_vectors=True, **OPTIONS)
    train(model, saved, range(2))
    other = Decoder(1)
    other.load_state_dict(model.state_dict())
    loading = Hybrid(other, **OPTIONS)
    loading.load_state_dict(saved.state_dict())
    assert [group["weight_decay"] for group in loading.param_groups] == [0.1, 0.1, 0.1]
    for optimized, hybrid in ((model, saved), (other, loading)):
        train(optimized, hybrid, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
