"""A step allocates only views of gradients; replaced storage is noticed."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from titan_muon import Muon
from titan_muon.adam import AdamW
from titan_muon.orthogonalize import DTYPES, Method, frobenius_norms, iteration, orthogonalize

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
    muon = Muon(named(layers, dtype).items(), **options)
    muon.step()
    with Operators() as counter:
        muon.step()
    return counter.counts


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}, {"nonfinite": "skip"}], ids=str)
def test_a_step_makes_no_more_operators_for_more_matrices(options: dict[str, Any]) -> None:
    """Except views of gradient stacks, and conversions of lists to another dtype."""
    few, many = operators(2, **options), operators(4, **options)
    # Four matrices per stack: a batch of a shape takes all stacks, with one call per operator.
    growing = {name for name in many if many[name] > few[name]}
    allowed = {"aten.view.default", "aten.slice.Tensor", "aten.empty_like.default"}
    if options.get("nonfinite") == "skip":
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("algorithm", ["standard", "gram", "reference"])
@pytest.mark.parametrize("shape", [(2, 8, 24), (2, 24, 8)], ids=str)
def test_an_in_place_result_equals_the_result(algorithm: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Bit for bit, with existing norms."""
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    method, computed = Method(algorithm, dtype, (2,)), iteration("keller_jordan", 5, 1e-7)
    expected = orthogonalize(stack, computed, method)
    norms = frobenius_norms(stack, DTYPES[method.dtype])
    result = orthogonalize(stack, computed, method, norms=norms, out=stack)
    assert result is stack
    assert torch.equal(stack.float(), expected.float())


def stepped(params: dict[str, nn.Parameter], muon: Optimizer) -> dict[str, torch.Tensor]:
    """The parameters after another step."""
    muon.step()
    return {name: param.detach().clone() for name, param in params.items()}


def test_the_step_uses_replaced_storage() -> None:
    """An assignment to `param.data` or to the momentum's data leaves a tensor with new storage."""
    kept, changed = named(), named()
    first, other = Muon(kept.items()), Muon(changed.items())
    assert stepped(kept, first).keys() == stepped(changed, other).keys()
    old = changed["0.wide"].data
    before = old.clone()
    changed["0.wide"].data = old.clone()
    average = other.state[changed["0.tall"]]["momentum_buffer"]
    average.data = average.data.clone()
    expected, result = stepped(kept, first), stepped(changed, other)
    assert all(torch.equal(expected[name], result[name]) for name in expected)
    assert torch.equal(old, before), "the old storage is trained no more"
    expected, result = stepped(kept, first), stepped(changed, other)
    assert all(torch.equal(expected[name], result[name]) for name in expected)


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


def test_a_parameter_replaced_in_a_group_is_refused() -> None:
    """As after Accelerate's sharding of a model: no module uses the trained parameter."""
    params = named()
    muon = Muon(params.items(), missing_grad="skip")
    before = stepped(params, muon)
    group = muon.param_groups[0]
    group["params"][1] = nn.Parameter(params["0.wide"].detach().clone())
    with pytest.raises(ValueError, match=r"0\.wide: another tensor took its place in param_groups"):
        muon.step()
    assert all(torch.equal(param, before[name]) for name, param in params.items())
    group["params"][1] = params["0.wide"]
    muon.step()
