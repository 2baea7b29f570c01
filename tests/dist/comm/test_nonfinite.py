"""Non-finite matrices: weights stay finite on every rank, and every rank gets the error.

The rows `nan` of tests/parity prove the bits of the other matrices in every layout, and of skipped ones.
"""

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, SHAPES, SLICED, full, named, parameters, placed, set_gradients
from tests.shared import message, muon_keywords, whole
from titan_muon import Expert, Muon

LR, DECAY = 0.02, 0.1
BAD = {"layers.0.weight": (3, 5), "layers.2.experts": (2, 0, 0)}
"""An element of a matrix with rows on both ranks, and an element of the third of four experts."""


def after_a_bad_step(rank: int, world_size: int, options: dict[str, Any], value: float) -> dict[str, Any]:
    """State after a step with bad gradients, compared with a step with good gradients."""
    mesh = init_device_mesh("cpu", (world_size,))
    params, healthy = parameters(mesh), parameters(mesh)
    optimizer, other = (
        Muon(named(p), **muon_keywords(lr=LR, weight_decay=DECAY, **options)).build() for p in (params, healthy)
    )
    before = {name: param.full_tensor().clone() for name, param in params.items()}
    for name, index in BAD.items():
        gradient = full(name, 1)
        gradient[index] = value
        params[name].grad = placed(gradient, mesh)
    optimizer.step()
    other.step()
    report: dict[str, Any] = {"slices": sum(m.slice is not None for m in optimizer.plan.matrices if m.parameter == 0)}
    for name in SHAPES:
        now, start, good = (
            t if t.ndim == 3 else t[None] for t in (whole(params[name]), before[name], whole(healthy[name]))
        )
        decayed = start * (1 - LR * DECAY)
        report[name] = [
            "decayed" if torch.equal(a, b) else "as healthy" if torch.allclose(a, c, atol=1e-3) else "?"
            for a, b, c in zip(now, decayed, good, strict=True)
        ]
    stood = [param.full_tensor().clone() for param in params.values()]
    set_gradients(params, mesh, 2)
    report["error"] = message(optimizer.step)
    report["stood"] = all(torch.equal(a, param.full_tensor()) for a, param in zip(stood, params.values(), strict=True))
    pairs = [(optimizer.state[params[name]], other.state[healthy[name]]) for name in SHAPES]
    momenta = [(whole(a["momentum_buffer"]), whole(b["momentum_buffer"])) for a, b in pairs]
    report["reset"] = [(int((a != b).sum()), int((a == 0).sum())) for a, b in momenta]
    # Told once: from here on all is well.
    optimizer.step()
    report["goes_on"] = not any(torch.equal(a, p.full_tensor()) for a, p in zip(stood, params.values(), strict=True))
    return report


@pytest.mark.parametrize(
    ("world_size", "options", "value"),
    [
        (2, {"orthogonalize": "reference"}, math.nan),
        (2, {"exchange": "all_gather"}, math.inf),
        (2, {"exchange": "all_gather_reduce_scatter"}, -math.inf),
        # Only a single owner sees the bad slice; the exchanged norm tells the other owners.
        (4, SLICED, math.nan),
    ],
    ids=("reference", "all_gather", "all_gather_reduce_scatter", "sliced"),
)
def test_a_nonfinite_gradient_is_an_error_in_the_next_step_and_changes_no_weight(
    world_size: int, options: dict[str, Any], value: float
) -> None:
    for report in run_ranks(after_a_bad_step, world_size, options, value, timeout=SECONDS):
        assert report["layers.0.weight"] == ["decayed"]
        assert report["layers.1.weight"] == ["as healthy"]
        assert report["layers.2.experts"] == ["as healthy", "as healthy", "decayed", "as healthy"]
        assert report["reset"] == [(1, 1), (0, 0), (1, 1)], "of the momentum, the bad element alone is reset"
        assert report["error"].startswith("layers.0.weight, layers.2.experts: gradient or momentum was not finite")
        assert "on_bad_gradient = 'skip_nonfinite'" in report["error"]
        assert report["stood"], "the error comes before anything changes"
        assert report["goes_on"]
        assert (report["slices"] > 1) == (options is SLICED), "the case this test is for"


KINDS: list[tuple[Placement, dict[str, Any]]] = [
    (Shard(0), {}),
    (Shard(1), {"nesterov": False}),
    (Replicate(), {}),
    (Replicate(), {"replicas": "redundant"}),
    (Shard(0), {"wire_dtype": "float32"}),
    (Shard(0), {"state_dtype": "bfloat16"}),
    (Shard(1), SLICED),
]


def element_of_one_rank(rank: int, world_size: int) -> list[tuple[str, bool]]:
    """Errors if a single rank stores the bad element or orthogonalizes its matrix, and whether weights are finite."""
    mesh, found = init_device_mesh("cpu", (world_size,)), []
    for placement, options in KINDS:
        param = Parameter(placed(full("layers.0.weight", 0), mesh, placement))
        optimizer = Muon([("layers.0.weight", param)], **muon_keywords(**options))
        gradient = full("layers.0.weight", 1)
        gradient[0, 0] = math.nan
        param.grad = placed(gradient, mesh, placement)
        optimizer.step()
        found.append((message(optimizer.step), bool(param.to_local().isfinite().all())))
    return found


def test_a_fault_on_an_owner_is_reported_on_every_rank() -> None:
    """Only the owner sees the bad gradient."""
    for found in run_ranks(element_of_one_rank, 4, timeout=SECONDS):
        for kind, (text, finite) in zip(KINDS, found, strict=True):
            assert text.startswith("layers.0.weight: gradient or momentum was not finite"), kind
            assert finite, kind


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
