"""Algorithms are separate files, chosen by name, with separate scales and schedules; SOAP on one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.reference_muon import ReferenceSoap
from tests.unit.test_refusals import Own, WithOptions
from titan_muon import Expert, Muon, registry
from titan_muon.algorithms.second_moment import NorMuon
from titan_muon.algorithms.soap import Soap
from titan_muon.engine.layout.work import Work
from titan_muon.options import MuonOptions
from titan_muon.selection import algorithm_of

SCHEDULES: dict[str, tuple[Callable[[Muon], Any], float | None]] = {
    # A scheduler, and the highest rate if it is known.
    "LambdaLR": (lambda muon: lr_scheduler.LambdaLR(muon, lambda step: (0.5, 1.0, 0.25, 0.0)[step]), 0.02),
    "OneCycleLR": (lambda muon: lr_scheduler.OneCycleLR(muon, 0.5, total_steps=5, cycle_momentum=False), 0.5),
    "by hand": (lambda muon: muon.param_groups[0].update(max_lr=0.1), 0.1),
    "no scheduler": (lambda muon: None, None),
    "CyclicLR": (lambda muon: lr_scheduler.CyclicLR(muon, 0.02, 2.0, step_size_up=4, cycle_momentum=False), None),
    "layer decay": (lambda muon: muon.param_groups[0].update(initial_lr=0.02, lr_scale=0.5), None),
}


def decaying(lr: float | Tensor = 0.02) -> tuple[nn.Parameter, Muon]:
    param = nn.Parameter(torch.ones(16, 24))
    param.grad = torch.ones(16, 24)
    return param, Muon([("w", param)], lr=lr, weight_decay=0.5, expert=Expert(decay_follows_lr=True))


@pytest.mark.parametrize("name", [name for name, (_, highest) in SCHEDULES.items() if highest is not None])
def test_decay_follows_lr_takes_the_highest_rate_of_the_schedule(name: str) -> None:
    _, muon = decaying()
    schedule, highest = SCHEDULES[name]
    scheduler = schedule(muon)
    for _ in range(3):
        lr = muon.param_groups[0]["lr"]
        assert muon._algorithm.rates(muon.param_groups[0]) == pytest.approx((lr, 0.5 * lr / highest))
        muon.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("name", [name for name, (_, highest) in SCHEDULES.items() if highest is None])
def test_decay_follows_lr_without_the_highest_rate_is_refused(name: str) -> None:
    _, muon = decaying()
    scheduler = SCHEDULES[name][0](muon)
    if scheduler is not None:
        muon.step()
        scheduler.step()
    with pytest.raises(ValueError, match=r"w: expert.decay_follows_lr = True needs the highest .* group\['max_lr'\]"):
        muon.step()
    muon.param_groups[0]["max_lr"] = 2.0
    muon.step()


def test_a_tensor_rate_decays_as_a_number() -> None:
    pairs = [decaying(lr) for lr in (0.02, torch.tensor(0.02))]
    for _, muon in pairs:
        lr_scheduler.ConstantLR(muon, factor=0.5)
        muon.step()
    torch.testing.assert_close(*(param.detach() for param, _ in pairs))


def matrices(seed: int, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    """A (16, 24) matrix for each group."""
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(16, 24, generator=generator)) for _ in groups]
    return [{"params": [(f"w{i}", param)], **group} for i, (param, group) in enumerate(zip(made, groups, strict=True))]


def stepped(muon: Muon, seed: int) -> Muon:
    """The optimizer after a step on random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for group in muon.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(16, 24, generator=generator).to(param.dtype)
    muon.step()
    return muon


def test_a_plan_for_another_algorithm_has_a_momentum() -> None:
    undecayed = {"weight_decay": 0.0}
    muon, alone = Muon(matrices(0, {}, {"algorithm": "soap", **undecayed})), Muon(matrices(0, {}, undecayed))
    # SOAP's first step makes no update.
    stepped(muon, 0)
    muon.param_groups[1]["algorithm"] = ["muon"]
    muon.rebuild()
    stepped(muon, 1)
    stepped(alone, 1)
    assert torch.equal(muon.param_groups[1]["params"][0], alone.param_groups[1]["params"][0])


def test_another_algorithm_starts_with_new_states_of_its_own_shapes() -> None:
    muon = stepped(Muon(matrices(0, {"algorithm": "normuon"})), 0)
    muon.param_groups[0]["algorithm"] = "adamuon"
    muon.rebuild()
    (param,) = muon.param_groups[0]["params"]
    assert torch.equal(muon.state[param]["second_moment.0"], torch.zeros(16, 24))


def test_a_state_that_a_load_rounded_for_a_frozen_parameter_is_kept_in_float32() -> None:
    params = [(name, nn.Parameter(torch.ones(16, 24, dtype=torch.bfloat16))) for name in ("frozen", "trained")]
    muon = stepped(Muon(params, algorithm="normuon"), 0)
    (_, frozen), before = params[0], muon.state[params[0][1]]["second_moment.0"].clone()
    frozen.requires_grad_(False)
    muon.rebuild()
    muon.load_state_dict(copy.deepcopy(muon.state_dict()))
    frozen.requires_grad_(True)
    muon.rebuild()
    torch.testing.assert_close(muon.state[frozen]["second_moment.0"], before, rtol=2**-7, atol=0)


def test_an_option_of_a_frozen_algorithm_stays_in_use() -> None:
    muon = stepped(Muon(matrices(0, {}, {"algorithm": "soap"}), expert=Expert(soap_freq=5)), 0)
    muon.param_groups[1]["params"][0].requires_grad_(False)
    muon.rebuild()
    assert [work.wire_bytes for work in muon.plan.works] == [2]


def test_an_algorithm_of_a_package_travels_in_its_dtype_and_weighs_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(NorMuon):
        wire_dtype = "float32"

        def work(self, rows: int, cols: int, work: Work) -> Work:
            return Work("svd", 20 * rows * cols)

    monkeypatch.setitem(registry.algorithms._values, "wide", Wide)
    (work,) = Muon(matrices(0, {"algorithm": "wide"})).plan.works
    assert (work.wire_bytes, work.state_bytes) == (4, 4 * 16)


def test_loading_keeps_the_algorithm_of_a_group() -> None:
    groups = {}, {"algorithm": ["normuon", "muoneq"]}
    saved, alone = stepped(Muon(matrices(0, *groups)), 0), stepped(Muon(matrices(0, {}, {})), 0)
    loading = stepped(Muon(matrices(0, *groups)), 1)
    state = copy.deepcopy(saved.state_dict())
    del state["param_groups"][1]["algorithm"]
    loading.load_state_dict(state)
    assert loading.param_groups[1]["algorithm"] == ["normuon", "muoneq"]
    moments = [muon.state[muon.param_groups[1]["params"][0]]["second_moment.0"] for muon in (saved, loading)]
    assert torch.equal(*moments)
    alone.load_state_dict(saved.state_dict())
    assert "algorithm" not in alone.param_groups[1]


def test_the_options_of_a_registered_algorithm_reach_it_as_its_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.algorithms._values, "mine", WithOptions)
    mine: dict[str, Any] = {"algorithm": "mine"}
    for given, own in (({}, Own()), ({"mine": {"share": 0, "form": "b"}}, Own(0.0, "b"))):
        expert = Expert(algorithm_options=given)
        for muon in (Muon(matrices(0, {}), expert=expert, **mine), Muon(matrices(0, mine), expert=expert)):
            assert algorithm_of(muon.options, muon.param_groups).own == own
    assert algorithm_of(Muon(matrices(0, {})).options).own is None


# SOAP on one process: one-sided matrices, the ridge, and options that do not fit. Bits: tests/parity


def soap(**options: Any) -> tuple[nn.Parameter, Muon]:
    muon = Muon(matrices(0, {"algorithm": "soap"}), expert=Expert(**options))
    return muon.param_groups[0]["params"][0], muon


def test_a_long_side_has_no_average_and_no_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Soap, "max_side", 20)
    param, muon = soap(soap_freq=2)
    muon.param_groups[0]["lr"] = 0.02
    reference = ReferenceSoap({"w0#0": param.detach().clone()}, soap_freq=2, max_side=20)
    for seed in range(1, 5):
        stepped(muon, seed)
        reference.step({"w0#0": param.grad})
    assert torch.equal(param, reference.params["w0#0"])
    shapes = {name: tuple(state.shape) for name, state in muon.state[param].items()}
    assert shapes["soap_basis_rows.0"] == (16, 16)
    assert not any("cols" in name for name in shapes)


def test_the_first_bases_are_a_continuous_function_of_the_gradient() -> None:
    """The Gram matrix of columns is singular in the first step, and one rounding would turn eigenvectors at will."""
    pairs, (before, _) = [soap(soap_freq=2) for _ in range(2)], soap()
    for noise, (param, muon) in zip((0.0, 6e-8), pairs, strict=True):
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            grad, other = (torch.randn(16, 24, generator=generator) for _ in range(2))
            param.grad = grad * (1 + noise * other)
            muon.step()
    (first, _), (second, _) = pairs
    assert 0 < (first - second).norm() / (first - before).norm() < 2e-3


def test_gradients_travel_in_float32_and_states_weigh_in_the_plan() -> None:
    _, muon = soap()
    (work,) = muon.plan.works
    assert "float32" not in muon.plan.reason, "without other ranks nothing travels"
    assert work.wire_bytes == 4
    assert work.state_bytes == 4 * (2 * 16**2 + 2 * 24**2 + 2 * 16 * 24 + 1)


@pytest.mark.parametrize("name", ["normuon", "adamuon"])
def test_a_matrix_without_an_update_keeps_its_second_moment(name: str) -> None:
    algorithm = algorithm_of(MuonOptions(algorithm=name))
    (spec,) = algorithm.states(4, 3, transposed=False)
    moments = torch.full((2, *spec.shape), 0.5)
    algorithm.rescale(torch.stack([torch.zeros(4, 3), torch.ones(4, 3)]), {spec.name: moments}, {}, transposed=False)
    assert moments[0].eq(0.5).all()
    assert moments[1].ne(0.5).all()
