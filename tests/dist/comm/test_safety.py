"""Impossible requests and faults of gradients are errors with a remedy on every rank, and never a hang."""

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

from benchmarks.c10d_counter import CollectiveCounter
from tests.dist.harness import on_ranks, run_ranks
from tests.dist.small_params import SECONDS, SHAPES, full, parameters, placed, set_gradients
from tests.shared import equal, local, message, muon_keywords, whole
from titan_muon import Muon

Params = dict[str, nn.Parameter]
FIRST, SECOND, EXPERTS = SHAPES


def part(rank: int, placement: Any, is_strided: bool = False) -> list[tuple[str, nn.Parameter]]:
    """A parameter with a local part of 8 rows."""
    value = torch.ones(24, 8).t() if is_strided else torch.ones(8, 24)
    return [(FIRST, nn.Parameter(DTensor.from_local(value, init_device_mesh("cpu", (2,)), [placement])))]


def frozen(params: Params, *names: str) -> Params:
    for name in names:
        params[name].requires_grad_(False)
    return params


OTHER_POLYNOMIAL = [((1.5, -0.5, 0.0),) * 5, ((3.4445, -4.7750, 2.0315),) * 5]
DIFFER = "ranks [1] planned another Muon step than rank 0: their "
PARAMETERS, HYPERPARAMETERS = f"{DIFFER}parameters differ", f"{DIFFER}parameter groups have different hyperparameters"
REFUSED: dict[str, tuple[Callable[[int, Params], Any], dict[str, Any], str]] = {
    # Refused by every rank.
    "frozen": (lambda rank, params: frozen(params, *params), {}, "no parameter to train"),
    "no parameter": (lambda rank, params: {}, {}, "no parameter to train"),
    "twice": (lambda rank, params: [("w", p) for p in params.values()], {}, "w: given to Muon twice"),
    "partial": (lambda rank, params: part(rank, Partial()), {}, "a parameter placed as P"),
    # Refused by one rank.
    "strided": (lambda rank, params: part(rank, Shard(0), rank == 1), {}, f"{FIRST}: its storage is not contiguous"),
    "rank 1 frozen": (lambda rank, params: frozen(params, *[*params][: 3 * rank]), {}, "to train on ranks [1]"),
    # Different on ranks.
    "order": (lambda rank, params: [*params.items()][:: 1 - 2 * rank], {}, PARAMETERS),
    "shape": (lambda rank, params: {FIRST: nn.Parameter(placed(torch.ones(16, 24 + 8 * rank)))}, {}, PARAMETERS),
    "one less": (lambda rank, params: [*params.items()][rank:], {}, PARAMETERS),
    "one frozen": (lambda rank, params: frozen(params, *[SECOND][:rank]), {}, PARAMETERS),
    "algorithms": (
        lambda rank, params: [{"params": params.items(), "algorithm": ("muon", "muoneq")[rank]}],
        {},
        HYPERPARAMETERS,
    ),
    "iterations": (lambda rank, params: params, {"ns_steps": (5, 4)}, HYPERPARAMETERS),
    "polynomial": (lambda rank, params: params, {"ns_coefficients": OTHER_POLYNOMIAL}, HYPERPARAMETERS),
    "dtype": (lambda rank, params: params, {"wire_dtype": ("bfloat16", "float32")}, f"{DIFFER}options differ"),
}
"""Parameters of a rank, options by rank, and the error of every rank."""


def out_of_memory(rank: int) -> str:
    """The error if rank 0 has no memory for the momentum."""
    muon, error = Muon(parameters().items()), torch.OutOfMemoryError("tried to allocate 2.00 GiB")
    patched = mock.patch("titan_muon.muon.with_states", side_effect=error) if rank == 0 else nullcontext()
    with patched, pytest.raises(RuntimeError) as raised:
        muon.build()
    return f"{raised.type.__name__}: {raised.value}"


@on_ranks(2)
def test_impossible_and_different_plans_are_refused_on_every_rank(rank: int) -> None:
    for name, (make, options, text) in REFUSED.items():
        mine, made = {key: values[rank] for key, values in options.items()}, make(rank, parameters())
        given = made.items() if isinstance(made, dict) else made
        assert text in message(lambda given=given, mine=mine: Muon(given, **muon_keywords(**mine)).build()), name
    error = "OutOfMemoryError: tried to allocate 2.00 GiB"
    assert out_of_memory(rank) == (f"RuntimeError: {error} (on rank 0)" if rank else error)


# --- faults of a step: also the rows `raises` of tests/parity ---


def reshard(params: Params) -> None:
    """Like an in-place conversion of a module: the parameter object stays with new storage."""
    torch.utils.swap_tensors(params[SECOND], nn.Parameter(placed(full(SECOND, 0), dim=1)))
    params[SECOND].grad = placed(full(SECOND, 1), dim=1)


def drop(rank: int, muon: Muon, params: Params) -> None:
    params[SECOND].grad = params[SECOND].grad if rank == 0 else None


def replace_momentum(rank: int, muon: Muon, params: Params) -> None:
    state = muon.state[params[FIRST]]
    state["momentum_buffer"] = state["momentum_buffer"].to(torch.float64 if rank else torch.float32)


def scale(rank: int, muon: Muon, params: Params) -> None:
    """As a GradScaler of a rank does that looks at the gradients of this rank alone."""
    muon.grad_scale, muon.found_inf = None, torch.tensor([float(rank)])  # type: ignore[attr-defined]


def regroup(**changed: Any) -> Callable[..., None]:
    return lambda rank, muon, params: muon.param_groups[0].update(changed if rank else {})


def change_in_place(rank: int, muon: Muon, params: Params) -> None:
    muon.param_groups[0]["ns_coefficients"][0][0] -= rank


LR, DECAY = 0.02, 0.1
MISSING, CHANGED = f"no gradient for {SECOND}", "ns_steps, ns_coefficients, eps or algorithm changed since Muon"
COEFFICIENTS: dict[str, Any] = {"ns_coefficients": [[3.4445, -4.775, 2.0315]]}
STOPPED: tuple[tuple[Callable[..., object], dict[str, Any], Callable[[Muon], object], str], ...] = (
    (drop, {}, Muon.step, MISSING),
    (drop, {}, Muon.state_dict, MISSING),
    (drop, {}, Muon.check_last_step, MISSING),
    (lambda rank, muon, params: reshard(params), {}, Muon.step, f"{SECOND}: resharded since Muon was built"),
    (scale, {}, Muon.step, "GradScalers of only some ranks have found"),
    (replace_momentum, {"offload": "state"}, Muon.step, f"{FIRST}: the momentum was replaced"),
    (regroup(ns_steps=3), {}, Muon.step, CHANGED),
    (regroup(ns_coefficients=[[1, 2, 3]]), {}, Muon.step, CHANGED),
    (regroup(ns_coefficients=[[3.44, -4.78, 2.03]]), {}, Muon.step, CHANGED),
    (change_in_place, COEFFICIENTS, Muon.step, CHANGED),
    # Addresses of objects are not compared.
    (lambda rank, muon, params: muon.param_groups[0].update(framework=object()), {}, Muon.check_replicas, ""),
)
"""A change before a step, options, the call behind the step that has the error on every rank, and its text."""


@on_ranks(2)
def test_unusable_gradients_give_no_update_and_an_error_on_every_rank(rank: int) -> None:
    for change, options, ask, text in STOPPED:
        params = parameters()
        muon = Muon(params.items(), lr=LR, weight_decay=DECAY, **muon_keywords(**options)).build()
        muon.step()
        change(rank, muon, params)
        before = local(params[SECOND]).clone()
        assert message(muon.step) == "", "a rank that raised alone would leave the others waiting"
        if change is scale:
            del muon.grad_scale, muon.found_inf  # type: ignore[attr-defined]
        if SECOND in text or change is scale:
            # Ranks with the gradient decay their shards.
            kept = [before] if change is scale else [before, before * (1 - LR * DECAY)]
            assert any(torch.equal(local(params[SECOND]), each) for each in kept)
        after = [local(param).clone() for param in params.values()]
        error = message(lambda muon=muon, ask=ask: ask(muon))
        assert text in error
        assert bool(error) == bool(text), error
        assert equal(after, map(local, params.values()))
        if change is drop:
            set_gradients(params, 2)
            assert message(muon.step) == message(muon.step) == "", "told once"


# --- a dead rank ---


class Dying(CollectiveCounter):
    """Ends the process at the second exchange."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if sum(call.name == "alltoall_base" for call in self.calls) == 2:
            os._exit(1)
        return super().run(func, args, kwargs)


def die_in_step(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 dies; ranks 0, 2 and 3 write errors into the folder."""
    muon = Muon(parameters().items()).build()
    muon.step()
    if rank == 1:
        with Dying():
            muon.step()
    try:
        muon.step()
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
    model = nn.Linear(32, 32, bias=False)
    muon = Muon(model.named_parameters())
    before = model.weight.detach().clone()
    unsharded = model.weight
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(torch.randn(4, 32)).sum().backward()
    error = message(muon.step)
    assert "no gradient for weight or any other parameter of Muon in the first step" in error
    assert "after fully_shard" in error
    assert message(muon.step) == error, "the check stays until it has passed"
    assert torch.equal(before, unsharded)


# Non-finite matrices: the error comes once, before anything changes, and of the momentum bad elements are reset


BAD = {FIRST: (3, 5), EXPERTS: (2, 0, 0)}
"""An element of a matrix with rows on both ranks, and an element of the third of four experts."""


@on_ranks(2)
def test_a_nonfinite_gradient_is_an_error_in_the_next_step_before_anything_changes(rank: int) -> None:
    """Beside a step with good gradients."""
    params, healthy = parameters(), parameters()
    muon, other = (Muon(p.items()).build() for p in (params, healthy))
    for name, index in BAD.items():
        gradient = full(name, 1)
        gradient[index] = math.nan
        params[name].grad = placed(gradient)
    muon.step()
    other.step()
    stood = [whole(param).clone() for param in params.values()]
    set_gradients(params, 2)
    error = message(muon.step)
    assert error.startswith(f"{FIRST}, {EXPERTS}: gradient or momentum was not finite")
    assert "on_bad_gradient = 'skip_step'" in error
    assert equal(stood, map(whole, params.values()))
    pairs = [(muon.state[params[name]], other.state[healthy[name]]) for name in SHAPES]
    momenta = [(whole(a["momentum_buffer"]), whole(b["momentum_buffer"])) for a, b in pairs]
    reset = [(int((a != b).sum()), int((a == 0).sum())) for a, b in momenta]
    assert reset == [(1, 1), (0, 0), (1, 1)], "of the momentum, the bad element alone is reset"
    # Told once: from here on all is well.
    muon.step()
    assert not any(torch.equal(a, whole(p)) for a, p in zip(stood, params.values(), strict=True))
