"""The preview of a model in a user's script, or of its `config.json`, agrees with the recipe's dry run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import models  # noqa: F401 (registers the families)
from titan_muon import command, preview
from titan_muon.forecast.config_file import plan_config
from titan_muon.trainer.dry_run.verdict import StageReport, dry_run
from titan_muon.trainer.recipe import load
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.trainer_config import trainer_config

CONFIG = Path(__file__).parents[2] / "configs" / "qwen3_8b_muon.toml"
WORLD = 64
QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def recipe() -> StageReport:
    (part,) = dry_run(load(CONFIG), WORLD)
    return part


def shard(model: Any) -> nn.Module:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_the_preview_of_a_script_has_owners_bytes_and_memory_of_the_dry_run(recipe: StageReport) -> None:
    config = trainer_config(load(CONFIG), Run("absent"), WORLD)
    assert config.model_spec is not None
    shown = preview(config.model_spec.model.build, shard, WORLD)
    assert recipe.meta.plan is not None
    assert shown.model.plan is not None
    assert shown.model.plan.digest() == recipe.meta.plan.digest()
    for name in ("summary", "timeline", "memory", "loads", "others", "adamw"):
        assert getattr(shown.estimate, name) == getattr(recipe.estimate, name), name


def test_the_plan_of_a_config_has_bytes_and_memory_of_the_dry_run(
    recipe: StageReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_8B))
    shown = plan_config(str(file), WORLD)
    assert recipe.estimate.summary is not None
    assert shown.estimate.summary is not None
    assert asdict(shown.estimate.memory) == asdict(recipe.estimate.memory)
    assert shown.estimate.summary.bytes_sent_max == recipe.estimate.summary.bytes_sent_max
    assert shown.estimate.summary.ns_flops_max == recipe.estimate.summary.ns_flops_max

    file.write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": 2}))
    assert command.main(["plan", str(tmp_path), "--world-size", "8", "--owned", "--replicas", "2"]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.*.self_attn.q_proj.weight  (2)" in printed
    assert "Muon step: 14 matrices local, 0 exchanged" in printed


@pytest.mark.parametrize(
    ("text", "words", "problem"),
    [
        ("{}", "--world-size 8", "cannot read it"),
        (json.dumps(QWEN3_8B), "--world-size 8 --replicas 3", "--replicas 3 does not divide --world-size 8"),
        (json.dumps(QWEN3_8B), "--world-size 8 --replicas 0", "--replicas 0 does not divide --world-size 8"),
        ("", "--world-size 8", "no such file; name the config.json of a model"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(
    text: str, words: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    if text:
        file.write_text(text)
    assert command.main(["plan", str(file), *words.split()]) == 2
    assert problem in capsys.readouterr().err
