"""Muon under torch.amp.GradScaler: skipped steps, on all ranks and on a single rank."""

import math
from typing import Any

import pytest
import torch
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, named, parameters, set_gradients
from titan_muon import Muon

SCALE = 2.0**10


def scaled(params: dict[str, Parameter], factor: float) -> None:
    """Multiply this rank's part of each gradient in place."""
    for param in params.values():
        param.grad.to_local().mul_(factor)  # type: ignore[union-attr]


def contents(params: dict[str, Parameter], muon: Muon) -> list[torch.Tensor]:
    """Copies of this rank's weights and states."""
    averages = [muon.state[param]["momentum_buffer"] for param in params.values()]
    return [tensor.to_local().detach().clone() for tensor in (*params.values(), *averages)]  # type: ignore[attr-defined]


def same(first: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def train(rank: int, world_size: int, unscales: bool, options: dict[str, Any]) -> list[Any]:
    """Whether each of three steps changed something and is as without a scaler; the second has bad gradients."""
    mesh = init_device_mesh("cpu", (world_size,))
    params, plain = parameters(mesh), parameters(mesh)
    muon, other = Muon(named(params), **options).build(), Muon(named(plain), **options).build()
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
    events: list[Any] = []
    for seed, bad in enumerate((False, True, False), start=1):
        set_gradients(params, mesh, seed)
        set_gradients(plain, mesh, seed)
        # The gradients of a backward pass from a scaled loss.
        scaled(params, scaler.scale(torch.ones(())).item())
        if bad:
            scaled(params, math.inf)
        before = contents(params, muon)
        if unscales:
            scaler.unscale_(muon)
        scaler.step(muon)
        scaler.update()
        if not bad:
            other.step()
        events.append("stood" if same(before, contents(params, muon)) else "stepped")
        events.append(same(contents(params, muon), contents(plain, other)))
    return events


@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize(
    "options", [{}, {"offload": "state"}, {"offload": "parameters"}, {"state_dtype": "bfloat16"}], ids=str
)
def test_a_step_skipped_on_every_rank_changes_no_weight(unscales: bool, options: dict[str, Any]) -> None:
    """The remaining steps have the bits of a run without a scaler, because the scale is a power of two."""
    for events in run_ranks(train, 2, unscales, options, timeout=SECONDS):
        assert events == ["stepped", True, "stood", True, "stepped", True]


def skip_on_one_rank(rank: int, world_size: int) -> tuple[bool, str]:
    """Whether a step skipped by rank 1 changed anything here, and the error."""
    params = parameters(init_device_mesh("cpu", (world_size,)))
    muon = Muon(named(params)).build()
    before = contents(params, muon)
    # Like a scaler with this rank's gradients only; over DTensors, GradScaler reduces its result.
    muon.grad_scale, muon.found_inf = None, torch.tensor([float(rank == 1)])  # type: ignore[attr-defined]
    muon.step()
    del muon.grad_scale, muon.found_inf  # type: ignore[attr-defined]
    changed = not same(before, contents(params, muon))
    try:
        muon.step()
    except ValueError as error:
        return changed, str(error)
    return changed, ""


def test_a_step_skipped_on_a_single_rank_is_an_error_on_every_rank_in_the_next_step() -> None:
    results = run_ranks(skip_on_one_rank, 2, timeout=SECONDS)
    assert [changed for changed, _ in results] == [True, False]
    assert all("only some ranks skipped a step" in message for _, message in results)
