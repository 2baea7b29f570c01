"""States of rules: one per matrix on the owner, saved in checkpoints, and unchanged in skipped steps."""

import copy
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.dist.rules.test_rules import equal
from tests.dist.small_params import SECONDS
from tests.reference_muon import ReferenceRule
from tests.shared import drawn, local, message
from titan_muon import Muon, own
from titan_muon.owned import gather

SHAPES = {"wide": (24, 40), "tall": (40, 24), "uneven": (13, 18), "experts": (8, 12, 20)}
RULES: dict[str, dict[str, Any]] = {
    "normuon": {"algorithm": "normuon", "beta2": 0.9},
    "adamuon": {"algorithm": "adamuon", "beta2": 0.9},
    "muonh": {"algorithm": "muonh", "weight_decay": 0.0},
}
STEPS = 3


full = partial(drawn, SHAPES)


class Training:
    """The matrices of SHAPES in a layout (plain, fsdp, hsdp, redundant replicas or owned), and the Muon."""

    def __init__(self, layout: str, world_size: int, seed: int = 0, rule: str = "normuon", **options: Any) -> None:
        self.rule = RULES.get(rule, {"algorithm": rule})
        shape = (2, world_size // 2) if layout in ("hsdp", "redundant") else (world_size,)
        placements: list[Placement] = [Replicate(), Shard(0)][-len(shape) :]
        mesh = None if world_size == 1 else init_device_mesh("cpu", shape)
        self.model = nn.Module()
        for name, value in full(seed).items():
            if mesh is not None and layout in ("fsdp", "hsdp", "redundant"):
                value = distribute_tensor(value, mesh, placements, src_data_rank=None)
            self.model.register_parameter(name, nn.Parameter(value))
        if layout == "owned":
            own(self.model, mesh=mesh, params=self.model.parameters())
        if layout == "redundant":
            options["replicas"] = "redundant"
        self.params = dict(self.model.named_parameters())
        self.muon = Muon(list(self.params.items()), lr=0.02, orthogonalize="reference", **self.rule, **options).build()

    def set_gradients(self, grads: dict[str, Tensor]) -> None:
        """Give parameters the local part of the known gradients, and parameters without a known gradient none."""
        for name, param in self.params.items():
            param.grad = None
            if name in grads and (not isinstance(param, DTensor) or param.to_local().numel()):
                # An owned parameter has a separate mesh, and only the owner has a gradient.
                param.grad = torch.empty_like(param).copy_(self.placed(grads[name], param))

    @staticmethod
    def placed(value: Tensor, param: Tensor) -> Tensor:
        if not isinstance(param, DTensor):
            return value
        return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)

    def step(self, seed: int) -> None:
        self.set_gradients(full(seed))
        self.muon.step()

    def moments(self, name: str) -> list[Tensor]:
        state = self.muon.state[self.params[name]]
        return [local(state[f"second_moment.{index}"]) for index in range(len(state) - 1)]

    def contents(self) -> dict[str, Tensor]:
        """Copies of this rank's weights and states."""
        contents = {}
        for name, param in self.params.items():
            contents[name] = local(param).clone()
            contents |= {f"{name}.{key}": local(value).clone() for key, value in self.muon.state[param].items()}
        return contents

    def changed_since(self, before: dict[str, Tensor]) -> set[str]:
        return {key for key, value in self.contents().items() if not torch.equal(value, before[key])}

    def differs(self, steps: int) -> list[str]:
        """Names with a difference from `steps` of one process: weights, and local second moments."""
        reference = ReferenceRule(full(0), **self.rule)
        for seed in range(1, steps + 1):
            reference.step(full(seed))
        pairs = ((name, gather(param), reference.params[name]) for name, param in self.params.items())
        names = [name for name, ours, expected in pairs if not equal(self.rule["algorithm"], ours, expected)]
        for name, expected in reference.moments.items():
            kept = self.moments(name)
            assert len(kept) == len(expected)
            names += [
                f"{name}: second moment {index}"
                for index, moment in enumerate(kept)
                if moment.numel() and not torch.equal(moment, expected[index])
            ]
        return names

    def kept(self) -> int:
        """Second moments on this rank."""
        return sum(moment.numel() > 0 for name in self.params for moment in self.moments(name))


def train(rank: int, world_size: int, layout: str) -> dict[str, tuple[list[str], int, int]]:
    """By rule: the differences, the second moments on this rank, and the collectives of the last step."""
    results = {}
    for rule in RULES:
        training = Training(layout, world_size, rule=rule)
        for seed in range(1, STEPS + 1):
            calls = training.muon.exchange.collectives.traffic.calls
            training.step(seed)
        calls = training.muon.exchange.collectives.traffic.calls - calls
        results[rule] = training.differs(STEPS), training.kept(), calls
    return results


MATRICES = 3 + SHAPES["experts"][0]


@pytest.mark.parametrize(("layout", "world_size"), [("owned", 2), ("owned", 4), ("plain", 2)])
def test_owned_matrices_and_plain_copies_equal_the_reference(layout: str, world_size: int) -> None:
    """Only the owner has the second moment of a matrix. Owned matrices need no collective for any rule."""
    ranks = run_ranks(train, world_size, layout, timeout=SECONDS)
    for rule in RULES:
        assert [result[rule][0] for result in ranks] == [[]] * world_size, rule
        assert sum(result[rule][1] for result in ranks) == (0 if rule == "muonh" else MATRICES)
        assert layout != "owned" or all(result[rule][2] == 0 for result in ranks)


STAGES: list[tuple[int, list[str]]] = [
    (4, ["fsdp", "hsdp", "owned", "redundant"]),
    (2, ["plain", "fsdp"]),
    (1, ["plain"]),
    (2, ["owned"]),
]
"""Worlds and layouts; each layout continues the checkpoint of the previous layout."""


def saved(training: Training, path: str) -> dict[str, Any]:
    """The state saved and loaded by PyTorch's checkpoints or TorchTitan's."""
    if path == "titan":
        # Imported on the ranks, because a module-level import would run before `compat.install`.
        from torchtitan.components.optimizer.utils import get_flat_optim_state_dict

        return {"model": training.model.state_dict(), "optimizer": get_flat_optim_state_dict(training.muon)}
    return {
        "model": training.model.state_dict(),
        "optimizer": get_optimizer_state_dict(training.model, training.muon),
    }


def load(training: Training, folder: str, path: str) -> None:
    state = saved(training, path)
    dcp.load(state, checkpoint_id=folder)
    if path == "titan":
        from torchtitan.components.optimizer.utils import load_flat_optim_state_dict

        load_flat_optim_state_dict(training.muon, state["optimizer"])
    else:
        set_optimizer_state_dict(training.model, training.muon, state["optimizer"])


def go_on(rank: int, world_size: int, layouts: list[str], trained_steps: int, folder: str) -> dict[str, list[str]]:
    """A step in each layout from the last checkpoint, and differences from one process."""
    differences = {}
    for path, rule in (("torch", "normuon"), ("titan", "normuon"), ("titan", "adamuon"), ("titan", "muonh")):
        for steps, layout in enumerate(layouts, start=trained_steps + 1):
            # Random weights, momentum and second moments, so that a missing load is noticed.
            training = Training(layout, world_size, seed=0 if steps == 1 else 1, rule=rule)
            if steps > 1:
                training.step(90)
                load(training, f"{folder}/{path}{rule}{steps - 1}", path)
            training.step(steps)
            differences[f"{path} {rule} {layout}"] = training.differs(steps)
            dcp.save(saved(training, path), checkpoint_id=f"{folder}/{path}{rule}{steps}")
    return differences


def test_checkpoints_load_in_every_layout_and_world(tmp_path: Path) -> None:
    """Each layout continues another layout's checkpoint, like an uninterrupted process."""
    steps = 0
    for world_size, layouts in STAGES:
        for differences in run_ranks(go_on, world_size, layouts, steps, str(tmp_path), timeout=4 * SECONDS):
            assert differences == {key: [] for key in differences}, world_size
            assert len(differences) == 4 * len(layouts)
        steps += len(layouts)


def resume(rank: int, world_size: int, layout: str) -> tuple[list[str], bool, bool, str]:
    """Differences after the load of a state dict, whether in place, and the refusal of Muon's state dict."""
    training = Training(layout, world_size)
    training.step(1)
    training.step(2)
    kept = copy.deepcopy(training.muon.state_dict())
    weights = [local(param).clone() for param in training.params.values()]
    training.step(90)
    for param, value in zip(training.params.values(), weights, strict=True):
        local(param).copy_(value)
    storage = [moment.data_ptr() for name in SHAPES for moment in training.moments(name)]
    training.muon.load_state_dict(kept)
    in_place = storage == [moment.data_ptr() for name in SHAPES for moment in training.moments(name)]
    training.step(3)
    differs = training.differs(3)
    plain = Training(layout, world_size, rule="muon")
    plain.step(1)
    before = training.contents()
    refused = message(lambda: training.muon.load_state_dict(plain.muon.state_dict()))
    return differs, in_place, bool(training.changed_since(before)), refused


@pytest.mark.parametrize("layout", ["fsdp", "owned", "plain"])
def test_a_rules_state_dict_is_loaded_in_place_and_a_state_dict_of_muon_is_refused(layout: str) -> None:
    for differs, in_place, changed, refused in run_ranks(resume, 2, layout, timeout=SECONDS):
        assert differs == []
        assert in_place
        assert not changed, "it is refused before anything is loaded"
        assert "wide: the state dict has no second_moment.0" in refused


def freeze(rank: int, world_size: int, layout: str) -> tuple[bool, list[str]]:
    """Whether freezing a matrix moved second moments to or from this rank, and the differences a step later."""
    training = Training(layout, world_size)
    training.step(1)
    before = [moment.numel() for name in SHAPES for moment in training.moments(name)]
    training.params["wide"].requires_grad_(False)
    training.muon.load_state_dict(training.muon.state_dict())
    moved = before != [moment.numel() for name in SHAPES for moment in training.moments(name)]
    training.step(2)
    return moved, training.differs(2)


@pytest.mark.parametrize("layout", ["fsdp", "plain"])
def test_second_moments_move_to_the_owners_of_a_new_plan(layout: str) -> None:
    for moved, differs in run_ranks(freeze, 2, layout, timeout=SECONDS):
        assert moved, "freeze another matrix, or the test shows nothing"
        assert {name.partition(":")[0] for name in differs} == {"wide"}, "only the frozen one stays behind"


def elsewhere(rank: int, world_size: int) -> list[str]:
    """The errors of reading whole second moments on a rank without the moments."""
    training, messages = Training("fsdp", world_size), []
    for param in training.params.values():
        moment = training.muon.state[param]["second_moment.0"]
        if not moment.to_local().numel():
            messages.append(message(moment.full_tensor))
    return messages


def test_reading_a_second_moment_on_another_rank_is_an_error() -> None:
    for messages in run_ranks(elsewhere, 2, timeout=SECONDS):
        assert messages
        assert all("load the state with torch.distributed.checkpoint" in text for text in messages)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_skipped_by_a_grad_scaler_changes_no_tensor(rule: str) -> None:
    """Weights, momentum and second moments, with finite and non-finite gradients."""
    training = Training("plain", 1, rule=rule)
    training.step(1)
    for bad in (1.0, math.inf):
        before = training.contents()
        training.set_gradients({name: bad * grad for name, grad in full(2).items()})
        # As torch.amp.GradScaler does for the time of a step.
        training.muon.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
        training.muon.found_inf = torch.ones(1)  # type: ignore[attr-defined]
        training.muon.step()
        del training.muon.grad_scale, training.muon.found_inf  # type: ignore[attr-defined]
        assert training.changed_since(before) == set()
    training.step(2)
    assert training.differs(2) == []


def test_a_nonfinite_gradient_is_reported_under_every_rule() -> None:
    for rule in RULES:
        training = Training("plain", 1, rule=rule)
        grads = full(1)
        grads["tall"][-1, 0] = math.inf
        training.set_gradients(grads)
        training.muon.step()
        assert "tall: gradient or momentum was not finite" in message(training.muon.check_last_step), rule


def test_a_matrix_of_zeros_under_muonh_is_an_error_after_the_step() -> None:
    """The norm would stay 0."""
    training = Training("plain", 1, rule="muonh")
    training.params["experts"].data[3].zero_()
    training.step(1)
    assert "experts: a matrix of zeros, which keeps the norm 0" in message(training.muon.check_last_step)


def test_muonh_keeps_the_norm_of_weights_over_100_steps() -> None:
    training = Training("plain", 1, rule="muonh")
    before = {name: param.norm(dim=(-2, -1)) for name, param in training.params.items()}
    for seed in range(1, 101):
        training.step(seed)
    for name, param in training.params.items():
        torch.testing.assert_close(param.norm(dim=(-2, -1)), before[name], rtol=1e-5, atol=0)
        assert not torch.allclose(param, full(0)[name], atol=0.1)


SPOILED = 2
"""The expert with a non-finite gradient."""


def spoil(rank: int, world_size: int, layout: str) -> dict[str, set[str]]:
    """Unchanged local second moments after a step, by kind of bad gradient."""
    results = {}
    for choice in ("error", "skip"):
        training = Training(layout, world_size, missing_grad=choice, nonfinite=choice)
        training.step(1)
        grads = full(2)
        grads["experts"][SPOILED, 3, 4] = math.nan
        grads["tall"][-1, 0] = math.inf
        training.set_gradients(grads)
        # Missing everywhere, or on a rank where missing_grad reports an error in the next step.
        if choice == "skip" or rank == world_size - 1:
            training.params["wide"].grad = None
        before = {key: value for key, value in training.contents().items() if value.numel() and "moment." in key}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training.muon.step()
        after = training.contents()
        results[choice] = {key for key, value in before.items() if torch.equal(after[key], value)}
    return results


def test_a_bad_gradient_leaves_the_second_moment_of_the_matrix_unchanged() -> None:
    """Second moments of the finite matrices advance."""
    ranks = run_ranks(spoil, 2, "fsdp", timeout=SECONDS)
    for choice in ("error", "skip"):
        stood = set.union(*(result[choice] for result in ranks))
        assert stood == {"wide.second_moment.0", "tall.second_moment.0", f"experts.second_moment.{SPOILED}"}
