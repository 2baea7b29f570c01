"""Placement: the first matching rule decides, owners are balanced by cost, and impossible owners are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import models  # noqa: F401 (registers the families)
from benchmarks.owned_model import make, matrices
from tests import tiny
from titan_muon import Owners, own
from titan_muon.engine.layout.work import gram_flops, standard_flops
from titan_muon.owned import is_owned
from titan_muon.owned.owners import check_rules
from titan_muon.planner.ownership import PlacementRule
from titan_muon.trainer.dry_run.meta_model import build_meta_model
from titan_muon.trainer.model.owned_placement import _flops
from titan_muon.trainer.model.parallelize import with_placement
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import Recipe, RecipeError
from titan_muon.trainer.recipe.sections import Muon, Placement

NAMES = ("layers.0.wq", "layers.0.norm", "layers.1.wq", "head")


def owned(match: str, owner: object = "balanced") -> PlacementRule:
    return PlacementRule(match=match, placement="owned", owner=owner)  # type: ignore[arg-type]


def shard0(match: str, owner: object = "balanced") -> PlacementRule:
    return replace(owned(match, owner), placement="shard0")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([owned("layers.2.*")], r"placement\.rule\[0\]\.match = 'layers\.2\.\*' matches no parameter"),
        ([owned("*"), shard0("head")], r"placement\.rule\[1\]\.match = 'head' matches no parameter.*move it up"),
        ([owned("*", "first")], r"placement\.rule\[0\]\.owner = 'first' is not accepted; it takes \"balanced\""),
        ([replace(owned("*"), placement="own")], r"placement\.rule\[0\]\.placement = 'own' is not one of owned"),
        ([shard0("head", 1)], r"placement\.rule\[0\]\.owner = 1: sharded parameters have no owner"),
    ],
)
def test_a_rule_without_effect_is_refused(rules: list[PlacementRule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rules(NAMES, rules)


@pytest.mark.usefixtures("four_ranks")
def test_library_rules_place_any_parameter() -> None:
    net = make()
    rules = shard0("layers.0.wq.*"), owned("*.norm1.*", 3), owned("layers.1.*", "layer"), owned("*.wv.weight", 2)
    owners = Owners(net, mesh=init_device_mesh("cpu", (4,)), params=matrices(net), rules=rules)
    assert "layers.0.wq.weight" not in owners.infos
    assert {owners.owners(f"layers.{i}.norm1.weight") for i in range(3)} == {(3,)}, "the first rule decides"
    assert len({owners.owners(name) for name in owners.infos if name.startswith("layers.1.w")}) == 1
    assert owners.owners("layers.0.wv.weight") == owners.owners("layers.2.wv.weight") == (2,)
    for layer in net.layers:
        own(layer, owners=owners)
    assert is_owned(net.layers[0].norm1.weight)
    assert not is_owned(net.layers[0].wq.weight)


@pytest.mark.usefixtures("four_ranks")
def test_parameters_outside_muon_are_balanced_by_bytes() -> None:
    net = make()
    params = matrices(net)
    owners = Owners(net, mesh=init_device_mesh("cpu", (4,)), params=params, elementwise=params)
    assert {item.flops for item in owners.ownership.items} == {0}
    held = [load.bytes for load in owners.ownership.loads()]
    assert max(held) <= 1.2 * sum(held) / 4


def test_owned_matrices_of_another_model_are_refused() -> None:
    spec = replace(model_spec("qwen3", "tiny"), parallelize_fn=lambda model, **_: model)
    with pytest.raises(RecipeError, match=r"placement\.muon = 'owned' knows TorchTitan's decoders.*use 'shard0'"):
        with_placement(spec, Recipe(placement=Placement(muon="owned")))


def test_owners_are_balanced_by_the_flops_of_the_chosen_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `auto` takes the Gram iteration for a wide matrix, at a lower cost."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    flops = {device: _flops(Recipe(), device)(1024, 8192) for device in ("cpu", "cuda")}
    assert flops["cpu"] == standard_flops(1024, 8192, 5)
    assert flops["cuda"] == gram_flops(1024, 8192, 5, restarts=1) < flops["cpu"]
    # SOAP's cost grows with the third power of the longer side.
    for algorithm, tall_costs_more in (("muon", False), ("soap", True)):
        cost = _flops(Recipe(muon=Muon(algorithm=algorithm)), "cpu")
        assert (cost(4096, 256) > cost(1024, 1024)) is tall_costs_more, algorithm


def test_a_dry_run_counts_a_tied_embedding_once(tmp_path: Path) -> None:
    """Under spmd_types sharding splits the parameter into two, except with torch 2.14 and newer."""
    tied = tiny.recipe(tmp_path, model__flavor="0.6B")
    names = [name for name in build_meta_model(tied, 2, "cuda").parameters if "embedding" in name or "head" in name]
    assert len(names) == 1
