"""A step on host tensors works on transferred rows, and returns what changed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.shared import muon_keywords
from tests.stream_order import StreamOrder, stream_order
from titan_muon import Muon
from titan_muon.engine.step.foreach import MomentumCall, Rectangle
from titan_muon.engine.step.muon import MuonAlgorithm
from titan_muon.features.offload import HostOffload, rows_used

__all__ = ["stream_order"]

LEFT = Rectangle(0, (slice(2, 5), slice(0, 3)))
RIGHT = Rectangle(0, (slice(2, 5), slice(4, 7)))
WHOLE, ROWS = Rectangle(1, None), Rectangle(2, slice(1, 3))


def test_adjacent_rectangles_are_loaded_as_rows() -> None:
    call = MomentumCall({}, (LEFT, RIGHT, WHOLE, ROWS), (), ())
    assert rows_used([call]) == (Rectangle(0, slice(2, 5)), WHOLE, ROWS)


def trained(offload: str, missing: tuple[str, ...], **options: Any) -> tuple[Muon, list[Tensor]]:
    """A Muon after three steps, and its weights, momentum and gradients."""
    generator = torch.Generator().manual_seed(0)
    params = {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in {"a": (6, 7), "b": (3, 8, 5)}.items()}
    muon = Muon(list(params.items()), **muon_keywords(lr=0.1, orthogonalize="reference", offload=offload, **options))
    for _ in range(3):
        for name, param in params.items():
            grad = torch.randn(param.shape, generator=generator)
            param.grad = None if name in missing else grad
        muon.step()
    states = [state for param in params.values() for state in muon.state[param].values()]
    grads = [param.grad for param in params.values() if param.grad is not None]
    return muon, [*(param.detach() for param in params.values()), *states, *grads]


@pytest.mark.parametrize("offload", ["state", "parameters"])
@pytest.mark.parametrize("missing", [(), ("a",), ("b",)], ids=str)
def test_tensors_changed_on_the_device_are_written_to_the_host(offload: str, missing: tuple[str, ...]) -> None:
    """Parameters without a gradient, and gradients, keep their values."""
    _, expected = trained("none", missing, on_bad_gradient="skip_missing")
    muon, values = trained(offload, missing, on_bad_gradient="skip_missing")
    assert all(map(torch.equal, values, expected))
    host = {tensor.untyped_storage().data_ptr() for tensor in values}
    for views in muon.engine.step.views:
        fetched = [tensor for call in views.gathers for tensor in call.momentum]
        fetched += [tensor for call in views.updates for tensor in call.params] if offload == "parameters" else []
        assert all(tensor.untyped_storage().data_ptr() not in host for tensor in fetched)
    assert isinstance(muon.engine.offload, HostOffload)
    assert muon.engine.offload.memory.nbytes > 0


def test_the_momentum_advances_by_gradients_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU cannot compute with the host's."""
    read = list[Tensor]()

    def spied(self: MuonAlgorithm, call: MomentumCall, momentum: list[Tensor], grads: list[Tensor]) -> None:
        read.extend(grads)
        advance(self, call, momentum, grads)

    advance = MuonAlgorithm.before_gather
    monkeypatch.setattr(MuonAlgorithm, "before_gather", spied)
    muon, _ = trained("parameters", ())
    slots = {t.untyped_storage() for views in muon.engine.step.views for c in views.gathers for t in c.momentum}
    assert read
    assert {tensor.untyped_storage() for tensor in read} <= slots


@pytest.mark.parametrize("offload", ["state", "parameters"])
def test_slots_have_no_memory_between_steps(offload: str) -> None:
    muon, _ = trained(offload, ())
    slots = {
        tensor.untyped_storage() for views in muon.engine.step.views for c in views.gathers for tensor in c.momentum
    }
    assert [slot.nbytes() for slot in slots] == [0] * len(slots)


@pytest.mark.parametrize(
    ("stream", "method"), [("_arriving", "wait_stream"), ("_leaving", "wait_stream"), ("current", "wait_event")]
)
def test_every_wait_of_a_step_is_necessary(stream: str, method: str, stream_order: StreamOrder) -> None:
    with stream_order:
        muon, _ = trained("parameters", (), buffer_gib=1 / 2**30)
        muon.step()
        offload = muon.engine.offload
        assert isinstance(offload, HostOffload)
        waiting = stream_order.compute if stream == "current" else getattr(offload.window, stream)
        setattr(waiting, method, lambda other: None)
        with pytest.raises(AssertionError, match="does not wait for"):
            muon.step()
