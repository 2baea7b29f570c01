"""QK-clip on whole weights, head by head, by the Kimi K2 report (arXiv:2507.20534, 2.1)."""

import torch
from torch import Tensor

from titan_muon.plugins.qk_clip import (
    AttentionLayer,
    HeadRows,
    HeadWeight,
    fused_rows,
    key_rows,
    latent_key_rows,
    latent_query_rows,
    query_rows,
)

HEADS, KEY_HEADS, DIM, ROPE, VALUE = 6, 3, 5, 2, 4
GROUP = HEADS // KEY_HEADS
LOGITS = [50.0, 400.0, 99.0, 100.0, 150.0, 200.0]
"""The largest logit of each head."""
PATTERNS: dict[str, tuple[int, tuple[HeadRows, ...]]] = {
    "wq": (HEADS * DIM, query_rows(DIM)),
    "wk": (KEY_HEADS * DIM, key_rows(DIM)),
    "wk_of_each_head": (HEADS * DIM, key_rows(DIM)),
    "wqkv": (KEY_HEADS * (GROUP + 2) * DIM, fused_rows(DIM, GROUP)),
    "wq_b": (HEADS * (DIM + ROPE), latent_query_rows(DIM, ROPE)),
    "wkv_b": (HEADS * (DIM + VALUE), latent_key_rows(DIM, VALUE)),
}
"""Rows of each kind of projection in a layer, and the pattern."""


def whole_weights(columns: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(rows, columns, generator=generator) for name, (rows, _) in PATTERNS.items()}


def layer(weights: dict[str, Tensor], name: str = "layers.0") -> AttentionLayer:
    return AttentionLayer(name, HEADS, tuple(HeadWeight(key, w, PATTERNS[key][1]) for key, w in weights.items()))


def clipped(weights: dict[str, Tensor], logits: list[float], threshold: float, alpha: float) -> dict[str, Tensor]:
    """The projections after a step with the largest logits."""
    out = {name: weight.clone() for name, weight in weights.items()}
    factors = [min(1.0, threshold / logit) if logit > threshold else 1.0 for logit in logits]
    fused = (GROUP + 2) * DIM
    for head, f in enumerate(factors):
        group, number = divmod(head, GROUP)
        out["wq"][head * DIM :][:DIM] *= f**alpha
        out["wk_of_each_head"][head * DIM :][:DIM] *= f ** (1 - alpha)
        out["wqkv"][group * fused + number * DIM :][:DIM] *= f**alpha
        out["wq_b"][head * (DIM + ROPE) :][:DIM] *= f**alpha
        out["wq_b"][head * (DIM + ROPE) + DIM :][:ROPE] *= f
        out["wkv_b"][head * (DIM + VALUE) :][:DIM] *= f ** (1 - alpha)
    for group in range(KEY_HEADS):
        smallest = min(factors[group * GROUP : (group + 1) * GROUP])
        out["wk"][group * DIM :][:DIM] *= smallest ** (1 - alpha)
        out["wqkv"][group * fused + GROUP * DIM :][:DIM] *= smallest ** (1 - alpha)
    return out
