"""TorchTitan on ranks: pipeline stages without names of the whole model, and a replaced collective."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.harness import on_ranks
from titan_muon.trainer.torchtitan import compat


@on_ranks(2)
@pytest.mark.parametrize("ends_alone", [False, True])
def test_a_stage_has_the_rules_of_the_whole_model(rank: int, ends_alone: bool) -> None:
    """A rule for one stage is not refused on another stage, also one without a matrix, and has a group on each."""
    from tests.unit.titan.assign.test_optimizers import Model, names
    from titan_muon.options import Rule
    from titan_muon.trainer.assign.container import HybridOptimizers

    slow = Rule(match="layers.1.wq.*", optimizer="muon", options={"lr": 0.5})
    config = HybridOptimizers.Config(rules=(slow,), tables={"muon": {"lr": 1e-3}, "adamw": {"lr": 1e-3}})
    first = Model(hidden=False) if ends_alone else Model(layers=1)
    part = first if rank == 0 else Model(layers=1, first=1, ends=False)
    fully_shard(part, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "fsdp"))["fsdp"])
    queries, outputs = ({f"layers.{rank}.{name}.weight"} for name in ("wq", "wo"))
    groups = names(HybridOptimizers(config, model_parts=[part]))["muon"]
    if ends_alone:
        assert groups == ([queries, outputs] if rank else [set(), set()])
    else:
        assert groups == ([outputs, queries] if rank else [queries | outputs, set()])


@on_ranks(2)
def test_spmd_types_exchanges_pieces_of_any_size_on_gloo(rank: int) -> None:
    """By a replacement of `compat`."""
    compat.install()
    import spmd_types._dist as spmd_dist

    # Rank r sends 1 + r rows to rank 0 and 3 rows to rank 1, each row with the sender's number.
    rows = [[1, 3], [2, 3]]
    inputs = [torch.full((count, 2), float(rank)) for count in rows[rank]]
    outputs = [torch.empty(rows[sender][rank], 2) for sender in range(2)]
    spmd_dist.dist.all_to_all(outputs, inputs, group=torch.distributed.group.WORLD)
    assert spmd_dist.dist.get_world_size() == 2
    assert all(torch.equal(piece, torch.full_like(piece, float(sender))) for sender, piece in enumerate(outputs))
