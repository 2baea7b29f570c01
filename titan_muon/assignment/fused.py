"""Known layouts of parameters with several matrices, and attention projections by head, as splits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..engine.tensors.names import canonical_fqn
from ..options import Split

FusedLayout = tuple[str, dict[str, int | tuple[int, ...]]]


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's class and bases, because FSDP2 and float8 insert a class."""
    return tuple(kind.__name__ for kind in type(module).__mro__)


def fused_split(fqn: str, parameter: Tensor, owner: nn.Module, parent: nn.Module) -> Split | None:
    """The split of a parameter with a known layout, of module `owner` within `parent`."""
    *_, before, last = ("", "", *fqn.split("."))
    name, shape = before if last == "weight" else last, tuple(parameter.shape)
    layout = _stack(name, shape, owner) or _rows(name, shape, owner, parent) if len(shape) > 1 else None
    return None if layout is None else Split(match=fqn, dims=layout[0], lengths=layout[1])


def _stack(name: str, shape: tuple[int, ...], owner: nn.Module) -> FusedLayout | None:
    """Gate and up in a tensor of three or four dims, and experts stored as (in, out)."""
    is_llama4 = any(kind.startswith("Llama4") for kind in class_names(owner))
    # Hugging Face's experts have attributes for the order, except for the older Llama 4.
    turned = getattr(owner, "is_transposed", is_llama4)
    match name, shape:
        # TorchTitan's, (F, 2, D) and (E, F, 2, D) in 0.3.0's fused_swiglu, (2, F, D) in later versions.
        case "w13" | "w13_EF2D" | "w13_2FD", (_, _, 2, _):
            return "e f g d -> e g | f d", {}
        case "w13" | "w13_EF2D" | "w13_2FD", (_, 2, _):
            return "f g d -> g | f d", {}
        case "w13" | "w13_EF2D" | "w13_2FD", (2, _, _):
            return "g f d -> g | f d", {}
        # TorchTitan's GPT-OSS: alternating rows of an expert.
        case "mlp1_weight_EGD", _ if "GptOssGroupedExperts" in class_names(owner):
            return "e (f g) d -> e g | f d", {"g": 2}
        case "gate_up_proj", (_, _, _) if getattr(owner, "has_gate", True):
            fused = "(g f)" if getattr(owner, "is_concatenated", True) else "(f g)"
            return (f"e d {fused} -> e g | f d" if turned else f"e {fused} d -> e g | f d"), {"g": 2}
        case "down_proj", (_, _, _) if turned:
            return "e f d -> e | d f", {}
    return None


def _rows(name: str, shape: tuple[int, ...], owner: nn.Module, parent: Any) -> FusedLayout | None:
    """Matrices in one layer."""
    kinds, turned = class_names(parent), "Conv1D" in class_names(owner)
    match name, shape:
        # TorchTitan: for each head of k its heads of q, then k, then v.
        case "wqkv" | "Wqkv", _ if "FusedQKVLinear" in kinds and isinstance(getattr(parent, "heads_per_kv", None), int):
            return "(g p h) d -> p | (g h) d", {"p": (parent.heads_per_kv, 1, 1), "h": int(parent.head_dim)}
        # q, k and v in blocks of equal size.
        case "wqkv" | "Wqkv" | "qkv" | "in_proj_weight", (rows, cols) if rows == 3 * cols:
            return "(p f) d -> p | f d", {"p": 3}
        # CodeGen: q, v and k in each of four blocks.
        case "qkv_proj", _ if "CodeGenAttention" in kinds:
            return "(m p f) d -> p | (m f) d", {"m": 4, "p": 3}
        # Phi-3: blocks, with fewer heads of k and v. Only with these attributes, because other models have another
        # order.
        case "qkv_proj", (rows, _) if (size := getattr(parent, "head_dim", 0)) and rows % size == 0:
            heads = getattr(parent, "num_key_value_heads", 0)
            queries = rows // size - 2 * heads
            return ("(p h) d -> p | h d", {"p": (queries, heads, heads), "h": size}) if heads and queries > 0 else None
        case "query_key_value", _ if "FalconAttention" in kinds:
            return _falcon(parent)
        # q, k and v of each head side by side.
        case "query_key_value", _ if any(kind.startswith(("GPTNeoX", "Bloom", "Persimmon")) for kind in kinds):
            size = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
            return ("(n p h) d -> p | (n h) d", {"p": 3, "h": int(size)}) if size else None
        # Gate and up.
        case "gate_up_proj", (_, _):
            return "(g f) d -> g | f d", {"g": 2}
        case "Wi", (_, _) if any(kind.startswith("ModernBert") for kind in kinds):
            return "(g f) d -> g | f d", {"g": 2}
        # GPT-2's linear layers store (in, out).
        case "c_attn", (rows, cols) if turned and cols == 3 * rows:
            return "d (g f) -> g | f d", {"g": 3}
        case _, (_, _) if turned:
            return "d f -> | f d", {}
    return None


def _falcon(parent: Any) -> FusedLayout:
    """q, k and v of each group of heads, or in blocks."""
    size, heads, groups = int(parent.head_dim), int(parent.num_heads), int(parent.num_kv_heads)
    if parent.new_decoder_architecture:
        return "(g p h) d -> p | (g h) d", {"p": (heads // groups, 1, 1), "h": size}
    if parent.multi_query:
        return "(p h) d -> p | h d", {"p": (heads, 1, 1), "h": size}
    return "(n p h) d -> p | (n h) d", {"p": 3, "h": size}


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
"""Projections of Hugging Face's attention with whole heads in consecutive outputs, of queries, keys and values."""


def head_splits(model: nn.Module) -> tuple[Split, ...]:
    """Splits of queries, keys and values into heads, a matrix each: `Hybrid(muon={"split": ...})`.

    For attention of Hugging Face with `head_dim` and projections named as in PROJECTIONS, as of Llama, Mistral, Qwen,
    Gemma, OLMo, GLM, Phi, GPT-NeoX, Falcon and GPT-2. The output projection stays one matrix. `Hybrid.table` and
    `preview` show the number of matrices.

    Raises ValueError for a model without known attention.
    """
    splits: list[Split] = []
    for name, attention in model.named_modules():
        size: Any = getattr(attention, "head_dim", None)
        for projection in PROJECTIONS if isinstance(size, int) else ():
            linear = getattr(attention, projection, None)
            # GPT-2 stores (in, out).
            turned = linear is not None and "Conv1D" in class_names(linear)
            weight = getattr(linear, "weight", None)
            if weight is not None and weight.shape[1 if turned else 0] % size == 0:
                dims = "d (n h) -> n | h d" if turned else "(n h) d -> n | h d"
                fqn = canonical_fqn(f"{name}.{projection}.weight")
                splits.append(Split(match=fqn, dims=dims, lengths={"h": size}))
    if not splits:
        raise ValueError(
            "head_splits: the model has no attention with head_dim and one of the projections "
            f"{', '.join(PROJECTIONS)}; describe its heads as "
            "Split(match='*.wq.weight', dims='(n h) d -> n | h d', lengths={'h': head_dim})"
        )
    return tuple(splits)
