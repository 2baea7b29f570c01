"""Optimizers of pipeline stages from TorchTitan's configuration, without names of the whole model."""

from tests.dist.harness import run_ranks

Groups = dict[str, list[set[str]]]


def groups(rank: int, world_size: int, ends_alone: bool) -> Groups:
    """Names in each group of a rank with a separate stage. `ends_alone`: rank 0 has only the embedding and the head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tests.unit.titan.assign.test_optimizers import Model, names
    from titan_muon.options import Rule
    from titan_muon.trainer.assign.container import HybridOptimizers

    slow = Rule(match="layers.1.wq.*", optimizer="muon", options={"lr": 0.5})
    config = HybridOptimizers.Config(rules=(slow,), tables={"muon": {"lr": 1e-3}, "adamw": {"lr": 1e-3}})
    first = Model(hidden=False) if ends_alone else Model(layers=1)
    part = first if rank == 0 else Model(layers=1, first=1, ends=False)
    fully_shard(part, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "fsdp"))["fsdp"])
    return names(HybridOptimizers(config, model_parts=[part]))


def test_a_stage_has_the_rules_of_the_whole_model() -> None:
    """A rule for one stage must not be refused on another stage, and the number of groups must be equal."""
    first, second = run_ranks(groups, 2, False)
    assert first["muon"] == [{"layers.0.wq.weight", "layers.0.wo.weight"}, set()]
    assert second["muon"] == [{"layers.1.wo.weight"}, {"layers.1.wq.weight"}]


def test_a_stage_without_a_matrix_starts() -> None:
    first, second = run_ranks(groups, 2, True)
    assert first["muon"] == [set(), set()]
    assert second["muon"] == [{"layers.1.wq.weight"}, {"layers.1.wo.weight"}]
