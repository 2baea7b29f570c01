"""Bytes of element-wise passes and messages of collectives: the planner's counts equal the counts of operators and
programs."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.shared import muon_keywords
from titan_muon import Muon
from titan_muon.engine.layout.work import ElementKind, Elements, ElementTraffic
from titan_muon.options import MuonOptions
from titan_muon.planner.planner import passes_of, traffic

SIDE = 256
WRITES_ALONE = ("copy_", "_foreach_copy_", "fill_", "zero_")


def nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class Moved(TorchDispatchMode):
    """While active, counts the bytes read and written by operators, and the operators of large tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name.startswith(("empty", "resize", "set_")):
            return result
        moved = 0 if func._schema.is_mutable else nbytes(result)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            moved += nbytes(value) * (writes + (not (writes and name in WRITES_ALONE)))
        self.bytes += moved
        self.calls[name] += moved > SIDE
        return result


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"state_dtype": "bfloat16"}),
        (torch.float32, {"wire_dtype": "float32"}),
        (torch.float32, {"cautious": True}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"rounding": "nearest"}),
        (torch.bfloat16, {"rounding": "nearest", "cautious": True}),
        (torch.bfloat16, {"rounding": "nearest", "wire_dtype": "float32", "cautious": True}),
    ],
    ids=str,
)
def test_a_pass_moves_the_planned_bytes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.randn(SIDE, SIDE).to(dtype))
    muon = Muon([("a.w", parameter)], **muon_keywords(weight_decay=0.1, **options))
    parameter.grad = torch.randn(SIDE, SIDE).to(dtype)
    muon.step()
    engine, counted = muon.engine, muon.plan.passes.traffic
    gradients = engine.gradients(muon.param_groups, muon.state)
    engine.workspace.take()
    bucket = engine.step.bucket(engine.step.views[0], gradients)
    with torch.no_grad(), Moved() as momentum:
        next(bucket)
    with torch.no_grad():
        next(bucket)
    with torch.no_grad(), Moved() as update:
        next(bucket, None)
    assert momentum.bytes / parameter.numel() == pytest.approx(counted.advance, rel=0.01)
    assert update.bytes / parameter.numel() == pytest.approx(counted.apply, rel=0.03)
    assert momentum.calls.total() == counted.advance_launches
    if options.get("rounding") == "nearest" or dtype == torch.float32:
        assert update.calls.total() == counted.apply_launches


def test_a_fused_pass_touches_each_tensor_once() -> None:
    """Momentum and weights are read and written; gradients, packed momentum and updates are read or written."""
    found = traffic(element=4, state=8, wire=2, stochastic=False, cautious=False, fused=True)
    assert (found.advance, found.advance_launches) == (4 + 2 * 8 + 2, 1)
    assert (found.apply, found.apply_launches) == (2 * 4 + 2, 1)


def test_kinds_with_equal_sums_of_bytes_have_one_cost_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks plan differently, because the order of dtypes differs between processes."""
    sums = {2: ElementTraffic(30, 1, 86, 1), 4: ElementTraffic(32, 1, 84, 1)}
    monkeypatch.setattr("titan_muon.planner.planner.traffic", lambda size, state, wire, **_: sums[wire])
    kinds = tuple(ElementKind(4, wire, False) for wire in sums)
    costs = {passes_of(Elements(order), MuonOptions()) for order in (kinds, kinds[::-1])}
    assert len(costs) == 1
