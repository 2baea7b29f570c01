"""Weights in bfloat16: rounding is right on average, and equal in any batch. Bits after a resume: tests/parity."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.shared import muon_keywords
from tests.unit.step.test_first_use import train
from titan_muon import Muon
from titan_muon.engine.step.algorithm import Tensors
from titan_muon.engine.step.rounding import chunk_of, hash_counts, memory_bytes

SHAPES = {"wide": (24, 40), "tall": (33, 10), "experts": (3, 8, 12)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "orthogonalize": "reference"}


def parameters(dtype: torch.dtype = torch.bfloat16) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}


def scaled_sum(params: Tensors, updates: Tensors, keep: float, alpha: float) -> None:
    """params <- keep params + alpha updates."""
    torch._foreach_mul_(params, keep)
    torch._foreach_add_(params, updates, alpha=alpha)


def drawn(values: Tensor, updates: Tensor, keep: float, alpha: float, steps: range) -> Tensor:
    """Draws of the steps on equal values: (steps, *shape)."""
    chunk = chunk_of([values.shape], [7], torch.empty(memory_bytes(values), dtype=torch.uint8))
    draws = []
    for number in steps:
        param = values.clone()
        chunk.update([param], [updates], partial(scaled_sum, keep=keep, alpha=alpha), number)
        draws.append(param)
    return torch.stack(draws)


def test_the_mean_of_many_draws_is_the_unrounded_value() -> None:
    values, updates = (torch.randn(40, 50, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    exact = (values.double() * 0.99 - 3e-3 * updates.double()).float()
    draws = drawn(values, updates, 0.99, -3e-3, range(1000))
    below = (exact.view(torch.int32) & -65536).view(torch.float32)
    above = ((exact.view(torch.int32) & -65536) + 65536).view(torch.float32)
    assert ((draws == below) | (draws == above)).all(), "one of the two neighbours"
    # Of 1,000 draws the mean is off by 1/2 / sqrt(1000) of a step at most, in one standard deviation.
    off = (draws.double().mean(0) - exact) / (above - below)
    assert off.abs().max() < 5 * 0.5 / math.sqrt(1000)
    assert off.mean().abs() < 5 * 0.5 / math.sqrt(1000 * off.numel())


def test_draws_are_the_hash_of_the_count_in_32_bits() -> None:
    """The kernels compute the same."""
    counts = torch.tensor([0, 1, 2, 12345, 2**31 - 1], dtype=torch.int32)
    expected = []
    for count in counts.tolist():
        first = count * 0x9E3779B1 % 2**32
        # The shift of a signed number keeps the sign.
        first ^= (first - (first >= 2**31) * 2**32 >> 15) % 2**32
        expected.append(first * 0x85EBCA6B % 2**32 >> 16)
    assert hash_counts(counts, torch.empty_like(counts)).tolist() == expected


def test_the_rounding_errors_of_a_matrix_are_uncorrelated() -> None:
    """The largest singular value of (n, n) noise is 2 sqrt(n) standard deviations; a pattern has up to n."""
    values = torch.full((256, 256), 1.0).bfloat16()
    errors = drawn(values, torch.zeros_like(values), 1 + 2**-9, 0.0, range(1))[0].double() - (1 + 2**-9)
    assert torch.linalg.matrix_norm(errors, 2) < 1.1 * 2 * math.sqrt(256) * errors.std()


def test_nonfinite_values_stay_nonfinite() -> None:
    values = torch.tensor([[math.inf, -math.inf, math.nan, 1.0]]).bfloat16()
    updates = torch.zeros(1, 4)
    # All bits set, as written by CUDA: a draw would count on from there to zero.
    updates[0, 3] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    for param in drawn(values, updates, 1.0, 1.0, range(50)):
        assert param[0, :2].tolist() == [math.inf, -math.inf]
        assert param[0, 2:].isnan().all()


def shrunk(**options: Any) -> float:
    """Weights after 60 steps of decay alone, each below half a bfloat16 spacing."""
    params = parameters()
    muon = Muon(
        list(params.items()), **muon_keywords(lr=1e-3, weight_decay=1.0, momentum=0.0, ns_dtype="float32", **options)
    )
    before = torch.cat([param.detach().flatten() for param in params.values()]).double().norm()
    for param in params.values():
        param.grad = torch.zeros_like(param)
    for _ in range(60):
        muon.step()
    return float(torch.cat([param.detach().flatten() for param in params.values()]).double().norm() / before)


def test_updates_below_half_a_step_add_up() -> None:
    assert shrunk() == pytest.approx((1 - 1e-3) ** 60, rel=2e-3)
    assert shrunk(rounding="nearest") == 1.0, "to the nearest, no weight ever moves"


def test_a_checkpoint_without_a_draw_count_is_loaded() -> None:
    params = parameters()
    muon = Muon(list(params.items()), **muon_keywords(**OPTIONS)).build()
    state = muon.state_dict()
    del state["param_groups"][0]["step"]
    muon.load_state_dict(state)
    train(muon, params, range(1))


def test_the_count_of_steps_is_kept_only_for_bfloat16() -> None:
    """Checkpoints of float32 weights keep the same keys."""
    for dtype, rounding in ((torch.float32, "stochastic"), (torch.bfloat16, "nearest")):
        muon = Muon(list(parameters(dtype).items()), **muon_keywords(rounding=rounding, **OPTIONS)).build()
        assert "step" not in muon.param_groups[0]
