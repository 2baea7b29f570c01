"""Owner policies of other systems, on a plan of this project."""

import pytest

from benchmarks.owners import owned_by, per_layer, round_robin
from tests.unit.plan.test_timeline import parameters
from tests.unit.plans import plan_of
from titan_muon.plan import Plan


def owners(plan: Plan) -> list[int]:
    """Owners in the order of the matrices."""
    owners = {m: owner for b in plan.buckets for m, owner in zip(b.matrices, b.owners, strict=True)}
    return [owners[matrix] for matrix in range(len(plan.matrices))]


def test_round_robin_deals_matrices_in_the_order_of_the_parameters() -> None:
    assert owners(owned_by(plan_of(parameters(6, 4)), round_robin)) == [0, 1, 2, 3, 0, 1]


def test_per_layer_gives_whole_layers_in_turn() -> None:
    pairs = [p for pair in zip(parameters(4, 2), parameters(4, 2), strict=True) for p in pair]
    assert owners(owned_by(plan_of(pairs), per_layer)) == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_plan_without_owners_is_refused() -> None:
    with pytest.raises(ValueError, match="exchange='all_to_all'"):
        owned_by(plan_of(parameters(2, 2), exchange="all_gather"), round_robin)
