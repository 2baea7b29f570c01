"""A step on host tensors works on transferred parts, and returns the parts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from titan_muon.features.host import OnHost, StageUse, rows_of
from titan_muon.options import Offload
from titan_muon.state.host import Window
from titan_muon.step.foreach import Advance, Apply, Rectangle
from titan_muon.step.gradients import Step
from titan_muon.step.update import Tensors
from titan_muon.tensors.storage import Storage

CPU = torch.device("cpu")
LEFT = Rectangle(0, (slice(2, 5), slice(0, 3)))
RIGHT = Rectangle(0, (slice(2, 5), slice(4, 7)))
WHOLE = Rectangle(1, None)
ROWS = Rectangle(2, slice(1, 3))
PARTS = (LEFT, RIGHT, WHOLE, ROWS)


def storage(seed: int) -> Storage:
    generator = torch.Generator().manual_seed(seed)
    param, average = (torch.randn(6, 7, generator=generator) for _ in range(2))
    return Storage(param, average, nn.Parameter(param), param.untyped_storage(), average.untyped_storage())


@dataclass(frozen=True)
class Host:
    """Three parameters on the host, with gradients."""

    storage: tuple[Storage, ...]
    step: Step

    @classmethod
    def of(cls, missing: frozenset[int] = frozenset(), left: frozenset[int] = frozenset()) -> Host:
        stored: list[Tensor | None] = [None if i in missing | left else torch.full((6, 7), i + 1.0) for i in range(3)]
        return cls(tuple(map(storage, range(3))), Step(stored, left, uniform=not missing | left))

    def advance(self) -> Advance:
        """Advance the parts with a gradient."""
        parts = tuple(part for part in PARTS if self.step.grads[part.parameter] is not None)
        return Advance({}, parts, tuple(part.of(self.storage[part.parameter].average) for part in parts), ())

    def apply(self) -> Apply:
        """Of all parts."""
        params = tuple(part.of(self.storage[part.parameter].param) for part in PARTS)
        return Apply({}, (6, 7), PARTS, params, params, (), 0).without(self.step.excluded)


def begun(host: Host, offload: Offload) -> OnHost:
    rows = rows_of([Host.of().advance()])
    stages: list[StageUse] = [("advance", rows), ("apply", rows)]
    residence = OnHost(stages, host.storage, offload, Window(CPU))
    residence.begin(host.step)
    return residence


def test_adjacent_rectangles_are_loaded_as_rows() -> None:
    assert rows_of([Host.of().advance()]) == (Rectangle(0, slice(2, 5)), WHOLE, ROWS)


def check_brought(loaded: Tensors, host: Tensors) -> None:
    """Check that each part equals the host tensor, in separate memory; change the part on the device."""
    for device_tensor, host_tensor in zip(loaded, host, strict=True):
        assert torch.equal(device_tensor, host_tensor)
        assert device_tensor.untyped_storage().data_ptr() != host_tensor.untyped_storage().data_ptr()
        device_tensor.add_(100)


@pytest.mark.parametrize("offload", ["state", "parameters"])
@pytest.mark.parametrize(
    ("missing", "left"), [((), ()), ((0,), ()), ((), (1,)), ((2,), (0,))], ids=["all", "missing", "left", "both"]
)
def test_parts_changed_on_the_device_are_written_to_the_host(
    offload: Offload, missing: tuple[int, ...], left: tuple[int, ...]
) -> None:
    """Unchanged: parts outside the transfer, gradients and idle parameters."""
    host = Host.of(frozenset(missing), frozenset(left))
    advance, apply = host.advance(), host.apply()
    before = [(stored.param.clone(), stored.average.clone()) for stored in host.storage]
    grads = [part.of(host.step.grads[part.parameter]) for part in advance.parts]
    residence = begun(host, offload)
    with residence.on_device("advance"):
        check_brought(residence.averages(advance), advance.averages)
        if offload == "parameters":
            check_brought(residence.grads(advance, grads), grads)
    with residence.on_device("apply"):
        if offload == "parameters":
            check_brought(residence.params(apply), apply.params)
        else:
            assert residence.params(apply) is apply.params
    residence.end()
    for part in advance.parts:
        part.of(before[part.parameter][1]).add_(100)
    for part in apply.parts if offload == "parameters" else ():
        part.of(before[part.parameter][0]).add_(100)
    for (param, average), stored in zip(before, host.storage, strict=True):
        assert torch.equal(param, stored.param)
        assert torch.equal(average, stored.average)
    assert all((grad == part.parameter + 1).all() for grad, part in zip(grads, advance.parts, strict=True))
