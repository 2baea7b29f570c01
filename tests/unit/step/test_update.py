"""The element-wise parts of a step: learning-rate scales, momentum and apply; all parts equal torch.optim.Muon."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.reference_muon import ReferenceMuon
from tests.shared import drawn
from titan_muon import Muon
from titan_muon.algorithms import muon as update

SHAPES = {"tall": (48, 20), "wide": (20, 48), "square": (32, 32), "row": (1, 40), "column": (40, 1), "tiny": (1, 1)}


full = partial(drawn, SHAPES)


def test_the_host_does_not_read_a_rate_on_the_device() -> None:
    """A meta tensor has no value, as the host has none of a GPU's before the queue is done."""
    assert update.rate(torch.tensor([0.5], device="meta")).shape == ()
    assert update.rate(torch.tensor([0.5])) == 0.5


def torch_muon(adjust_lr_fn: str | None, nesterov: bool, weight_decay: float, steps: int) -> tuple[dict, dict]:
    """Parameters and momenta after some steps of torch.optim.Muon."""
    params = {name: torch.nn.Parameter(value) for name, value in full(0).items()}
    optimizer = torch.optim.Muon(
        params.values(), lr=0.02, weight_decay=weight_decay, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn
    )
    for step in range(steps):
        for name, grad in full(step + 1).items():
            params[name].grad = grad
        optimizer.step()
    return params, {name: optimizer.state[param]["momentum_buffer"] for name, param in params.items()}


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_muon_in_a_single_process_equals_torch_optim_muon(
    adjust_lr_fn: str | None, nesterov: bool, weight_decay: float
) -> None:
    """Four steps, bit for bit, of Muon and of the tests' own reference; parameters and momentum; gradients kept."""
    expected, momenta = torch_muon(adjust_lr_fn, nesterov, weight_decay, steps=4)
    params = {name: torch.nn.Parameter(value) for name, value in full(0).items()}
    options: dict[str, Any] = {
        "lr": 0.02,
        "adjust_lr_fn": adjust_lr_fn,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
    }
    optimizer = Muon(params.items(), orthogonalize="reference", **options)
    reference = ReferenceMuon(full(0), **options)
    for step in range(4):
        grads = full(step + 1)
        for name, grad in grads.items():
            params[name].grad = grad.clone()
        optimizer.step()
        reference.step(grads)
        kept = [param.grad for param in params.values() if param.grad is not None]
        assert all(torch.equal(saved, grad) for saved, grad in zip(kept, grads.values(), strict=True))
    for name, param in params.items():
        assert torch.equal(param, expected[name]), name
        assert torch.equal(optimizer.state[param]["momentum_buffer"], momenta[name]), name
        assert torch.equal(reference.params[name], expected[name]), name
        assert torch.equal(reference.average[name], momenta[name]), name


def test_a_stack_is_updated_matrix_by_matrix() -> None:
    """A (3, 20, 12) parameter moves as three (20, 12) parameters do."""
    full, grad = (torch.randn(3, 20, 12, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    stack = torch.nn.Parameter(full.clone())
    separate = {f"w{i}": torch.nn.Parameter(full[i].clone()) for i in range(3)}
    stack.grad = grad.clone()
    for i, param in enumerate(separate.values()):
        param.grad = grad[i].clone()
    Muon([("experts", stack)], lr=0.1, orthogonalize="reference").step()
    Muon(separate.items(), lr=0.1, orthogonalize="reference").step()
    assert torch.equal(stack, torch.stack(tuple(separate.values())))


@pytest.mark.parametrize(
    ("name", "rows", "cols", "value"),
    [
        ("match_rms_adamw", 100, 25, 2.0),
        ("match_rms_adamw", 25, 100, 2.0),
        ("original", 100, 25, 2.0),
        ("original", 25, 100, 1.0),
        (None, 100, 25, 2.0),
        (None, 25, 100, 1.0),
        ("spectral_unclamped", 100, 25, 2.0),
        ("spectral_unclamped", 25, 100, 0.5),
    ],
)
def test_adjust_lr_fns_equal_the_published_formulas(name: str | None, rows: int, cols: int, value: float) -> None:
    assert update.lr_factor(name, rows, cols) == pytest.approx(value)


@pytest.mark.parametrize("name", ["", "rms", "Original", "spectral"])
def test_an_unknown_adjust_lr_fn_lists_the_known_scales(name: str) -> None:
    with pytest.raises(ValueError, match=r"adjust_lr_fn = .*match_rms_adamw, original, spectral_unclamped"):
        update.lr_factor(name, 2, 2)


def test_momentum_is_an_average_and_nesterov_blends_the_gradient_in() -> None:
    average, grad = torch.tensor([[2.0]]), torch.tensor([[4.0]])
    blended = torch.empty_like(grad)
    update.update_momentum([average], [grad], [blended], decay=0.75, nesterov=True)
    assert average.item() == 0.75 * 2 + 0.25 * 4 == 2.5
    assert blended.item() == 0.25 * 4 + 0.75 * 2.5
    assert grad.item() == 4


def test_without_nesterov_the_average_is_orthogonalized() -> None:
    average, packed = torch.tensor([[2.0]]), torch.tensor([[0.0]])
    update.update_momentum([average], [torch.tensor([[4.0]])], [packed], decay=0.5, nesterov=False)
    assert packed.item() == average.item() == 3


def test_momentum_advances_without_a_send_buffer() -> None:
    average = torch.tensor([[2.0]])
    update.update_momentum([average], [torch.tensor([[4.0]])], [], decay=0.5, nesterov=True)
    assert average.item() == 3


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("state", "wire"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_a_bf16_average_or_gradient_advances_in_float32(state: torch.dtype, wire: torch.dtype, nesterov: bool) -> None:
    """The result does not carry the rounding of a bf16 state; the state is the rounded average."""
    start, grad = torch.randn(64, 2).unbind(1)
    average, grad = start.to(state), grad.to(wire)
    exact = average.float().clone()
    expected, blended = torch.empty(64), torch.empty(64)
    update.update_momentum([exact], [grad.float()], [expected], 0.9, nesterov)
    update.update_momentum([average], [grad], [blended], 0.9, nesterov)
    assert torch.equal(blended, expected)
    assert torch.equal(average, exact.to(state))


def test_apply_decays_by_the_unscaled_lr_and_scales_the_update() -> None:
    param, delta = torch.tensor([[10.0]]), torch.tensor([[1.0]], dtype=torch.bfloat16)
    update.add_update([param], [delta], lr=0.5, scale=4.0, weight_decay=0.2)
    assert math.isclose(param.item(), 10 * (1 - 0.5 * 0.2) - 0.5 * 4)
    assert delta.item() == 1
