"""Gathers in backward with owned parameters: travelling pieces leave as soon as owners have gradients."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.owned_model import Setup, data_mesh, loss_of, make, place
from tests.dist.features.test_overlap import BACKWARD, OPTIONS, WITHOUT
from tests.dist.harness import run_ranks
from tests.dist.owned.test_owned_training import recomputed_within
from titan_muon import Muon
from titan_muon.owned import is_owned
from titan_muon.tensors.dtensor import local

STEPS, MICROBATCHES = 2, 2
CUT = Setup("owned", tensor=2, prepare=recomputed_within)
"""Tensor parallelism shards owned matrices, so the step gathers the pieces."""
BESIDE = Setup("owned", prepare=recomputed_within)
"""Owned matrices are local; the step gathers only the other matrices."""


@dataclass(frozen=True)
class Trained:
    """A rank's parameters, the gathers before each step, and all gathers. `called`: hook calls by owned parameter."""

    tensors: list[Tensor]
    before: list[int]
    gathers: int
    called: dict[str, int]


def train(rank: int, world_size: int, setup: Setup, **options: Any) -> Trained:
    model = make()
    place(model, setup, data_mesh(world_size, setup, model))
    named = {n: p for n, p in model.named_parameters() if p.ndim == 2}
    muon = Muon(named.items(), **{**OPTIONS, **options}).build()
    shares = world_size // setup.tensor
    called = dict.fromkeys((name for name, param in named.items() if is_owned(param)), 0)

    def count(name: str, param: Tensor) -> None:
        assert param is named[name], "autograd gives the parameter"
        assert param.grad is not None, "what was reduced is there"
        assert local(param.grad).numel() > 0, "on its owner"
        called[name] += 1

    for name in called:
        named[name].register_post_accumulate_grad_hook(partial(count, name))
    before = []
    for step in range(STEPS):
        calls = muon.exchange.traffic.calls
        for part in range(MICROBATCHES):
            with muon.overlap() if part == MICROBATCHES - 1 else nullcontext():
                loss_of(model, rank // setup.tensor, shares, step, part).backward()
        before.append(muon.exchange.traffic.calls - calls)
        muon.step()
        model.zero_grad()
    return Trained([local(p).detach().clone() for p in named.values()], before, len(muon.plan.buckets), called)


def both(rank: int, world_size: int, setup: Setup) -> tuple[bool, Trained, Trained]:
    """Whether digits are equal, and the runs without and with gathers in backward."""
    without, overlapped = (train(rank, world_size, setup, **options) for options in (WITHOUT, BACKWARD))
    return all(map(torch.equal, without.tensors, overlapped.tensors)), without, overlapped


@cache
def trained(world_size: int, cut: bool) -> list[tuple[bool, Trained, Trained]]:
    return run_ranks(both, world_size, CUT if cut else BESIDE)


@pytest.mark.parametrize(("world_size", "cut"), [(2, True), (4, True), (2, False)], ids=str)
def test_digits_equal_a_run_without_overlap(world_size: int, cut: bool) -> None:
    for equal, without, overlapped in trained(world_size, cut):
        assert without.before == [0] * STEPS
        assert overlapped.gathers > cut, "the case this test is for: several, or one of what is not owned"
        assert equal


@pytest.mark.parametrize("cut", [True, False])
def test_gathers_begin_as_soon_as_owners_have_gradients(cut: bool) -> None:
    """A wait for an owned gradient would last until the step."""
    for _, _, overlapped in trained(2, cut):
        assert overlapped.before == [overlapped.gathers] * STEPS


def test_only_owners_call_hooks_in_every_backward() -> None:
    """Only the owner calls a parameter's hook, where autograd would accumulate."""
    ranks = trained(2, False)
    for name in ranks[0][1].called:
        assert sorted(run.called[name] for _, run, _ in ranks) == [0, STEPS * MICROBATCHES], name
