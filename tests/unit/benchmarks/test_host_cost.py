"""The host's cost of a step: both optimizers step on one rank of a fake world, and every value stays finite."""

import math

import torch

from benchmarks import host_cost
from benchmarks.host_cost import Case


def test_host_cost_measures_both_optimizers() -> None:
    case = Case("llama_muon", 1, 4)
    cost = host_cost.measured(case, repeats=2, profile=False)
    assert 0 < cost.parameters <= cost.pieces
    assert cost.muon > 0
    assert cost.adamw > 0
    header, _, row = host_cost.table({"dense_560": cost}).splitlines()
    assert header.count("|") == row.count("|")
    assert row.startswith(f"| dense_560 @ 64 | {cost.parameters} | {cost.pieces} |")


def test_parameters_stay_finite_over_steps() -> None:
    """The stand-in for a collective fills outputs with valid values."""
    with host_cost.optimizers(Case("llama_muon", 1, 4)) as (muon, _):
        for _ in range(4):
            muon.step()
        params = [param for group in muon.param_groups for param in group["params"]]
        assert all(math.isfinite(torch.linalg.vector_norm(param.to_local()).item()) for param in params)
