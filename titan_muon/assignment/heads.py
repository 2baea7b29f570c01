"""Splits of attention projections into their heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..engine.tensors.names import canonical_fqn
from ..options import Split
from .fused import class_names

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
"""Projections of Hugging Face's attention with whole heads in consecutive outputs, of queries, keys and values."""


def head_splits(model: nn.Module) -> tuple[Split, ...]:
    """Splits of queries, keys and values into heads, a matrix each: `Hybrid(muon={"split": ...})`.

    For attention of Hugging Face with `head_dim` and projections named as in PROJECTIONS, as of Llama, Mistral, Qwen,
    Gemma, OLMo, GLM, Phi, GPT-NeoX, Falcon and GPT-2. The output projection stays one matrix. `Hybrid.table` and
    `preview` show the number of matrices.

    Raises ValueError for a model without known attention.
    """
    splits = tuple(_splits(model))
    if not splits:
        raise ValueError(
            "head_splits: the model has no attention with head_dim and one of the projections "
            f"{', '.join(PROJECTIONS)}; describe its heads as "
            "Split(match='*.wq.weight', dims='(n h) d -> n | h d', lengths={'h': head_dim})"
        )
    return splits


def _splits(model: nn.Module) -> Iterator[Split]:
    for name, attention in model.named_modules():
        size: Any = getattr(attention, "head_dim", None)
        for projection in PROJECTIONS if isinstance(size, int) else ():
            linear = getattr(attention, projection, None)
            weight = getattr(linear, "weight", None)
            if linear is None or weight is None:
                continue
            # GPT-2 stores (in, out).
            turned = "Conv1D" in class_names(linear)
            if weight.shape[1 if turned else 0] % size == 0:
                dims = "d (n h) -> n | h d" if turned else "(n h) d -> n | h d"
                yield Split(match=canonical_fqn(f"{name}.{projection}.weight"), dims=dims, lengths={"h": size})
