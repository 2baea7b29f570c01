"""QK-clip scales exactly the rows of the Kimi K2 report (arXiv:2507.20534, 2.1), by the step's observations."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_muon import transformers_qk_clip
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


# Hugging Face's attention: the largest logits of eager attention, clipped heads, and refused models

QUERY_HEADS = 4
"""Of models of Transformers."""


def model(kind: str = "Llama", attention: str = "sdpa", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **options})
    made = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return made.train()


def batch() -> dict[str, Tensor]:
    """Two sequences, the second padded."""
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    return {
        "input_ids": torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(1)),
        "attention_mask": mask,
    }


def eager_maxima(reference: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """By layer, the largest logit of each head, from all logits of real tokens at once."""
    transformers, found = pytest.importorskip("transformers"), list[Tensor]()

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        key = key.repeat_interleave(QUERY_HEADS // key.shape[1], 1)
        logits = query @ key.transpose(-2, -1) * options["scaling"]
        allowed = torch.ones(20, 20, dtype=torch.bool).tril() & inputs["attention_mask"].bool()[:, None, None, :]
        if window := options.get("sliding_window"):
            allowed &= torch.ones(20, 20, dtype=torch.bool).triu(1 - window)
        found.append(logits.masked_fill(~allowed, -torch.inf).amax((0, 2, 3)))
        return transformers.models.llama.modeling_llama.eager_attention_forward(
            module, query, key[:, ::2], value, mask, **{**options, "scaling": options["scaling"]}
        )

    transformers.AttentionInterface.register("recorded", record)
    transformers.AttentionMaskInterface.register("recorded", transformers.masking_utils.eager_mask)
    reference.set_attn_implementation("recorded")
    reference(**inputs)
    return found


@pytest.mark.parametrize(("kind", "options"), [("Llama", {}), ("Qwen2", {}), ("Mistral", {"sliding_window": 5})])
@pytest.mark.parametrize("padded", [False, True])
def test_the_largest_logits_are_those_of_eager_attention(kind: str, options: dict[str, Any], padded: bool) -> None:
    inputs = batch()
    if not padded:
        inputs["attention_mask"].fill_(1)
    expected = eager_maxima(model(kind, **options), inputs)
    made = model(kind, **options)
    plain = made(**inputs).logits
    clip = transformers_qk_clip(made)
    assert torch.equal(made(**inputs).logits, plain)
    for number, largest in enumerate(expected):
        torch.testing.assert_close(logits_of(clip, number), largest, rtol=1e-4, atol=1e-4)


def logits_of(clip: QKClip, number: int) -> Tensor:
    return clip.logits(clip.layers[number].name, 0, QUERY_HEADS)


@pytest.mark.parametrize("key_heads", [2, QUERY_HEADS])
def test_clipped_heads_have_logits_at_the_threshold(key_heads: int) -> None:
    made = model(num_key_value_heads=key_heads)
    clip = transformers_qk_clip(made, threshold=1.0)
    made(**batch())
    before = logits_of(clip, 0).clone()
    threshold = float(before.median())
    clip = transformers_qk_clip(made, threshold=threshold)
    made(**batch())
    clip.apply()
    made(**batch())
    after = logits_of(clip, 0)
    if key_heads == QUERY_HEADS:
        torch.testing.assert_close(after, before.clamp(max=threshold))
    assert (before > threshold).any()
    assert (after <= threshold * 1.0001).all()
    after.fill_(-torch.inf)
    made.eval()(**batch())
    assert after.isinf().all(), "an evaluation belongs to no step"


def test_attention_that_cannot_be_clipped_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: q_norm normalizes after"):
        transformers_qk_clip(model("Qwen3"))
    logging = model("Qwen3")
    reported = transformers_qk_clip(logging, clips=False)
    logging(**batch())
    reported.apply()
    assert reported.report().max_logit.keys() == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    with pytest.raises(ValueError, match="attn_implementation = 'eager' returns no logits"):
        transformers_qk_clip(model(attention="eager"))
    with pytest.raises(ValueError, match="no module of the model has head_dim"):
        transformers_qk_clip(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="or none is a model of Transformers"):
        transformers_qk_clip(model().model.layers[0])
    changed = model()
    changed.model.layers[1].self_attn.k_proj.register_parameter("lora", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_proj has weight, lora"):
        transformers_qk_clip(changed)
