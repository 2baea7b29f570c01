"""The parts of a step: arithmetic of the momentum, ranges of a profiler, and the number of operators."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.shared import muon_keywords
from titan_muon import Muon
from titan_muon.engine.orthogonalize import NO_UPDATE
from titan_muon.engine.step import muon as update
from titan_muon.engine.step import step as step_module
from titan_muon.engine.step.gradients import StepGradients
from titan_muon.engine.step.step import UpdateMask
from titan_muon.engine.step.views import Batch


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


EVERY, OTHER = slice(0, 5), slice(0, 5, 2)


# Ranges of the stages in a profiler's trace


def optimizer() -> Muon:
    params = {name: nn.Parameter(torch.ones(32, 16)) for name in ("a", "b")}
    muon = Muon(list(params.items()))
    for parameter in params.values():
        parameter.grad = torch.randn(32, 16)
    return muon


def test_a_trace_shows_every_stage_of_every_bucket() -> None:
    muon = optimizer()
    muon.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        muon.step()
    names = {event.key for event in profiler.key_averages() if event.key.startswith("Muon.")}
    buckets = range(len(muon.engine.rank.program.buckets))
    stages = ("advance", "gather", "orthogonalize", "send_back", "apply")
    assert names == {"Muon.check", "Muon.tell", *(f"Muon.{stage} bucket {b}" for stage in stages for b in buckets)}


def test_a_step_makes_no_range_unless_a_profiler_records(monkeypatch) -> None:
    def fail(name: str) -> None:
        raise AssertionError(f"{name} was recorded")

    monkeypatch.setattr(step_module, "record_function", fail)
    optimizer().step()


# A step makes few operators


EXECUTOR_SHAPES = {"square": (8, 8), "wide": (4, 12), "tall": (12, 4), "experts": (3, 4, 6)}


def named(layers: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Parameters with gradients, the same each time."""
    generator = torch.Generator().manual_seed(0)
    params = {}
    for layer in range(layers):
        for name, shape in EXECUTOR_SHAPES.items():
            value, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            params[f"{layer}.{name}"] = param = nn.Parameter(value)
            param.grad = grad
    return params


class Operators(TorchDispatchMode):
    """While active, counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(layers: int, dtype: torch.dtype = torch.float32, **options: Any) -> Counter[str]:
    """Operators of a step."""
    muon = Muon(named(layers, dtype).items(), **muon_keywords(**options))
    muon.step()
    with Operators() as counter:
        muon.step()
    return counter.counts


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}, {"on_bad_gradient": "skip_step"}], ids=str)
def test_a_step_makes_no_more_operators_for_more_matrices(options: dict[str, Any]) -> None:
    """Except views of gradient stacks, and conversions of lists to another dtype."""
    few, many = operators(2, **options), operators(4, **options)
    # Four matrices per stack: a batch of a shape takes all stacks, with one call per operator.
    growing = {name for name in many if many[name] > few[name]}
    allowed = {"aten.view.default", "aten.slice.Tensor", "aten.empty_like.default"}
    if "on_bad_gradient" in options:
        # A skipped matrix keeps the momentum only if the old values are restored.
        allowed |= {"aten.where.self", "aten.where.self_out"}
    assert growing <= allowed, many - few
    assert many["aten.nan_to_num_.default"] == 0


def test_stochastic_rounding_launches_no_more_for_more_matrices() -> None:
    nearest, stochastic = (
        [operators(layers, torch.bfloat16, rounding=rounding) for layers in (2, 4)]
        for rounding in ("nearest", "stochastic")
    )
    assert stochastic[1] - nearest[1] == stochastic[0] - nearest[0]


def test_the_old_content_of_the_workspace_is_no_fault_of_a_parameter_that_a_step_leaves_out() -> None:
    whole = torch.stack([torch.full((4, 3), torch.nan), torch.ones(4, 3)])
    broken = torch.zeros(2, dtype=torch.bool)
    batch = Batch((0, 1), whole, whole, (0, 1), broken, 0, torch.float32, iterate=lambda: whole, parts=())
    norms = UpdateMask().zero_(batch, StepGradients([None, None], frozenset([0]), uniform=False, params=()))
    assert norms.tolist() == [NO_UPDATE, pytest.approx(12**0.5)]
    assert not broken.any()
    assert whole[0].eq(0).all()
