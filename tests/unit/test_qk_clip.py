"""QK-clip scales exactly the rows of the Kimi K2 report (arXiv:2507.20534, 2.1), by the step's observations."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from titan_muon.plugins.qk_clip import (
    AttentionLayer,
    HeadRows,
    HeadWeight,
    QKClip,
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


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_only_heads_above_the_threshold_are_scaled(alpha: float) -> None:
    weights = whole_weights()
    expected = clipped(weights, LOGITS, 100.0, alpha)
    clip = QKClip([layer(weights)], alpha=alpha)
    clip.observe("layers.0", torch.tensor(LOGITS))
    clip.apply()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=0)


def test_each_head_may_have_a_threshold_of_its_own() -> None:
    weights, thresholds = whole_weights(), (40.0, math.inf, 50.0, 200.0, math.inf, 100.0)
    # A head without a threshold is a head whose logit is small.
    scaled = [logit / threshold for logit, threshold in zip(LOGITS, thresholds, strict=True)]
    expected = clipped(weights, scaled, 1.0, 0.5)
    clip = QKClip([replace(layer(weights), thresholds=thresholds)], threshold=1e-3)
    clip.observe("layers.0", torch.tensor(LOGITS))
    clip.apply()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=0)
    assert clip.report().heads_above_threshold == 3


def test_the_maximum_of_several_passes_counts_and_resets_every_step() -> None:
    """Gradient accumulation, and forwards recomputed by activation checkpointing."""
    weights = whole_weights()
    clip, expected = QKClip([layer(weights)]), weights
    for passes, largest in (([50.0, 200.0, 120.0], 200.0), ([60.0], 60.0), ([130.0], 130.0)):
        for logit in passes:
            clip.observe("layers.0", torch.full((HEADS,), logit))
        expected = clipped(expected, [largest] * HEADS, 100.0, 0.5)
        clip.apply()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=0)


@pytest.mark.parametrize("logit", [math.inf, math.nan, 100.0])
def test_a_logit_that_is_not_above_the_threshold_or_not_finite_changes_no_bit(logit: float) -> None:
    weights = whole_weights()
    clip = QKClip([layer({name: weight.clone() for name, weight in weights.items()})])
    clip.observe("layers.0", torch.full((HEADS,), logit))
    clip.apply()
    for weight in clip.layers[0].weights:
        assert torch.equal(weight.tensor, weights[weight.fqn])


def test_bfloat16_weights_and_biases_are_scaled() -> None:
    weight, bias = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4))
    rows = (HeadWeight("wq.weight", weight, query_rows(2)), HeadWeight("wq.bias", bias, query_rows(2)))
    clip = QKClip([AttentionLayer("attention", 2, rows)], threshold=1.0)
    clip.observe("attention", torch.tensor([4.0, 1.0]))
    clip.apply()
    assert weight.dtype == torch.bfloat16
    assert weight[:, 0].tolist() == bias.tolist() == [0.5, 0.5, 1.0, 1.0]


def test_logging_reports_logits_and_changes_no_weight() -> None:
    weights = whole_weights()
    before = {name: weight.clone() for name, weight in weights.items()}
    clip = QKClip([layer(weights), AttentionLayer("layers.1", 2), AttentionLayer("layers.2", 2)], clips=False)
    for step in (1.0, 2.0, 1.0):
        clip.observe("layers.0", step * torch.tensor(LOGITS))
        clip.observe("layers.1", torch.tensor([step, -step]))
        clip.apply()
    report = clip.report()
    assert report.max_logit == {"layers.0": 800.0, "layers.1": 2.0}, "the largest of all steps; layers.2 was not seen"
    assert report.heads_above_threshold == 3 + 5 + 3
    assert clip.report().max_logit == {}, "a report is of the steps since the last"
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())


def test_an_unobserved_layer_is_an_error_in_the_first_step() -> None:
    clip = QKClip([layer(whole_weights()), layer(whole_weights(), "layers.1")])
    clip.observe("layers.1", torch.zeros(HEADS))
    with pytest.raises(ValueError, match=r"^layers\.0: nothing has observed these layers; call observe"):
        clip.apply()
