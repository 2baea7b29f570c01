"""Known layouts of parameters with several matrices, as splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..options import Split

Layout = tuple[str, dict[str, int | tuple[int, ...]]]


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's class and bases, because FSDP2 and float8 insert a class."""
    return tuple(kind.__name__ for kind in type(module).__mro__)


def fused_split(fqn: str, parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Split | None:
    """The split of a parameter with a known layout, of module `owner` within `parent`."""
    *_, last = ("", *fqn.split("."))
    *_, before = ("", *fqn.rpartition(".")[0].split("."))
    name = before if last == "weight" else last
    for names, layout in LAYOUTS:
        if name in names and parameter.ndim > 1 and (known := layout(parameter, owner, parent)) is not None:
            return Split(match=fqn, dims=known[0], lengths=known[1])
    if "Conv1D" in class_names(owner) and parameter.ndim == 2:
        # GPT-2's linear layers store (in, out).
        return Split(match=fqn, dims="d f -> | f d")
    return None


def _w13(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    """TorchTitan's gate and up: (F, 2, D) and (E, F, 2, D) in 0.3.0's fused_swiglu, (2, F, D) in later versions."""
    shape = tuple(parameter.shape)
    if len(shape) == 4:
        return ("e f g d -> e g | f d", {}) if shape[2] == 2 else None
    if len(shape) == 3 and 2 in shape[:2]:
        return ("f g d -> g | f d", {}) if shape[1] == 2 else ("g f d -> g | f d", {})
    return None


def _wqkv(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    """TorchTitan's FusedQKVLinear: for each head of k its heads of q, then k, then v. Else: q, k and v in blocks."""
    heads: Any = getattr(parent, "heads_per_kv", None)
    if "FusedQKVLinear" in class_names(parent) and isinstance(heads, int):
        return "(g p h) d -> p | (g h) d", {"p": (heads, 1, 1), "h": int(parent.head_dim)}  # type: ignore[arg-type]
    return _thirds(parameter, owner, parent)


def _thirds(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    """q, k and v in blocks of equal size."""
    if parameter.ndim == 2 and parameter.shape[0] == 3 * parameter.shape[1]:
        return "(p f) d -> p | f d", {"p": 3}
    return None


def _qkv_proj(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    """Phi-3: q, k and v in blocks, with fewer heads of k and v. CodeGen: q, v and k in each of four blocks."""
    if "CodeGenAttention" in class_names(parent):
        return "(m p f) d -> p | (m f) d", {"m": 4, "p": 3}
    # Only with these attributes, because other models have another order.
    size, heads = getattr(parent, "head_dim", 0), getattr(parent, "num_key_value_heads", 0)
    if not (size and heads) or parameter.ndim != 2 or parameter.shape[0] % size:
        return None
    queries = parameter.shape[0] // size - 2 * heads
    return ("(p h) d -> p | h d", {"p": (queries, heads, heads), "h": size}) if queries > 0 else None


def _query_key_value(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    """GPT-NeoX and BLOOM: q, k and v of each head side by side. Falcon: of each group of heads, or in blocks."""
    if "FalconAttention" in class_names(parent):
        return _falcon(parent)
    size = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
    known = any(name.startswith(("GPTNeoX", "Bloom", "Persimmon")) for name in class_names(parent))
    return ("(n p h) d -> p | (n h) d", {"p": 3, "h": int(size)}) if known and size else None


def _falcon(parent: Any) -> Layout:
    size, heads, groups = int(parent.head_dim), int(parent.num_heads), int(parent.num_kv_heads)
    if parent.new_decoder_architecture:
        return "(g p h) d -> p | (g h) d", {"p": (heads // groups, 1, 1), "h": size}
    if parent.multi_query:
        return "(p h) d -> p | h d", {"p": (heads, 1, 1), "h": size}
    return "(n p h) d -> p | (n h) d", {"p": 3, "h": size}


def _gate_up(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    """Hugging Face's gate and up: rows of a linear layer; rows or columns of experts, in blocks or alternating."""
    if parameter.ndim == 2:
        return "(g f) d -> g | f d", {"g": 2}
    fused = "(g f)" if getattr(owner, "is_concatenated", True) else "(f g)"
    # Hugging Face's experts have an attribute for the order, except for the older Llama 4.
    turned = getattr(owner, "is_transposed", any(name.startswith("Llama4") for name in class_names(owner)))
    if parameter.ndim != 3 or not getattr(owner, "has_gate", True):
        return None
    return (f"e d {fused} -> e g | f d" if turned else f"e {fused} d -> e g | f d"), {"g": 2}


def _halves(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    known = any(name.startswith("ModernBert") for name in class_names(parent))
    return ("(g f) d -> g | f d", {"g": 2}) if known and parameter.ndim == 2 else None


def _down(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    """Experts stored as (in, out)."""
    turned = getattr(owner, "is_transposed", any(name.startswith("Llama4") for name in class_names(owner)))
    return ("e f d -> e | d f", {}) if parameter.ndim == 3 and turned else None


def _gpt_oss(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    """TorchTitan's GPT-OSS: alternating gate and up rows of an expert."""
    return ("e (f g) d -> e g | f d", {"g": 2}) if "GptOssGroupedExperts" in class_names(owner) else None


def _c_attn(parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Layout | None:
    """GPT-2's q, k and v: columns of a layer stored as (in, out)."""
    thirds = parameter.ndim == 2 and parameter.shape[1] == 3 * parameter.shape[0]
    return ("d (g f) -> g | f d", {"g": 3}) if thirds and "Conv1D" in class_names(owner) else None


LAYOUTS: tuple[tuple[tuple[str, ...], Callable[[Tensor, nn.Module, nn.Module], Layout | None]], ...] = (
    (("w13", "w13_EF2D", "w13_2FD"), _w13),
    (("wqkv", "Wqkv"), _wqkv),
    (("qkv", "in_proj_weight"), _thirds),
    (("qkv_proj",), _qkv_proj),
    (("query_key_value",), _query_key_value),
    (("gate_up_proj",), _gate_up),
    (("Wi",), _halves),
    (("down_proj",), _down),
    (("mlp1_weight_EGD",), _gpt_oss),
    (("c_attn",), _c_attn),
)
"""Layouts by the name of the parameter or its layer."""
