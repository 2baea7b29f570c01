"""Non-finite matrices: weights stay finite on every rank, and every rank gets the error."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, SHAPES, SLICED, full, named, parameters, placed, set_gradients
from tests.shared import message, whole
from titan_muon import Muon

EXCHANGES = ("all_to_all", "all_gather", "all_gather_reduce_scatter")
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
BAD = ("layers.0.weight", (3, 5)), ("layers.2.experts", (2, 0, 0))
"""An element of a matrix with rows on both ranks, and an element of the third of four experts."""


def build(mesh: DeviceMesh, **options: Any) -> tuple[dict[str, Parameter], Muon]:
    params = parameters(mesh)
    optimizer = Muon(named(params), lr=LR, weight_decay=DECAY, momentum=MOMENTUM, **options)
    return params, optimizer


def spoil(params: dict[str, Parameter], mesh: DeviceMesh, seed: int, value: float) -> None:
    """Gradients of a seed, each of BAD's elements with a value instead."""
    for name, param in params.items():
        gradient = full(name, seed)
        for bad, index in BAD:
            if bad == name:
                gradient[index] = value
        param.grad = placed(gradient, mesh)


def after_a_bad_step(rank: int, world_size: int, options: dict[str, Any], value: float) -> dict[str, Any]:
    """State after a step with bad gradients, compared with a step with good gradients."""
    mesh = init_device_mesh("cpu", (world_size,))
    (params, optimizer), (healthy, other) = build(mesh, **options), build(mesh, **options)
    before = {name: param.full_tensor().clone() for name, param in params.items()}
    started = [whole(optimizer.build().state[param]["momentum_buffer"]).clone() for param in params.values()]
    spoil(params, mesh, 1, value)
    optimizer.step()
    other.step()
    report: dict[str, Any] = {"error": "", "warned": ""}
    report["slices"] = sum(m.slice is not None for m in optimizer.plan.matrices if m.parameter == 0)
    for name in SHAPES:
        now, start, good = whole(params[name]), before[name], whole(healthy[name])
        decayed = start * (1 - LR * DECAY)
        if now.ndim == 2:
            now, decayed, good, start = now[None], decayed[None], good[None], start[None]
        report[name] = ["kept" if torch.equal(a, d) else
                       "decayed" if torch.equal(a, b) else "as healthy" if torch.allclose(a, c, atol=1e-3) else "?"
                       for a, b, c, d in zip(now, decayed, good, start, strict=True)]  # fmt: skip
    stood = [param.full_tensor().clone() for param in params.values()]
    set_gradients(params, mesh, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # A step continues with "skip", and would advance the momentum.
            optimizer.check_last_step() if options.get("nonfinite") == "skip" else optimizer.step()
        except ValueError as error:
            report["error"] = str(error)
        report["warned"] = " ".join(str(warning.message) for warning in caught)
    report["stood"] = all(torch.equal(a, param.full_tensor()) for a, param in zip(stood, params.values(), strict=True))
    averages = [whole(optimizer.state[param]["momentum_buffer"]) for param in params.values()]
    report["momentum"] = [torch.equal(whole(a), b) for a, b in zip(averages, started, strict=True)]
    goods = [whole(other.state[param]["momentum_buffer"]) for param in healthy.values()]
    report["differing"] = [int((a != b).sum()) for a, b in zip(averages, goods, strict=True)]
    report["zero"] = [int((a == 0).sum()) for a in averages]
    # Told once: from here on all is well.
    optimizer.step()
    report["goes_on"] = not any(torch.equal(a, p.full_tensor()) for a, p in zip(stood, params.values(), strict=True))
    report["finite"] = all(bool(param.full_tensor().isfinite().all()) for param in params.values())
    return report


UNSPOILED = {
    "layers.0.weight": ["decayed"],
    "layers.1.weight": ["as healthy"],
    "layers.2.experts": ["as healthy", "as healthy", "decayed", "as healthy"],
}


SKIPPED = {
    "layers.0.weight": ["kept"],
    "layers.1.weight": ["as healthy"],
    "layers.2.experts": ["as healthy", "as healthy", "kept", "as healthy"],
}
EXPERT = math.prod(SHAPES["layers.2.experts"][1:])


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("orthogonalize", ["auto", "reference"])
def test_a_nonfinite_gradient_is_an_error_in_the_next_step_and_changes_no_weight(
    exchange: str, value: float, orthogonalize: str
) -> None:
    options = {"exchange": exchange, "orthogonalize": orthogonalize}
    for report in run_ranks(after_a_bad_step, 2, options, value, timeout=SECONDS):
        assert {name: report[name] for name in SHAPES} == UNSPOILED
        assert report["differing"] == report["zero"] == [1, 0, 1], "of the momentum, the bad element alone is reset"
        assert report["error"].startswith("layers.0.weight, layers.2.experts: gradient or momentum was not finite")
        assert "nonfinite = 'skip'" in report["error"]
        assert report["stood"], "the error comes before anything changes"
        assert report["finite"]


def test_a_bad_slice_stops_the_update_of_every_slice_of_the_matrix() -> None:
    """Only a single owner sees the bad slice; the exchanged norm tells the other owners."""
    for report in run_ranks(after_a_bad_step, 4, SLICED, math.nan, timeout=SECONDS):
        assert report["slices"] > 1, "the case this test is for"
        assert {name: report[name] for name in SHAPES} == UNSPOILED
        assert report["error"].startswith("layers.0.weight, layers.2.experts: gradient or momentum was not finite")
        assert report["finite"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_skip_continues_and_warns_on_every_rank(exchange: str) -> None:
    options = {"exchange": exchange, "nonfinite": "skip"}
    for report in run_ranks(after_a_bad_step, 2, options, math.nan, timeout=SECONDS):
        assert {name: report[name] for name in SHAPES} == SKIPPED
        # Momentum was zero before the step. A skipped matrix keeps the momentum, and so does a single expert of four.
        assert report["momentum"] == [True, False, False]
        assert report["zero"] == report["differing"] == [math.prod(SHAPES["layers.0.weight"]), 0, EXPERT]
        assert report["error"] == ""
        assert report["warned"].startswith("layers.0.weight, layers.2.experts: not finite")
        assert report["goes_on"]
        assert report["finite"]


def element_of_one_rank(
    rank: int, world_size: int, placement: Placement, options: dict[str, Any]
) -> tuple[str, bool, int]:
    """The error if a single rank stores the bad element or the only bad replica; finite values; matrices done."""
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = full("layers.0.weight", 0)
    param = Parameter(placed(tensor, mesh, placement))
    optimizer = Muon([("layers.0.weight", param)], **options)
    gradient = full("layers.0.weight", 1)
    gradient[0, 0] = math.nan
    param.grad = placed(gradient, mesh, placement)
    optimizer.step()
    done = optimizer.orthogonalized
    try:
        optimizer.step()
    except ValueError as error:
        return str(error), bool(param.to_local().isfinite().all()), done
    return "", bool(param.to_local().isfinite().all()), done


@pytest.mark.parametrize(
    ("placement", "options"),
    [
        (Shard(0), {}),
        (Shard(1), {}),
        (Replicate(), {}),
        (Replicate(), {"replicas": "redundant"}),
        (Shard(0), {"wire_dtype": "float32"}),
        (Shard(0), {"nesterov": False}),
        (Shard(0), {"state_dtype": "bfloat16"}),
        (Shard(0), SLICED),
        (Shard(1), SLICED),
    ],
    ids=str,
)
def test_a_fault_on_an_owner_is_reported_on_every_rank(placement: Placement, options: dict[str, Any]) -> None:
    """Only the owner sees the bad gradient."""
    results = run_ranks(element_of_one_rank, 4, placement, options, timeout=SECONDS)
    for text, finite, _ in results:
        assert text.startswith("layers.0.weight: gradient or momentum was not finite")
        assert finite
    assert sum(done for _, _, done in results) >= 1


def left_out(rank: int, world_size: int) -> str:
    """Stale buffers of a skipped parameter must not be reported."""
    mesh = init_device_mesh("cpu", (world_size,))
    params, optimizer = build(mesh, missing_grad="skip", nonfinite="error")
    optimizer.engine.rank.buffers.memory.take()
    for buffer in optimizer.engine.rank.buffers.tensors:
        buffer.fill_(math.nan)
    params["layers.0.weight"].grad = None
    optimizer.step()
    set_gradients(params, mesh, 2)
    return message(optimizer.step)


def missing_on_one_rank(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, bool]:
    """Rank 1 has no gradient of a parameter in the second of three steps. Returns the results of the parameter."""
    mesh = init_device_mesh("cpu", (world_size,))
    (params, optimizer), (healthy, other) = (build(mesh, missing_grad="skip", **options) for _ in range(2))
    optimizer.step()
    other.step()
    param, twin = params["layers.2.experts"], healthy["layers.2.experts"]
    before = whole(param).clone(), whole(optimizer.state[param]["momentum_buffer"]).clone()
    set_gradients(params, mesh, 2)
    if rank == 1:
        param.grad = None
    optimizer.step()
    stood = [
        torch.equal(a, whole(b))
        for a, b in zip(before, (param, optimizer.state[param]["momentum_buffer"]), strict=True)
    ]
    # As if the second step had not been.
    for tensors in (params, healthy):
        set_gradients(tensors, mesh, 3)
    optimizer.step()
    other.step()
    goes_on = torch.equal(whole(param), whole(twin))
    return {"weights": stood[0], "momentum": stood[1], "goes on": goes_on}


@pytest.mark.parametrize("options", [{}, {"exchange": "all_gather"}, {"algorithm": "normuon"}], ids=str)
def test_a_parameter_without_gradient_on_a_rank_stays_unchanged_on_every_rank(options: dict[str, Any]) -> None:
    for report in run_ranks(missing_on_one_rank, 2, options, timeout=SECONDS):
        assert all(report.values()), report


def test_a_missing_gradient_is_not_reported_as_nonfinite() -> None:
    assert run_ranks(left_out, 2, timeout=SECONDS) == ["", ""]


@pytest.mark.parametrize("value", ["", "propagate", None])
def test_an_unknown_nonfinite_option_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^nonfinite = .* is not one of error, skip"):
        Muon([("w", Parameter(torch.randn(4, 4)))], nonfinite=value)
