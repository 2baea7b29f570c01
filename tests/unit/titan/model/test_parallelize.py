"""Impossible models are refused early, with the key and a remedy."""

import dataclasses
from pathlib import Path

import pytest
import torch

import models  # noqa: F401 (registers the families)
from tests import tiny
from titan_muon.engine.layout.work import gram_flops, standard_flops
from titan_muon.trainer.dry_run.meta_model import build_meta_model
from titan_muon.trainer.model import owned_placement
from titan_muon.trainer.model.owned_placement import _flops
from titan_muon.trainer.model.parallelize import with_placement
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import Recipe, RecipeError
from titan_muon.trainer.recipe.sections import Muon, Placement


def test_owned_matrices_of_another_model_are_refused() -> None:
    spec = dataclasses.replace(model_spec("qwen3", "tiny"), parallelize_fn=lambda model, **_: model)
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dry_run_balances_owners_by_the_costs_of_the_planned_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The Gram iteration pays for different shapes on GPUs, and different costs give different owners."""
    asked = []
    monkeypatch.setattr(owned_placement, "_flops", lambda recipe, kind: asked.append(kind) or (lambda rows, cols: 1))
    build_meta_model(tiny.recipe(tmp_path, placement__muon="owned"), 2, device)
    assert set(asked) == {device}


def test_a_dry_run_counts_a_tied_embedding_once(tmp_path: Path) -> None:
    """Under spmd_types sharding splits the parameter into two, except with torch 2.14 and newer."""
    tied = tiny.recipe(tmp_path, model__flavor="0.6B")
    names = [name for name in build_meta_model(tied, 2, "cuda").parameters if "embedding" in name or "head" in name]
    assert len(names) == 1
