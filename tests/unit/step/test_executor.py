"""A step makes few operators, and refuses a group that lost a parameter."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from tests.shared import muon_keywords
from titan_muon import Muon
from titan_muon.adamw import AdamW

SHAPES = {"square": (8, 8), "wide": (4, 12), "tall": (12, 4), "experts": (3, 4, 6)}


def named(layers: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Parameters with gradients, the same each time."""
    generator = torch.Generator().manual_seed(0)
    params = {}
    for layer in range(layers):
        for name, shape in SHAPES.items():
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


def stepped(params: dict[str, nn.Parameter], muon: Optimizer) -> dict[str, torch.Tensor]:
    """The parameters after another step."""
    muon.step()
    return {name: param.detach().clone() for name, param in params.items()}


@pytest.mark.parametrize("optimizer", [Muon, AdamW])
def test_a_group_that_lost_a_parameter_is_refused_by_name(optimizer: type[Optimizer]) -> None:
    """Names of the remaining parameters would move to others."""
    params = named()
    built = optimizer(params.items())
    before = stepped(params, built)
    del built.param_groups[0]["params"][1]
    with pytest.raises(ValueError, match=r"^param_groups: the group of 0\.square has 3 parameters and 4 names; "):
        built.step()
    assert all(torch.equal(param, before[name]) for name, param in params.items())
