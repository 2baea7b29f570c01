"""Copies from the host to the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from titan_muon.engine.faults.faults import Fault
from titan_muon.engine.faults.report import FaultReport
from titan_muon.plugins.clip import clip_grad_norm_


class NoWaits(TorchFunctionMode):
    """Refuses copies to the meta device that would block the host on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        makes = func is torch.tensor and torch.device(options.get("device", "cpu")).type != "cpu"
        assert not makes, "torch.tensor copies with a wait"
        assert func is not torch.Tensor.to or options.get("non_blocking"), "Tensor.to copies with a wait"
        return func(*args, **options)


def clip() -> None:
    parameter = Parameter(torch.empty(4, 4, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    clip_grad_norm_([parameter], 1.0)


def report_a_fault() -> None:
    FaultReport.add(SimpleNamespace(_faults=torch.zeros(2, device="meta")), [Fault.NONE, Fault.NO_GRADIENT])  # type: ignore[arg-type]


@pytest.mark.parametrize("act", [clip, report_a_fault])
def test_the_host_does_not_wait_for_a_copy(act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pinned memory needs a device.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with NoWaits():
        act()
