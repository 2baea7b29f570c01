"""Non-finite matrices: the error comes once, before anything changes, and of the momentum bad elements are reset.

The rows `nan` of tests/parity prove the error on every rank and the bits of the other matrices.
"""

import math
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, SHAPES, full, named, parameters, placed, set_gradients
from tests.shared import equal, message, whole
from titan_muon import Expert, Muon

BAD = {"layers.0.weight": (3, 5), "layers.2.experts": (2, 0, 0)}
"""An element of a matrix with rows on both ranks, and an element of the third of four experts."""


def after_a_bad_step(rank: int, world_size: int) -> dict[str, Any]:
    """State after a step with bad gradients, compared with a step with good gradients."""
    mesh = init_device_mesh("cpu", (world_size,))
    params, healthy = parameters(mesh), parameters(mesh)
    optimizer, other = (Muon(named(p)).build() for p in (params, healthy))
    for name, index in BAD.items():
        gradient = full(name, 1)
        gradient[index] = math.nan
        params[name].grad = placed(gradient, mesh)
    optimizer.step()
    other.step()
    stood = [param.full_tensor().clone() for param in params.values()]
    set_gradients(params, mesh, 2)
    report: dict[str, Any] = {"error": message(optimizer.step)}
    report["stood"] = equal(stood, map(whole, params.values()))
    pairs = [(optimizer.state[params[name]], other.state[healthy[name]]) for name in SHAPES]
    momenta = [(whole(a["momentum_buffer"]), whole(b["momentum_buffer"])) for a, b in pairs]
    report["reset"] = [(int((a != b).sum()), int((a == 0).sum())) for a, b in momenta]
    # Told once: from here on all is well.
    optimizer.step()
    report["goes_on"] = not any(torch.equal(a, p.full_tensor()) for a, p in zip(stood, params.values(), strict=True))
    return report


def test_a_nonfinite_gradient_is_an_error_in_the_next_step_before_anything_changes() -> None:
    for report in run_ranks(after_a_bad_step, 2, timeout=SECONDS):
        assert report["reset"] == [(1, 1), (0, 0), (1, 1)], "of the momentum, the bad element alone is reset"
        assert report["error"].startswith("layers.0.weight, layers.2.experts: gradient or momentum was not finite")
        assert "on_bad_gradient = 'skip_step'" in report["error"]
        assert report["stood"]
        assert report["goes_on"]


def left_out(rank: int, world_size: int) -> str:
    """Stale buffers of a skipped parameter must not be reported."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = parameters(mesh)
    optimizer = Muon(named(params), expert=Expert(on_bad_gradient="skip_missing")).build()
    optimizer.engine.rank.buffers.memory.take()
    for buffer in optimizer.engine.rank.buffers.tensors:
        buffer.view(torch.bfloat16).fill_(math.nan)
    params["layers.0.weight"].grad = None
    optimizer.step()
    set_gradients(params, mesh, 2)
    return message(optimizer.step)


def test_a_missing_gradient_is_not_reported_as_nonfinite() -> None:
    assert run_ranks(left_out, 2, timeout=SECONDS) == ["", ""]
