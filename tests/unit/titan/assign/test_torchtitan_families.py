"""TorchTitan's own model families get the right optimizers from the roles of their modules, at published sizes too."""

import importlib
import re

import pytest
import torch

from titan_muon.trainer.assign.container import HybridOptimizers, parts_of_config

FAMILIES = {
    ("gpt_oss", "debugmodel"): 0.9,
    ("gpt_oss", "120b"): 0.98,
    ("kimi_k2_7", "debugmodel"): 0.9,
    ("kimi_k2_7", "Kimi-K2.5"): 0.99,
    ("deepseek_v3", "671B"): 0.99,
    ("llama3", "8B"): 0.8,
    ("qwen3", "30B-A3B"): 0.9,
}
"""Least share of a model's numbers that Muon trains."""
SPARED = re.compile(r"embed|lm_head|router|bias|norm|sinks|\.scale$|pos_emb")


LARGE = ("671B", "Kimi-K2.5", "120b")


@pytest.mark.parametrize(
    ("family", "flavor"),
    [pytest.param(*key, marks=[pytest.mark.slow] if key[1] in LARGE else []) for key in FAMILIES],
)
def test_matrices_go_to_muon_and_everything_else_to_adamw(family: str, flavor: str) -> None:
    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor, attn_backend="flex")
    with torch.device("meta"):
        model = spec.model.build()
    taken = {a.fqn: a for a in parts_of_config(HybridOptimizers.Config(), [model], None).assignments}
    numbers = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert taken.keys() == numbers.keys()
    by_muon = {name for name, assignment in taken.items() if assignment.optimizer == "muon"}
    assert {name for name in numbers if SPARED.search(name.replace("patch_embed", ""))} == numbers.keys() - by_muon
    assert sum(numbers[name] for name in by_muon) >= FAMILIES[family, flavor] * sum(numbers.values())
    fused = [name for name in by_muon if re.search(r"wqkv|mlp1_weight", name)]
    assert all("known layout" in taken[name].reason for name in fused), "a fused matrix is cut into its matrices"
