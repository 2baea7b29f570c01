"""Plans for matrices under tensor parallelism: owners and refusals."""

from dataclasses import replace
from typing import Any

import pytest

from tests.machines import rates
from tests.unit.plans import mesh_of, parameter_of, plan_of, teams
from titan_muon.options import OptionError
from titan_muon.plan.summary import summarize
from titan_muon.plan.terms.machine import MachineRates
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


def matrix(name: str, shape: tuple[int, int], mesh: tuple[int, ...], *placements: Placement) -> Parameter:
    """A matrix on a mesh with tensor parallelism as the last axis."""
    cut = None if isinstance(placements[-1], Replicate) else len(mesh) - 1
    whole = parameter_of(name, shape, mesh_of(*mesh), *placements)
    return replace(whole, layout=replace(whole.layout, tensor_parallel=cut))


@pytest.mark.parametrize(("shape", "placement"), [((64, 32), Shard(0)), ((32, 64), Shard(1))])
def test_distributed_mode_exchanges_only_gram_matrices(shape: tuple[int, int], placement: Placement) -> None:
    plan = plan_of([matrix("w", shape, (4,), placement)], tp_mode="distributed")
    assert teams(plan) == [(0, 1, 2, 3)]
    [team] = {work.team for work in plan.works}
    assert team is not None
    for cost in summarize(plan).ranks:
        assert (cost.collectives, cost.bytes_sent) == (team.calls, team.sent)


def test_matrices_are_balanced_over_the_tensor_parallel_groups() -> None:
    matrices = [matrix(f"{i}", (64, 32), (2, 2), Shard(1), Shard(0)) for i in range(4)]
    plan = plan_of(matrices, tp_mode="distributed")
    assert sorted(teams(plan)) == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert {cost.ns_flops for cost in summarize(plan).ranks} == {sum(m.flops for m in plan.matrices) // 4}
    assert "matrices in slices: 4" in plan.reason


SQUARE = ((2, 2), Shard(1), Shard(0))


@pytest.mark.parametrize(
    ("mode", "options", "fault"),
    [
        ("distributed", {"orthogonalize": "reference"}, "orthogonalize = 'reference' is of whole matrices"),
        ("distributed", {"exchange": "all_gather"}, "exchange = 'all_gather' has no owners"),
        ("distributed", {"replicas": "redundant"}, "replicas = 'redundant' may repeat the work"),
        ("distributed", {"split_over": "auto"}, "split_over = 'auto' assigns slices to other ranks; choose 1"),
    ],
)
def test_options_unfit_for_a_tensor_parallel_mode_are_refused(mode: str, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(OptionError, match=rf"^tp_mode = '{mode}': {fault}.*, or tp_mode = 'owner'$"):
        plan_of([matrix("w", (8, 8), *SQUARE)], tp_mode=mode, **options)


@pytest.mark.parametrize(
    ("shape", "machine", "fault"),
    [
        ((9, 8), rates(), r"layers.1.w \(9 x 8\) cannot be cut into 2 equal slices"),
        ((8, 8), rates(ranks_per_node=1), r"layers.1.w \(8 x 8\) is cut over several nodes \(machine"),
    ],
)
def test_distributed_mode_names_a_matrix_without_slices(
    shape: tuple[int, int], machine: MachineRates, fault: str
) -> None:
    matrices = [matrix("layers.1.w", shape, *SQUARE)]
    with pytest.raises(OptionError, match=f"^tp_mode = 'distributed': {fault}.*; set 'owner'"):
        plan_of(matrices, tp_mode="distributed", machine=machine)


def test_distributed_mode_names_a_matrix_with_parts_on_some_ranks_only() -> None:
    """Two heads over four ranks: each head is on two ranks without the second head."""
    layout = Layout((8, 4), Mesh((4,), (0, 1, 2, 3)), (Shard(0),), 0)
    heads = tuple(MatrixRows(str(i), (Interval(4 * i, 4 * i + 4),)) for i in range(2))
    with pytest.raises(OptionError, match=r"'distributed': w \(4 x 4\) has parts only on some ranks of each"):
        plan_of([Parameter("w", "w", layout, MatrixStack(1, heads))], tp_mode="distributed")
