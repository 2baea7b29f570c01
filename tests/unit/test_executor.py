"""What the executor leaves in memory while it runs a step."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from titan_muon import Muon
from titan_muon.executor import Executor


def test_a_result_does_not_outlive_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would be in memory at once where the plan counts one."""
    shapes = {"square": (8, 8), "wide": (4, 12), "tall": (12, 4), "experts": (3, 4, 6)}
    muon = Muon([(name, nn.Parameter(torch.randn(shape))) for name, shape in shapes.items()])
    results: list[Any] = []
    compute = Executor._newton_schulz

    def watched(self: Executor, batch: Any, views: Any) -> torch.Tensor:
        assert all(result() is None for result in results)
        results.append(weakref.ref(result := compute(self, batch, views)))
        return result

    monkeypatch.setattr(Executor, "_newton_schulz", watched)
    for group in muon.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    muon.step()
    assert len(results) == len(shapes)
