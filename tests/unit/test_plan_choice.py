"""`auto` takes the exchange that is the fastest on the link it is given."""

import pytest

from tests.unit.plans import plan_of
from titan_muon.options import Link
from titan_muon.plan.types import (
    Interval,
    Layout,
    MatrixRows,
    MatrixStack,
    Mesh,
    Parameter,
    Placement,
    Replicate,
    Shard,
)

ROWS = MatrixStack(1, (MatrixRows("", (Interval(0, 64),)),))
FLAT = Mesh((4,), (0, 1, 2, 3))
SQUARE = Mesh((2, 2), (0, 1, 2, 3))


def chosen(link: Link, mesh: Mesh, *placements: Placement) -> set[str]:
    """Exchanges of the plan of four 64 x 64 matrices."""
    layout = Layout((64, 64), mesh, placements)
    parameters = [Parameter(f"layers.{index}.w", f"layers.{index}", layout, ROWS) for index in range(4)]
    plan = plan_of(parameters, exchange="auto", link=link)
    assert all(bucket.reason.startswith(f"{bucket.exchange} is the fastest") for bucket in plan.buckets)
    return {bucket.exchange for bucket in plan.buckets}


@pytest.mark.parametrize(
    ("link", "exchange"),
    [
        # One call instead of two, where only calls cost.
        (Link(bandwidth_gb=1e6, latency_us=1e6, tflops=1e3), "all_gather"),
        # A quarter of the computing, where only that costs.
        (Link(bandwidth_gb=1e6, latency_us=1e-3, tflops=1e-12), "all_to_all"),
        # Half the bytes, where only they cost.
        (Link(bandwidth_gb=1e-9, latency_us=1e-3, tflops=1e3), "all_to_all"),
    ],
    ids=["latency", "computing", "bandwidth"],
)
def test_the_fastest_exchange_is_taken(link: Link, exchange: str) -> None:
    assert chosen(link, FLAT, Shard(0)) == {exchange}


def test_everyone_orthogonalizing_is_not_considered_over_replicas() -> None:
    assert chosen(Link(bandwidth_gb=1e6, latency_us=1e6, tflops=1e3), SQUARE, Replicate(), Shard(0)) == {"all_to_all"}
