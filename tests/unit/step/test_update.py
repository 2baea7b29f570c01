"""Parts of a step: arithmetic of momentum and rounding, ranges of a profiler, and numbers of operators and copies."""

import math
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.shared import Operators, muon_keywords
from tests.unit.step.test_first_use import OPTIONS, parameters, train
from titan_muon import Muon
from titan_muon.engine.orthogonalize import NO_UPDATE
from titan_muon.engine.step import muon as update
from titan_muon.engine.step import step as step_module
from titan_muon.engine.step.algorithm import Tensors
from titan_muon.engine.step.gradients import StepGradients
from titan_muon.engine.step.step import UpdateMask
from titan_muon.engine.step.views import Batch, strided
from titan_muon.features.rounding import StochasticRounding
from titan_muon.kernels.draws import hash_counts


def test_the_host_does_not_read_a_rate_on_the_device() -> None:
    """A meta tensor has no value, as the host has none of a GPU's before the queue is done."""
    assert update.rate(torch.tensor([0.5], device="meta")).shape == ()
    assert update.rate(torch.tensor([0.5])) == 0.5


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


def made(layers: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Muon:
    """With gradients, the same each time."""
    generator, params = torch.Generator().manual_seed(0), {}
    for layer in range(layers):
        for name, shape in {"square": (8, 8), "wide": (4, 12), "tall": (12, 4), "experts": (3, 4, 6)}.items():
            value, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            params[f"{layer}.{name}"] = param = nn.Parameter(value)
            param.grad = grad
    return Muon(params.items(), **muon_keywords(**options))


def test_a_trace_shows_every_stage_of_every_bucket() -> None:
    muon = made()
    muon.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        muon.step()
    names = {event.key for event in profiler.key_averages() if event.key.startswith("Muon.")}
    buckets = range(len(muon.engine.rank.program.buckets))
    stages = ("advance", "gather", "orthogonalize", "send_back", "apply")
    assert names == {"Muon.check", "Muon.tell", *(f"Muon.{stage} bucket {b}" for stage in stages for b in buckets)}


def test_a_step_makes_no_range_unless_a_profiler_records(monkeypatch) -> None:
    recorded = Mock()
    monkeypatch.setattr(step_module, "record_function", recorded)
    made().step()
    assert not recorded.called


def operators(layers: int, dtype: torch.dtype = torch.float32, **options: Any) -> Counter[str]:
    """Of a step."""
    muon = made(layers, dtype, **options)
    muon.step()
    with Operators() as counter:
        muon.step()
    return Counter({str(operator): count for operator, count in counter.counts.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}, {"on_bad_gradient": "skip_step"}], ids=str)
def test_a_step_makes_no_more_operators_for_more_matrices(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Except views of gradient stacks, and conversions of lists to another dtype."""
    few, many = operators(2, dtype, **options), operators(4, dtype, **options)
    # Four matrices per stack: a batch of a shape takes all stacks, with one call per operator.
    growing = {name for name in many if many[name] > few[name]}
    assert growing <= {"aten.view.default", "aten.slice.Tensor", "aten.empty_like.default"}, many - few
    assert dtype == torch.bfloat16 or many["aten.nan_to_num_.default"] == 0


def test_the_old_content_of_the_workspace_is_no_fault_of_a_parameter_that_a_step_leaves_out() -> None:
    whole = torch.stack([torch.full((4, 3), torch.nan), torch.ones(4, 3)])
    broken = torch.zeros(2, dtype=torch.bool)
    batch = Batch((0, 1), whole, whole, (0, 1), broken, 0, torch.float32, iterate=lambda: whole, parts=())
    norms = UpdateMask().zero_(batch, StepGradients([None, None], frozenset([0]), uniform=False, params=()))
    assert norms.tolist() == [NO_UPDATE, pytest.approx(12**0.5)]
    assert not broken.any()
    assert whole[0].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [0, 3, 15])
@pytest.mark.parametrize("cols", [4, 3])
def test_pieces_of_all_ranks_are_assembled_in_at_most_three_copies(dtype: torch.dtype, own: int, cols: int) -> None:
    """Four matrices from 16 ranks. The own pieces come first in the buffer."""
    matrices, ranks, rows = 4, 16, 2
    buffer = torch.randn(matrices * ranks * rows * cols).to(dtype)
    pieces = buffer.view(ranks, matrices, rows, cols)
    order = [own, *(rank for rank in range(ranks) if rank != own)]
    whole, expected = (torch.zeros(matrices, ranks * rows, cols, dtype=dtype) for _ in range(2))
    pairs = [
        (pieces[place, matrix], whole[matrix, rank * rows : (rank + 1) * rows])
        for matrix in range(matrices)
        for place, rank in enumerate(order)
    ]
    for source, target in pairs:
        expected.view(-1).as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
    copies = strided(pairs)
    assert len(copies) <= 3
    for source, target in copies:
        target.copy_(source)
    assert torch.equal(whole, expected)


# Weights in bfloat16. Bits after a resume: tests/parity


def drawn(values: Tensor, updates: Tensor, keep: float, alpha: float, steps: range) -> Tensor:
    """Draws of the steps on keep * values + alpha * updates: (steps, *shape)."""

    def scaled_sum(params: Tensors, updates: Tensors) -> None:
        torch._foreach_mul_(params, keep)
        torch._foreach_add_(params, updates, alpha=alpha)

    rounding = StochasticRounding()
    scratch = torch.empty(rounding.memory_bytes(values), dtype=torch.uint8)
    chunk = rounding.chunk([values.shape], [7], scratch)
    draws = [values.clone() for _ in steps]
    for number, param in zip(steps, draws, strict=True):
        chunk.update([param], [updates], scaled_sum, number)
    return torch.stack(draws)


def test_the_mean_of_many_draws_is_the_unrounded_value() -> None:
    values, updates = (torch.randn(40, 50, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    exact = (values.double() * 0.99 - 3e-3 * updates.double()).float()
    draws = drawn(values, updates, 0.99, -3e-3, range(1000))
    below, above = (((exact.view(torch.int32) & -65536) + more).view(torch.float32) for more in (0, 65536))
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
    param = nn.Parameter(torch.randn(40, 80).bfloat16())
    options |= {"lr": 1e-3, "weight_decay": 1.0, "momentum": 0.0, "ns_dtype": "float32"}
    muon, before = Muon([("w", param)], **muon_keywords(**options)), param.detach().double().norm()
    param.grad = torch.zeros_like(param)
    for _ in range(60):
        muon.step()
    return float(param.detach().double().norm() / before)


def test_updates_below_half_a_step_add_up() -> None:
    assert shrunk() == pytest.approx((1 - 1e-3) ** 60, rel=2e-3)
    assert shrunk(rounding="nearest") == 1.0, "to the nearest, no weight ever moves"


def test_a_checkpoint_without_a_draw_count_is_loaded() -> None:
    params = parameters(dtype=torch.bfloat16)
    muon = Muon(params.items(), **muon_keywords(**OPTIONS)).build()
    state = muon.state_dict()
    del state["param_groups"][0]["step"]
    muon.load_state_dict(state)
    train(muon, params, range(1))


def test_the_count_of_steps_is_kept_only_for_bfloat16() -> None:
    """Checkpoints of float32 weights keep the same keys."""
    for dtype, rounding in ((torch.float32, "stochastic"), (torch.bfloat16, "nearest")):
        muon = Muon(parameters(dtype=dtype).items(), **muon_keywords(rounding=rounding, **OPTIONS)).build()
        assert "step" not in muon.param_groups[0]
