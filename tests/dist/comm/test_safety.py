"""Impossible requests and non-finite gradients are errors with a remedy on every rank, and never a hang."""

import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import on_ranks, run_ranks
from tests.dist.small_params import SECONDS, SHAPES, full, named, parameters, placed, set_gradients
from tests.shared import equal, message, muon_keywords, whole
from titan_muon import Expert, Muon

Params = dict[str, nn.Parameter]


def of(local: Tensor, mesh: DeviceMesh, placement: Any = None) -> list[tuple[str, nn.Parameter]]:
    """A parameter with this local part, in rows unless told otherwise."""
    placement = Shard(0) if placement is None else placement
    return [("layers.0.weight", nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False)))]


def strided(rank: int, params: Params, mesh: DeviceMesh) -> list[Any]:
    return of(torch.ones(24, 8).t() if rank == 1 else torch.ones(8, 24), mesh)


def another_shape(rank: int, params: Params, mesh: DeviceMesh) -> list[Any]:
    return [*named(params)[1:], ("layers.0.weight", nn.Parameter(placed(torch.ones(16, 24 + 8 * rank), mesh)))]


def one_frozen(rank: int, params: Params, mesh: DeviceMesh) -> list[Any]:
    params["layers.1.weight"].requires_grad_(rank == 0)
    return named(params)


def all_frozen(rank: int, params: Params, mesh: DeviceMesh) -> list[Any]:
    return named({name: param.requires_grad_(False) for name, param in params.items()})


OTHER_POLYNOMIAL = [((1.5, -0.5, 0.0),) * 5, ((3.4445, -4.7750, 2.0315),) * 5]
DIFFER = "ranks [1] planned another Muon step than rank 0: "
REFUSED: dict[str, tuple[Callable[..., list[Any]], dict[str, Any], str]] = {
    # Refused by every rank.
    "frozen": (all_frozen, {}, "no parameter to train"),
    "no parameter": (lambda rank, params, mesh: [], {}, "no parameter to train"),
    "twice": (lambda rank, params, mesh: [("w", p) for p in params.values()], {}, "w: given to Muon twice"),
    "partial": (lambda rank, params, mesh: of(torch.ones(16, 24), mesh, Partial()), {}, "a parameter placed as P"),
    # Refused by one rank.
    "strided": (strided, {}, "layers.0.weight: its storage is not contiguous"),
    # Different on ranks.
    "order": (lambda rank, params, mesh: named(params)[:: 1 - 2 * rank], {}, f"{DIFFER}their parameters differ"),
    "shape": (another_shape, {}, f"{DIFFER}their parameters differ"),
    "one less": (lambda rank, params, mesh: named(params)[rank:], {}, f"{DIFFER}their parameters differ"),
    "one frozen": (one_frozen, {}, f"{DIFFER}their parameters differ"),
    "algorithms": (
        lambda rank, params, mesh: [{"params": named(params), "algorithm": ("muon", "muoneq")[rank]}],
        {},
        f"{DIFFER}their parameter groups have different hyperparameters",
    ),
    "iterations": (lambda rank, params, mesh: named(params), {"ns_steps": (5, 4)}, f"{DIFFER}their parameter groups"),
    "polynomial": (
        lambda rank, params, mesh: named(params),
        {"ns_coefficients": OTHER_POLYNOMIAL},
        f"{DIFFER}their parameter groups have different hyperparameters",
    ),
    "dtype": (
        lambda rank, params, mesh: named(params),
        {"wire_dtype": ("bfloat16", "float32")},
        f"{DIFFER}their options differ",
    ),
}
"""Parameters of a rank, options by rank, and the error of every rank."""


class OutOfMemory(RuntimeError):
    """Like torch.OutOfMemoryError, which the CPU never raises."""


def out_of_memory(rank: int, params: Params) -> tuple[str, str]:
    """Kind and text of the error if rank 0 has no memory for the momentum."""

    def fails(*_: Any, **__: Any) -> None:
        raise OutOfMemory("tried to allocate 2.00 GiB")

    with pytest.MonkeyPatch.context() as patched:
        if rank == 0:
            patched.setattr("titan_muon.muon.with_states", fails)
        try:
            Muon(named(params)).build()
        except RuntimeError as error:
            return type(error).__name__, str(error)
    return "", ""


@on_ranks(2)
def test_impossible_and_different_plans_are_refused_on_every_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, (make, options, text) in REFUSED.items():
        mine, params = {key: values[rank] for key, values in options.items()}, make(rank, parameters(mesh), mesh)
        assert text in message(lambda params=params, mine=mine: Muon(params, **muon_keywords(**mine)).build()), name
    assert out_of_memory(rank, parameters(mesh)) == (
        ("RuntimeError", "OutOfMemory: tried to allocate 2.00 GiB (on rank 0)")
        if rank
        else ("OutOfMemory", "tried to allocate 2.00 GiB")
    )


# --- unusable gradients: also the rows `raises` of tests/parity ---


def gradient_missing_here(rank: int, params: Params, mesh: DeviceMesh) -> None:
    if rank == 1:
        params["layers.1.weight"].grad = None


def parameter_resharded(rank: int, params: Params, mesh: DeviceMesh) -> None:
    """Like an in-place conversion of a module: the parameter object stays with new storage."""
    param = params["layers.1.weight"]
    moved = nn.Parameter(placed(full("layers.1.weight", 0), mesh, Shard(1)))
    torch.utils.swap_tensors(param, moved)
    param.grad = placed(full("layers.1.weight", 1), mesh, Shard(1))


LR, DECAY = 0.02, 0.1
STOPPED: list[tuple[Callable[..., None], Callable[[Muon], object], str]] = [
    (gradient_missing_here, lambda muon: muon.step(), "no gradient for layers.1.weight"),
    (gradient_missing_here, lambda muon: muon.state_dict(), "no gradient for layers.1.weight"),
    (gradient_missing_here, lambda muon: muon.check_last_step(), "no gradient for layers.1.weight"),
    (parameter_resharded, lambda muon: muon.step(), "layers.1.weight: resharded since Muon was built"),
]
"""Faults, the call with the error, and its text."""


@on_ranks(2)
def test_unusable_gradients_give_no_update_and_an_error_on_every_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for change, ask, text in STOPPED:
        params = parameters(mesh)
        optimizer = Muon(named(params), lr=LR, weight_decay=DECAY).build()
        optimizer.step()
        change(rank, params, mesh)
        spoiled = params["layers.1.weight"]
        before = spoiled.to_local().clone()
        assert message(optimizer.step) == "", "a rank that raised alone would leave the others waiting"
        # Ranks with the gradient decay their shards.
        assert any(torch.equal(spoiled.to_local(), kept) for kept in (before, before * (1 - LR * DECAY)))
        after = [param.to_local().clone() for param in params.values()]
        assert text in message(partial(ask, optimizer))
        assert equal(after, [param.to_local() for param in params.values()])
        if change is gradient_missing_here:
            set_gradients(params, mesh, 2)
            assert message(optimizer.step) == message(optimizer.step) == "", "told once"


@on_ranks(2)
def test_an_iteration_changed_on_a_rank_is_an_error_on_every_rank(rank: int) -> None:
    mesh, text = init_device_mesh("cpu", (2,)), "ns_steps, ns_coefficients, eps or algorithm changed since Muon"
    for changes in ({"ns_steps": 3}, {"ns_coefficients": [[1, 2, 3]]}, {"ns_coefficients": [[3.44, -4.78, 2.03]]}):
        optimizer = Muon(named(parameters(mesh))).build()
        optimizer.param_groups[0].update(changes if rank == 1 else {})
        optimizer.step()
        assert text in message(optimizer.step)
    # A list that changes in place.
    optimizer = Muon(named(parameters(mesh)), ns_coefficients=[[3.4445, -4.775, 2.0315]]).build()
    if rank == 1:
        optimizer.param_groups[0]["ns_coefficients"][0][0] = 2.0
    optimizer.step()
    assert text in message(optimizer.step)
    optimizer = Muon(named(parameters(mesh)))
    objects = [object() for _ in range(1 + rank)]
    optimizer.param_groups[0]["framework"] = objects[-1]
    optimizer.build().step()
    assert message(optimizer.step) == message(optimizer.check_replicas) == "", "addresses of objects are not compared"


# --- a dead rank ---


class Dying(CollectiveCounter):
    """Ends the process at the second exchange."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if sum(call.name == "alltoall_base" for call in self.calls) == 2:
            os._exit(1)
        return super().run(func, args, kwargs)


def die_in_step(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 dies; ranks 0, 2 and 3 write errors into the folder."""
    mesh = init_device_mesh("cpu", (world_size,))
    optimizer = Muon(named(parameters(mesh))).build()
    optimizer.step()
    if rank == 1:
        with Dying():
            optimizer.step()
    try:
        optimizer.step()
    except RuntimeError as error:
        Path(folder, str(rank)).write_text(str(error))
    # The harness ends all ranks after the first failure.
    while len(list(Path(folder).iterdir())) < world_size - 1:
        time.sleep(0.01)


def test_the_death_of_a_rank_in_a_step_is_an_error_on_the_surviving_ranks(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(die_in_step, 4, str(tmp_path), timeout=SECONDS)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "2", "3"}


@on_ranks(2)
def test_sharding_the_model_after_muon_is_an_error_in_the_first_step(rank: int) -> None:
    """The first step would otherwise train nothing, and the second name another remedy."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    optimizer = Muon(model.named_parameters())
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(torch.randn(4, 32)).sum().backward()
    error = message(optimizer.step)
    assert "no gradient for 0.weight or any other parameter of Muon in the first step" in error
    assert "after fully_shard" in error
    assert message(optimizer.step) == error, "the check stays until it has passed"
    assert equal(before, optimizer.param_groups[0]["params"])


# Non-finite matrices: the error comes once, before anything changes, and of the momentum bad elements are reset


BAD = {"layers.0.weight": (3, 5), "layers.2.experts": (2, 0, 0)}
"""An element of a matrix with rows on both ranks, and an element of the third of four experts."""


@on_ranks(2)
def test_a_nonfinite_gradient_is_an_error_in_the_next_step_before_anything_changes(rank: int) -> None:
    """Beside a step with good gradients."""
    mesh = init_device_mesh("cpu", (2,))
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
    error = message(optimizer.step)
    assert error.startswith("layers.0.weight, layers.2.experts: gradient or momentum was not finite")
    assert "on_bad_gradient = 'skip_step'" in error
    assert equal(stood, map(whole, params.values()))
    pairs = [(optimizer.state[params[name]], other.state[healthy[name]]) for name in SHAPES]
    momenta = [(whole(a["momentum_buffer"]), whole(b["momentum_buffer"])) for a, b in pairs]
    reset = [(int((a != b).sum()), int((a == 0).sum())) for a, b in momenta]
    assert reset == [(1, 1), (0, 0), (1, 1)], "of the momentum, the bad element alone is reset"
    # Told once: from here on all is well.
    optimizer.step()
    assert not any(torch.equal(a, p.full_tensor()) for a, p in zip(stood, params.values(), strict=True))


@on_ranks(2)
def test_a_missing_gradient_is_not_reported_as_nonfinite(rank: int) -> None:
    """Stale buffers of a skipped parameter must not be reported."""
    mesh = init_device_mesh("cpu", (2,))
    params = parameters(mesh)
    optimizer = Muon(named(params), expert=Expert(on_bad_gradient="skip_missing")).build()
    optimizer.engine.rank.buffers.memory.take()
    for buffer in optimizer.engine.rank.buffers.tensors:
        buffer.view(torch.bfloat16).fill_(math.nan)
    params["layers.0.weight"].grad = None
    optimizer.step()
    set_gradients(params, mesh, 2)
    assert message(optimizer.step) == ""
