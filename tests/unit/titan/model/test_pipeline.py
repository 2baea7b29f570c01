"""Pipeline stages: initial values independent of the cut, and refusals."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torchtitan.distributed.pipeline_parallel import _split_module

import models  # noqa: F401 (registers the families)
from tests import tiny
from tests.unit.titan.model.batches import initialized
from titan_muon.trainer.model.parallelize import with_placement
from titan_muon.trainer.model.pipeline import init_within
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import Recipe
from titan_muon.trainer.recipe.torchtitan_sections import Parallelism
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.trainer_config import trainer_config

PARTS = (("tok_embeddings", "layers.0"), ("layers.1", "layers.2"), ("layers.3",), ("norm", "lm_head"))
"""Of a model with four layers."""
SEED = 7


def started(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.state_dict().items()}


@pytest.mark.parametrize(("family", "flavor"), [("llama3", "tiny"), ("qwen3", "moe_tiny"), ("deepseek_v3", "tiny")])
def test_every_stage_starts_as_in_the_whole_model(family: str, flavor: str) -> None:
    with torch.device("meta"):
        whole = model_spec(family, flavor).model.build()
    expected, weights = started(initialized(model_spec(family, flavor).model, SEED)), {}
    ends = [f"layers.{index}" for index in range(3, len(whole.layers))]
    for number, names in enumerate((*PARTS[:2], ends, PARTS[3])):
        part = _split_module(whole, list(names)).to_empty(device="cpu")
        part.init_weights = lambda: None
        # TorchTitan's seed of a stage.
        torch.manual_seed(SEED + number)
        stream = torch.get_rng_state()
        with torch.no_grad():
            init_within(whole, part, SEED)
        assert torch.equal(torch.get_rng_state(), stream), "the stage goes on with its own seed"
        assert "init_weights" not in vars(part), "the whole model is let go"
        weights |= started(part)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_pipelining_gives_every_stage_the_values_of_the_whole_model() -> None:
    spec, parts = model_spec("llama3", "tiny"), []

    def cut(model: torch.nn.Module, **_: object) -> tuple[object, ...]:
        parts.append(_split_module(model, ["norm", "lm_head"]).to_empty(device="cpu"))
        return None, parts, False, True

    recipe = Recipe(parallelism=Parallelism(pipeline_parallel_degree=2))
    with torch.device("meta"):
        whole = spec.model.build()
    with_placement(dataclasses.replace(spec, pipelining_fn=cut), recipe).pipelining_fn(whole)
    torch.manual_seed(1)
    with torch.no_grad():
        parts[0].init_weights(buffer_device=None)
    alone = initialized(spec.model, recipe.debug.seed)
    assert torch.equal(parts[0].lm_head.weight, alone.lm_head.weight)


def test_the_parts_of_a_recipe_reach_torchtitan_as_lists(tmp_path: Path) -> None:
    parts = (("tok_embeddings", "layers.0", "layers.1"), ("layers.2", "layers.3", "norm", "lm_head"))
    cut = Parallelism(pipeline_parallel_degree=2, module_fqns_per_model_part=parts)
    recipe = dataclasses.replace(tiny.recipe(tmp_path), parallelism=cut)
    config = trainer_config(recipe, Run(folder=str(tmp_path)), 2)
    assert config.parallelism.module_fqns_per_model_part == list(map(list, parts))
