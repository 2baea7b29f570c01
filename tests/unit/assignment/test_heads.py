"""Known attention is split into its heads, and other attention is refused with the split to write."""

from typing import Any

import pytest
import torch

from titan_muon import Hybrid, head_splits
from titan_muon.engine.tensors.matrices import matrix_shapes, stack_of

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "Llama": (GROUPED, {"q_proj": 4, "k_proj": 2, "v_proj": 2}),
    "Mistral": (GROUPED, {"q_proj": 4, "k_proj": 2, "v_proj": 2}),
    "Qwen3": (GROUPED, {"q_proj": 4, "k_proj": 2, "v_proj": 2}),
    "Gemma2": (GROUPED, {"q_proj": 4, "k_proj": 2, "v_proj": 2}),
    "Phi3": ({**GROUPED, "pad_token_id": 0}, {"qkv_proj": 8}),
    "GPT2": ({"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 32}, {"c_attn": 12}),
    "Falcon": ({**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}, {"query_key_value": 8}),
}
"""By architecture: sizes of a model, and the heads of each projection."""


def model_of(architecture: str, sizes: dict[str, Any]) -> torch.nn.Module:
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("architecture", MODELS)
def test_each_head_is_a_matrix(architecture: str) -> None:
    sizes, heads = MODELS[architecture]
    model = model_of(architecture, sizes)
    splits = head_splits(model)
    hybrid = Hybrid(model, muon={"split": splits})
    shapes = {a.fqn: a.shape for a in hybrid.assignments if a.optimizer == "muon"}
    found = {}
    for split in splits:
        matrices = matrix_shapes(shapes[split.match], stack_of(split.match, shapes[split.match], splits))
        assert set(matrices) == {(16, 64)}
        found[split.match.split(".")[-2]] = len(matrices)
    assert found == heads
    assert f"{max(heads.values())} of 16x64" in hybrid.table()
