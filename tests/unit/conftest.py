"""Fixtures of process groups."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.shared import fake_ranks


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of two."""
    with fake_ranks(2):
        yield


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Rank 0 of four."""
    with fake_ranks(4):
        yield


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A gloo group of a single rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
