"""Features by themselves: momentum in 8 bits, the mask of idle matrices, and a GradScaler."""

import math
from collections.abc import Callable
from copy import deepcopy
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from titan_muon import Expert, Muon, clip_grad_norm_
from titan_muon.features.eight_bit import SCALE_BLOCK, decoded, encode


def encoded(momentum: Tensor, step: int = 0, key: int = 7) -> tuple[Tensor, Tensor]:
    rows, cols = momentum.shape
    wide = torch.zeros(rows, -(-cols // SCALE_BLOCK) * SCALE_BLOCK)
    wide[:, :cols] = momentum
    numbers, scales = torch.zeros(rows, cols, dtype=torch.int8), torch.zeros(rows, -(-cols // SCALE_BLOCK))
    encode(wide[:, :cols], numbers, scales, key, step)
    return numbers, scales


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cols", [1, 63, 64, 65, 200])
def test_the_error_of_an_element_is_below_the_scale_of_the_block(cols: int) -> None:
    momentum = drawn(5, cols) * torch.logspace(-8, 3, 5)[:, None]
    numbers, scales = encoded(momentum)
    error = (decoded(numbers, scales) - momentum).abs()
    assert (error <= scales.repeat_interleave(SCALE_BLOCK, 1)[:, :cols]).all()
    assert numbers.abs().amax() == 127


def test_rounding_keeps_the_mean() -> None:
    """Rounding to nearest would lose a change of a tenth of a unit for ever."""
    momentum = torch.full((1, 64), 0.1)
    momentum[0, 0] = 127.0
    draws = torch.stack([decoded(*encoded(momentum, step)) for step in range(2000)])[:, 0, 1:]
    assert abs(draws.mean().item() - 0.1) < 0.01
    assert set(draws.unique().tolist()) == {0.0, 1.0}


def test_a_decoded_momentum_encodes_to_the_same_numbers_for_every_draw() -> None:
    numbers, scales = encoded(drawn(8, 130))
    for step in range(20):
        again, new_scales = encoded(decoded(numbers, scales), step)
        assert torch.equal(again, numbers)
        torch.testing.assert_close(new_scales, scales, rtol=1e-6, atol=0)


def test_nonfinite_elements_become_zero_without_effect_on_the_block() -> None:
    momentum = drawn(2, 64)
    momentum[0, 3], momentum[1, 5] = math.nan, math.inf
    numbers, scales = encoded(momentum)
    assert numbers[0, 3] == numbers[1, 5] == 0
    assert scales.isfinite().all()
    assert (scales < 1).all()


def test_each_step_rounds_the_momentum_by_its_own_draws() -> None:
    param, numbers = nn.Parameter(drawn(16, 96)), []
    muon = Muon([("w", param)], momentum=0.0, state_dtype="int8")
    for _ in range(2):
        param.grad = drawn(16, 96, seed=1)
        muon.step()
        numbers.append(muon.state[param]["momentum_buffer"].clone())
    assert not torch.equal(*numbers)


# The mask of matrices without an update, in float64. Bits: tests/parity


def test_float64_trains_with_a_mask_and_a_clip() -> None:
    param = nn.Parameter(torch.randn(16, 24, dtype=torch.float64))
    muon, before = Muon([("w", param)], expert=Expert(idle="hold")), param.detach().clone()
    param.grad = torch.full_like(param, 1e3)
    assert clip_grad_norm_([param], 1.0) == pytest.approx(1e3 * (16 * 24) ** 0.5)
    muon.step()
    muon.check_last_step()
    assert not torch.equal(param, before)


# A step under a GradScaler leaves nothing behind for the next step


def test_a_plain_step_after_a_failed_scaled_step_has_plain_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(6, 8))
    muon = Muon([("w", param)], weight_decay=0.0)
    plain = muon.engine.step.algorithm

    param.grad = torch.randn(6, 8)
    muon.found_inf, muon.grad_scale = torch.zeros(()), torch.tensor(2.0)
    with monkeypatch.context() as patched:
        patched.setattr(muon.engine.step.mask, "zero_", Mock(side_effect=RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            muon.step()
    del muon.found_inf, muon.grad_scale
    muon.step()
    assert muon.engine.step.algorithm is plain
    assert not torch.equal(param, torch.ones(6, 8)), "the step is not skipped"


COUNTED: dict[str, Callable[[Muon], list[dict[str, int]]]] = {
    "saved": lambda muon: muon.state_dict()["param_groups"],
    "copied": lambda muon: deepcopy(muon).param_groups,
    "checked": lambda muon: muon.check_last_step() or muon.param_groups,
}


@pytest.mark.parametrize("how", COUNTED)
def test_a_skipped_step_is_not_counted(how: str) -> None:
    """The count moves the warm-up of the momentum and the draws of rounding."""
    param = nn.Parameter(torch.ones(6, 8))
    muon = Muon([("w", param)], momentum_warmup_steps=4)
    for skipped in ([False, True, True, False, True], [False]):
        for skips in skipped:
            param.grad = torch.randn(6, 8)
            muon.found_inf = torch.tensor(float(skips))
            muon.step()
        assert [group["step"] for group in COUNTED[how](muon)] == [2 if any(skipped) else 3]
