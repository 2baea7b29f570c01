"""The CPU's attention separates packed documents and shares one mask; inner attentions keep the largest logits."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

import models  # noqa: F401 (registers the families)
from tests.unit.titan.model.batches import attended, initialized
from titan_muon.trainer.model import attention, logits
from titan_muon.trainer.model.attention import DenseMask, DenseMaskAttention, dense, share_dense_mask
from titan_muon.trainer.model.logits import ObservedDenseAttention, ObservedFlexAttention, ObservedVarlenAttention
from titan_muon.trainer.model.spec import model_spec

LENGTH, SCALE = 48, 0.3
STARTS = ((0, 7, 40), (0, 1, 47))
LONGEST = 46
"""Tokens of the longest document: visible keys of a query."""


def positions(*starts: tuple[int, ...]) -> torch.Tensor:
    rows = [(row, (*row[1:], LENGTH)) for row in starts or STARTS]
    return torch.stack([torch.cat([torch.arange(b - a) for a, b in zip(*row, strict=True)]) for row in rows])


def decoder() -> Any:
    return initialized(model_spec("qwen3", "tiny", vocab_size=64, on_cpu=True).model)


def block_mask() -> Any:
    return decoder().get_attention_masks(positions())


def dense_options(kv_heads: int = 4) -> dict[str, Any]:
    return {"attention_masks": DenseMask(dense(block_mask())), "scale": SCALE, "enable_gqa": kv_heads != 4}


def qkv(kv_heads: int, value_dim: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values (batch, tokens, heads, dim), large in a single head."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (kv_heads, 8), (kv_heads, value_dim))
    tensors = [
        torch.randn(len(STARTS), LENGTH, *s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes
    ]
    with torch.no_grad():
        tensors[0][:, :, 1] *= 10
    return tensors


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Unmasked logits, -inf elsewhere: (batch, heads, queries, keys)."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    document = torch.stack([(row == 0).cumsum(0) for row in positions()])
    index = torch.arange(LENGTH)
    allowed = (index[:, None] >= index) & (document[:, :, None] == document[:, None, :])
    return (torch.einsum("binh,bjnh->bnij", q, k) * SCALE).masked_fill(~allowed[:, None], -math.inf)


def observer(config: Any) -> Any:
    inner = config.build()
    inner.register_buffer("logits_max", torch.full((4,), -math.inf), persistent=False)
    return inner.train()


@pytest.mark.parametrize("inner", [DenseMaskAttention, ObservedDenseAttention])
@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 8), (2, 8), (2, 6)])
def test_values_and_gradients_equal_separate_documents(inner: Any, kv_heads: int, value_dim: int) -> None:
    q, k, v = qkv(kv_heads, value_dim, torch.float64)
    attend = observer(inner.Config())
    out = attended(attend, q, k, v, **dense_options(kv_heads))
    expected = torch.einsum("bnij,bjnh->binh", scores(q, k).softmax(-1), v.repeat_interleave(4 // kv_heads, dim=2))
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), (q, k, v)))
    # The kernel for equal sizes gives the log-sum-exp, and no largest logit.
    largest, bound = scores(q, k).amax((0, 2, 3)), scores(q, k).logsumexp(-1).amax((0, 2))
    assert (bound - largest).max() <= math.log(LONGEST)
    if inner is ObservedDenseAttention:
        torch.testing.assert_close(attend.logits_max, (bound if value_dim == 8 else largest).float())


def test_every_forward_builds_a_single_mask_per_batch() -> None:
    model = decoder()
    share_dense_mask(model)
    tokens = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    batches = [positions((0, 7, 40), (0, 20)), positions((0,), (0, 1))]

    def forward(places: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(tokens, positions=places, attention_masks=model.get_attention_masks(places))
        return out

    with mock.patch.object(attention, "create_mask", wraps=attention.create_mask) as made:
        first, second = forward(batches[0]), forward(batches[1])
        assert made.call_count == 2, "one mask for each forward, whatever the number of layers"
        assert not torch.equal(first, second)
        assert torch.equal(forward(batches[0]), first)


@pytest.mark.parametrize("name", ["deepseek_v3", "llama3", "qwen3"])
def test_every_layer_gets_the_chosen_attention(name: str) -> None:
    choices = {"auto": ("DenseMaskAttention", "FlexAttention"), "dense": ("DenseMaskAttention",) * 2}
    for choice, expected in choices.items():
        for on_cpu, kind in zip((True, False), expected, strict=True):
            model = model_spec(name, "tiny", attention=choice, on_cpu=on_cpu).model
            kinds = {type(layer.attention.inner_attention).__qualname__ for layer in model.layers}
            assert kinds == {f"{kind}.Config"}


def test_flex_attention_records_the_kernels_maximum_logits() -> None:
    """The kernel runs on GPUs only; the test replaces its output."""
    q, k, v = qkv(2, 8)
    inner = observer(ObservedFlexAttention.Config())
    asked, shapes = [], []
    largest, lse = scores(q, k).amax(-1), scores(q, k).logsumexp(-1)

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_aux: AuxRequest, **options: Any) -> Any:
        asked.append((return_aux, options["scale"], options["enable_gqa"], q.shape[:3]))
        return torch.zeros_like(q), AuxOutput(lse=lse if return_aux.lse else None, max_scores=largest)

    def keep(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        shapes.append((out.shape, lse.shape))
        return out

    options = {"attention_masks": block_mask(), "scale": SCALE, "enable_gqa": True}
    with mock.patch.object(logits.FlexAttention, "compiled_flex_attn", staticmethod(kernel)):
        assert attended(inner, q, k, v, **options).shape == q.shape
        attended(inner, q, k, v, **options, out_transform=keep)
    torch.testing.assert_close(inner.logits_max, largest.amax((0, 2)))
    assert asked == [(AuxRequest(lse, True), SCALE, True, (len(STARTS), 4, LENGTH)) for lse in (False, True)]
    assert shapes == [(q.shape, q.shape[:-1])]


def test_varlen_attention_records_the_kernels_log_sum_exp() -> None:
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    q, k, v = qkv(2, 8)
    inner = observer(ObservedVarlenAttention.Config())
    lse = scores(q, k).logsumexp(-1)

    def kernel(q: torch.Tensor, *rest: Any, return_aux: Any, scale: float, enable_gqa: bool, **options: Any) -> Any:
        assert (return_aux.lse, scale, enable_gqa) == (True, SCALE, True)
        return torch.zeros_like(q), lse.transpose(0, 1).flatten(1)

    masks = create_varlen_metadata_for_document(positions())
    with mock.patch("torchtitan.models.common.attention.varlen_attn", kernel):
        out = attended(inner, q, k, v, attention_masks=masks, scale=SCALE, enable_gqa=True)
    assert out.shape == q.shape
    torch.testing.assert_close(inner.logits_max, lse.amax((0, 2)))


def test_several_passes_record_the_maximum_and_validation_records_none() -> None:
    inner, options = observer(ObservedDenseAttention.Config()), dense_options()
    q, k, v = qkv(4, 6)
    with torch.no_grad():
        for factor in (0.5, 2.0, 1.0):
            attended(inner, factor * q, k, v, **options)
        torch.testing.assert_close(inner.logits_max, 2 * scores(q, k).amax((0, 2, 3)))
        kept = inner.logits_max.clone()
        attended(inner.eval(), 9 * q, k, v, **options)
        assert torch.equal(inner.logits_max, kept)
        # A model that is only read has no buffer.
        attended(ObservedDenseAttention.Config().build(), q, k, v, **options)
