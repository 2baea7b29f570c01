"""Fixtures of process groups, of matrix products, and of the order of streams."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.stream_order import stream_order
from titan_muon.forecast.fake_world import fake_world

__all__ = ["stream_order"]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of two."""
    with fake_world(2):
        yield


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Rank 0 of four."""
    with fake_world(4):
        yield


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A gloo group of a single rank, with a timeout of a minute."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(minutes=1))
    yield
    dist.destroy_process_group()


@pytest.fixture
def zero_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are zero, because oneDNN allocates scratch memory for bfloat16 on a CPU without its instructions."""

    def zero(*operands: Tensor, out: Tensor, **factors: float) -> Tensor:
        return out.zero_()

    monkeypatch.setattr(torch, "bmm", zero)
    monkeypatch.setattr(torch, "baddbmm", zero)
