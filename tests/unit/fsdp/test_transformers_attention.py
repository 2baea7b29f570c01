"""QK-clip on Hugging Face's attention: the largest logits of eager attention, clipped heads, and refused models."""

from typing import Any

import pytest
import torch
from torch import Tensor

from titan_muon import transformers_qk_clip
from titan_muon.plugins.qk_clip import QKClip

transformers = pytest.importorskip("transformers")
HEADS, SIZE = 4, 8


def model(kind: str = "Llama", attention: str = "sdpa", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": SIZE}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "pad_token_id": 0}
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
    found: list[Tensor] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        key = key.repeat_interleave(HEADS // key.shape[1], 1)
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
    return clip.logits(clip.layers[number].name, 0, HEADS)


@pytest.mark.parametrize("key_heads", [2, HEADS])
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
    if key_heads == HEADS:
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
