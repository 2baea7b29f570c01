"""Writes the tables of docs/zoo.md: the default assignment for TorchTitan's families and Hugging Face's models.

    python docs/make_zoo.py

Models are built on the meta device from configurations: no download, no weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from titan_muon.assignment.roles import inspect_model  # noqa: E402
from titan_muon.assignment.rules import EMBEDDING, HEAD, Assignment, assign_parameters, splits_with  # noqa: E402
from titan_muon.assignment.table import OUTSIDE  # noqa: E402
from titan_muon.engine.tensors.matrices import matrix_shapes, stack_of  # noqa: E402
from titan_muon.trainer.torchtitan import compat  # noqa: E402

PAGE = ROOT / "docs" / "zoo.md"
START, END = "<!-- {}: written by docs/make_zoo.py -->\n", "<!-- end of {} -->\n"
LAYERS = 4
SHAPES_SHOWN = 5
HEADER = "| model | Muon's share | Muon's matrices | what AdamW takes |\n|---|---|---|---|\n"

TITAN = (
    ("llama3", "debugmodel"),
    ("qwen3", "debugmodel_moe"),
    ("qwen3_5", "debugmodel_moe"),
    ("qwen3_5", "397B-A17B"),
    ("deepseek_v3", "debugmodel"),
    ("kimi_k2_7", "debugmodel"),
    ("gpt_oss", "debugmodel"),
    ("muse_glimmer", "debugmodel_mm"),
    ("flux", "flux-debug"),
)
"""A flavor of each family with all kinds of the family's parameters, and one of a published size."""

HUGGING_FACE = (
    *(
        "Llama",
        "Mistral",
        "Qwen2",
        "Qwen3",
        "Gemma2",
        "Gemma3Text",
        "Phi",
        "Phi3",
        "Glm4",
        "Cohere",
        "Olmo2",
        "StableLm",
    ),
    *("GPT2", "GPTNeoX", "Bloom", "Falcon", "Mpt", "OPT", "CodeGen", "Starcoder2"),
    *("Mixtral", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "DeepseekV3", "Olmoe", "GraniteMoe", "GptOss", "Llama4Text"),
    *("Mamba", "Mamba2", "Jamba", "Rwkv", "Bert", "ModernBert", "T5", "ViT", "CLIPVision"),
)
"""Architectures by name of the configuration class."""


class Fused(nn.Module):
    """A layer in the fused layouts of TorchTitan's main: q, k and v, gate and up (2, F, D), experts (E, F, 2, D)."""

    def __init__(self, dim: int = 256, hidden: int = 768, experts: int = 8) -> None:
        super().__init__()
        self.attention = FusedQKVLinear(dim)
        self.feed_forward = _holding(w13=(2, hidden, dim), w2=(dim, hidden))
        self.experts = _holding(w13=(experts, hidden, 2, dim), w2_EDF=(experts, dim, hidden))


class FusedQKVLinear(nn.Module):
    """Named like TorchTitan's class: 2 heads of q, one of k and one of v per group."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads_per_kv, self.head_dim = 2, 64
        self.wqkv = nn.Linear(dim, 2 * 4 * 64, bias=False)


def _holding(**shapes: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.empty(shape)))
    return module


def fused_model() -> nn.Module:
    """A model with TorchTitan main's three fused layouts."""
    with torch.device("meta"):
        parts = {"tok_embeddings": nn.Embedding(2048, 256), "layers": nn.ModuleList([Fused()]), "lm_head": None}
        return nn.ModuleDict({**parts, "lm_head": nn.Linear(256, 2048, bias=False)})  # type: ignore[dict-item]


def titan_model(family: str, flavor: str) -> nn.Module:
    """A TorchTitan model on the meta device."""
    compat.install()
    # The family's module has stand-ins for kernels that are not installed.
    with importlib.import_module("models.qwen3_5").stand_in_for_kernels() if family == "qwen3_5" else nullcontext():
        module = importlib.import_module(f"torchtitan.models.{family}")
    every = next(v for name, v in vars(module).items() if name.endswith("_configs") and isinstance(v, dict))
    with torch.device("meta"):
        built: nn.Module = _configured(every[flavor]).build()
    return built


def _configured(make: Any) -> Any:
    # Families take different options for a flavor; the options do not change the parameters.
    for options in ({}, {"attn_backend": "flex"}, {"attn_backend": "flex", "moe_comm_backend": "standard"}):
        try:
            return make(**options) if callable(make) else make
        except TypeError:
            continue
    raise AssertionError(f"{make} takes other options")


def hugging_face_model(architecture: str) -> nn.Module:
    """A Hugging Face model on the meta device: 4 layers, default sizes."""
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, f"{architecture}Config")()
    for key in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if hasattr(config, key):
            setattr(config, key, LAYERS)
    # List of layer kinds of some configurations.
    if "layer_types" in vars(config) and config.layer_types:
        config.layer_types = config.layer_types[:LAYERS]
    causal = transformers.AutoModelForCausalLM
    maker = causal if type(config) in causal._model_mapping else transformers.AutoModel
    with torch.device("meta"):
        built: nn.Module = maker.from_config(config)
    return built


def row(name: str, model: nn.Module) -> str:
    """A model's line of the table."""
    assigned = assign_parameters(inspect_model([model]), [])
    splits = splits_with((), assigned)
    inside = [a for a in assigned if a.role not in OUTSIDE and a.reason not in (EMBEDDING, HEAD)]
    matrices = [a for a in assigned if a.optimizer == "muon"]
    share = sum(prod(a.shape) for a in matrices) / sum(prod(a.shape) for a in inside)
    shapes = Counter(s for a in matrices for s in matrix_shapes(a.shape, stack_of(a.fqn, a.shape, splits)))
    return f"| {name} | {100 * share:.1f} % | {_shapes(shapes)} | {_elsewhere(assigned)} |\n"


def _shapes(counts: Counter[tuple[int, int]]) -> str:
    most = sorted(counts.items(), key=lambda item: (-item[1] * prod(item[0]), item[0]))
    shown = [f"{count:,} of {rows}x{cols}" for (rows, cols), count in most[:SHAPES_SHOWN]]
    rest = sum(count for _, count in most[SHAPES_SHOWN:])
    return ", ".join([*shown, *([f"{rest:,} others"] if rest else [])])


def _elsewhere(assigned: tuple[Assignment, ...]) -> str:
    reasons = Counter(a.reason.partition(":")[0].partition(" (")[0] for a in assigned if a.optimizer != "muon")
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def titan_rows() -> Iterator[str]:
    """TorchTitan's families, and the layouts of its main branch."""
    for family, flavor in TITAN:
        yield row(f"{family} {flavor}", titan_model(family, flavor))
    yield row("fused layers of main", fused_model())


def hugging_face_rows() -> Iterator[str]:
    """Hugging Face's architectures."""
    for architecture in HUGGING_FACE:
        yield row(architecture, hugging_face_model(architecture))


TABLES: dict[str, Callable[[], Iterator[str]]] = {"torchtitan": titan_rows, "hugging face": hugging_face_rows}


def written(page: str, table: str) -> str:
    """The page with a new table."""
    start, end = START.format(table), END.format(table)
    before, rest = page.split(start)
    return before + start + HEADER + "".join(TABLES[table]()) + end + rest.split(end)[1]


if __name__ == "__main__":
    for name in TABLES:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), name), encoding="utf-8")
