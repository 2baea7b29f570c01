"""Each row of docs/results/zoo.md is the default assignment of its model: a family of TorchTitan or an architecture of
Hugging Face, on the meta device from a configuration. To add a model, add its row."""

import importlib
import importlib.util
import re
from collections import Counter
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titan_muon import Hybrid, head_splits
from titan_muon.assignment.roles import inspect_model
from titan_muon.assignment.rules import EMBEDDING, HEAD, assign_parameters, splits_with
from titan_muon.assignment.table import OUTSIDE
from titan_muon.matrices.stacks import matrix_shapes, stack_of
from titan_muon.trainer.torchtitan import compat

PAGE = Path(__file__).parents[3] / "docs" / "results" / "zoo.md"
ROWS = {
    line.split("|")[1].strip(): line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count("%") == 1
}
LAYERS, SHAPES_SHOWN = 4, 2
USUAL = (EMBEDDING.partition(":")[0], HEAD, "vector")
"""Reasons for AdamW in every model, which the page leaves out."""
FUSED = "fused layers of main"
"""Modules with the fused layouts that test_roles.py reads."""
without_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install 'titan-muon[zoo]'"
)


def titan_model(family: str, flavor: str) -> nn.Module:
    compat.install()
    # The family's module has stand-ins for kernels that are not installed.
    with importlib.import_module("models.qwen3_5").stand_in_for_kernels() if family == "qwen3_5" else nullcontext():
        module = importlib.import_module(f"torchtitan.models.{family}")
    make: Any = next(v for name, v in vars(module).items() if name.endswith("_configs") and isinstance(v, dict))[flavor]
    with torch.device("meta"):
        # Families take different options for a flavor; the options do not change the parameters.
        for options in ({}, {"attn_backend": "flex"}, {"attn_backend": "flex", "moe_comm_backend": "standard"}):
            try:
                return (make(**options) if callable(make) else make).build()
            except TypeError:
                continue
    raise AssertionError(f"{family} takes other options")


def hugging_face_model(architecture: str) -> nn.Module:
    """Four layers in default sizes."""
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, f"{architecture}Config")()
    for key in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if hasattr(config, key):
            setattr(config, key, LAYERS)
    if "layer_types" in vars(config) and config.layer_types:
        config.layer_types = config.layer_types[:LAYERS]
    causal = transformers.AutoModelForCausalLM
    maker = causal if type(config) in causal._model_mapping else transformers.AutoModel
    with torch.device("meta"):
        return maker.from_config(config)


def row(name: str, model: nn.Module) -> str:
    """A model's line of the page: Muon's share, its matrices, and unusual parameters of AdamW."""
    assigned = assign_parameters(inspect_model([model]), [])
    splits = splits_with((), assigned)
    inside = [a for a in assigned if a.role not in OUTSIDE and a.reason not in (EMBEDDING, HEAD)]
    matrices = [a for a in assigned if a.optimizer == "muon"]
    share = sum(prod(a.shape) for a in matrices) / sum(prod(a.shape) for a in inside)
    counts = Counter(s for a in matrices for s in matrix_shapes(a.shape, stack_of(a.fqn, a.shape, splits)))
    most = sorted(counts.items(), key=lambda item: (-item[1] * prod(item[0]), item[0]))
    shown = [f"{count:,} of {rows}x{cols}" for (rows, cols), count in most[:SHAPES_SHOWN]]
    rest = sum(count for _, count in most[SHAPES_SHOWN:])
    shown += [f"{rest:,} others"] if rest else []
    reasons = Counter(re.split(r":| \(|, | of a ", a.reason)[0] for a in assigned if a.optimizer != "muon")
    others = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()) if reason not in USUAL)
    return f"| {name} | {100 * share:.1f} % | {', '.join(shown)} | {others} |"


def marks(name: str) -> Any:
    # Flux is imported with the text encoders of Hugging Face.
    return without_transformers if " " not in name or name.startswith("flux") else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in ROWS if name != FUSED])
def test_a_model_is_assigned_as_its_row_says(name: str) -> None:
    model = titan_model(*name.split()) if " " in name else hugging_face_model(name)
    assert row(name, model) == ROWS[name]


def test_the_page_has_every_family_of_torchtitan_and_trains_90_percent_with_muon() -> None:
    (place,) = importlib.util.find_spec("torchtitan.models").submodule_search_locations
    installed = {path.parent.name for path in Path(place).glob("*/model*")} - {"common"}
    assert installed == {name.split()[0] for name in ROWS if " " in name} - {"fused"}
    assert len(ROWS) > 40
    assert min(float(line.split("|")[2].strip(" %")) for line in ROWS.values()) > 90


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


@without_transformers
@pytest.mark.parametrize("architecture", MODELS)
def test_each_head_is_a_matrix(architecture: str) -> None:
    transformers: Any = importlib.import_module("transformers")
    sizes, heads = MODELS[architecture]
    with torch.device("meta"):
        config = getattr(transformers, f"{architecture}Config")(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
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
