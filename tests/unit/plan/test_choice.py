"""`auto` takes the exchange that is the fastest on the link it is given."""

import pytest

from tests.unit.plans import plan_of
from titan_muon.options import Machine
from titan_muon.plan.terms.types import (
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


def chosen(machine: Machine, mesh: Mesh, *placements: Placement) -> set[str]:
    """Exchanges of the plan of four 64 x 64 matrices."""
    layout = Layout((64, 64), mesh, placements)
    parameters = [Parameter(f"layers.{index}.w", f"layers.{index}", layout, ROWS) for index in range(4)]
    plan = plan_of(parameters, exchange="auto", machine=machine)
    assert all(bucket.reason.startswith(f"{bucket.exchange} is the fastest") for bucket in plan.buckets)
    return {bucket.exchange for bucket in plan.buckets}


@pytest.mark.parametrize(
    ("machine", "exchange"),
    [
        # One call instead of two, where only calls cost.
        (Machine(node_gb=1e6, node_latency_us=1e6, tflops=1e3), "all_gather"),
        # A quarter of the computing, where only that costs.
        (Machine(node_gb=1e6, node_latency_us=1e-3, tflops=1e-12), "all_to_all"),
        # Half the bytes, where only they cost.
        (Machine(node_gb=1e-9, node_latency_us=1e-3, tflops=1e3), "all_to_all"),
    ],
    ids=["latency", "computing", "bandwidth"],
)
def test_the_fastest_exchange_is_taken(machine: Machine, exchange: str) -> None:
    assert chosen(machine, FLAT, Shard(0)) == {exchange}


def test_everyone_orthogonalizing_is_not_considered_over_replicas() -> None:
    assert chosen(Machine(node_gb=1e6, node_latency_us=1e6, tflops=1e3), SQUARE, Replicate(), Shard(0)) == {
        "all_to_all"
    }
