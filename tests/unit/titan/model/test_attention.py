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

LENGTH = 48


def _positions(*starts: tuple[int, ...]) -> torch.Tensor:
    rows = []
    for row in starts:
        ends = [*row[1:], LENGTH]
        rows.append(torch.cat([torch.arange(end - start) for start, end in zip(row, ends, strict=True)]))
    return torch.stack(rows)


def _block_mask(positions: torch.Tensor):
    return _model().get_attention_masks(positions)


def _model() -> torch.nn.Module:
    return initialized(model_spec("qwen3", "tiny", vocab_size=64, on_cpu=True).model)


def _attend_by_hand(q, k, v, positions, scale):
    """Softmax attention of one document at a time, in float64; q (B, L, N, H), k and v with fewer heads."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for row in range(q.shape[0]):
        starts = (positions[row] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], q.shape[1]], strict=True):
            scores = torch.einsum("inh,jnh->nij", q[row, start:end], k[row, start:end]) * scale
            future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            out[row, start:end] = torch.einsum("nij,jnh->inh", weights, v[row, start:end])
    return out


@pytest.mark.parametrize(("kv_heads", "value_dim", "scale"), [(4, 8, 8**-0.5), (2, 8, 0.3), (4, 6, 1.0)])
def test_values_and_gradients_equal_separate_documents(kv_heads, value_dim, scale) -> None:
    starts = (0, 7, 40), (0, 1, 47)
    positions = _positions(*starts)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, dim: int) -> torch.Tensor:
        shape = (len(starts), LENGTH, heads, dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    q, k, v = random(4, 8), random(kv_heads, 8), random(kv_heads, value_dim)
    mask = DenseMask(dense(_block_mask(positions)))
    inner = DenseMaskAttention.Config().build()
    out = attended(inner, q, k, v, attention_masks=mask, scale=scale, enable_gqa=kv_heads != 4)
    expected = _attend_by_hand(q, k, v, positions, scale)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), (q, k, v)))


def test_every_forward_builds_a_single_mask_per_batch() -> None:
    model = _model()
    share_dense_mask(model)
    tokens = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    batches = [_positions((0, 7, 40), (0, 20)), _positions((0,), (0, 1))]

    def forward(positions: torch.Tensor) -> torch.Tensor:
        batch, places = tokens, positions
        return model(batch, positions=places, attention_masks=model.get_attention_masks(places))

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


# The largest logit of each head, for QK-clip


STARTS = ((0, 7, 40), (0, 1, 47))
SCALE = 0.3
LONGEST = 46
"""Tokens of the longest document: visible keys of a query."""


def qkv(kv_heads: int, value_dim: int) -> list[torch.Tensor]:
    """Queries, keys and values (batch, tokens, heads, dim), large in a single head."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (kv_heads, 8), (kv_heads, value_dim))
    q, k, v = (torch.randn(len(STARTS), LENGTH, *shape, generator=generator, requires_grad=True) for shape in shapes)
    with torch.no_grad():
        q[:, :, 1] *= 10
    return [q, k, v]


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Unmasked logits, -inf elsewhere: (batch, heads, queries, keys)."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    logit = torch.einsum("binh,bjnh->bnij", q, k) * SCALE
    document = torch.stack([(row == 0).cumsum(0) for row in _positions(*STARTS)])
    index = torch.arange(LENGTH)
    allowed = (index[:, None] >= index) & (document[:, :, None] == document[:, None, :])
    return logit.detach().masked_fill(~allowed[:, None], -math.inf)


def observer(inner: Any, heads: int = 4) -> Any:
    inner.register_buffer("logits_max", torch.full((heads,), -math.inf), persistent=False)
    return inner.train()


@pytest.mark.parametrize(("kv_heads", "value_dim", "exact"), [(2, 8, False), (2, 6, True)])
def test_dense_attention_records_the_maximum_logits_and_keeps_the_output(
    kv_heads: int, value_dim: int, exact: bool
) -> None:
    q, k, v = qkv(kv_heads, value_dim)
    mask = DenseMask(dense(_block_mask(_positions(*STARTS))))
    inner = observer(ObservedDenseAttention.Config().build())
    out = attended(inner, q, k, v, attention_masks=mask, scale=SCALE, enable_gqa=kv_heads != 4)
    plain = DenseMaskAttention.Config().build()
    expected = attended(plain, q, k, v, attention_masks=mask, scale=SCALE, enable_gqa=kv_heads != 4)
    largest = scores(q, k).amax((0, 2, 3))
    if exact:
        torch.testing.assert_close(inner.logits_max, largest)
        torch.testing.assert_close(out, expected)
    else:
        assert torch.equal(out, expected), "the same kernel"
        above = inner.logits_max - largest
        assert above.min() >= -1e-4
        assert above.max() <= math.log(LONGEST)
        torch.testing.assert_close(inner.logits_max, scores(q, k).logsumexp(-1).amax((0, 2)))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), (q, k, v)))


def test_flex_attention_records_the_kernels_maximum_logits() -> None:
    """The kernel runs on GPUs only; the test replaces its output."""
    q, k, v = qkv(2, 8)
    inner = observer(ObservedFlexAttention.Config().build())
    asked = []
    largest, lse = scores(q, k).amax(-1), scores(q, k).logsumexp(-1)

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_aux: AuxRequest, **options: Any) -> Any:
        asked.append((return_aux, options["scale"], options["enable_gqa"]))
        assert q.shape[:3] == (len(STARTS), 4, LENGTH)
        return torch.zeros_like(q), AuxOutput(lse=lse if return_aux.lse else None, max_scores=largest)

    with mock.patch.object(logits.FlexAttention, "compiled_flex_attn", staticmethod(kernel)):
        arguments = {"attention_masks": _block_mask(_positions(*STARTS)), "scale": SCALE, "enable_gqa": True}
        assert attended(inner, q, k, v, **arguments).shape == q.shape
        shapes = []
        keep = lambda out, lse: shapes.append((out.shape, lse.shape)) or out  # noqa: E731
        attended(inner, q, k, v, **arguments, out_transform=keep)
    torch.testing.assert_close(inner.logits_max, scores(q, k).amax((0, 2, 3)))
    assert asked == [(AuxRequest(lse, True), SCALE, True) for lse in (False, True)]
    assert shapes == [(q.shape, q.shape[:-1])]


def test_varlen_attention_records_the_kernels_log_sum_exp() -> None:
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    q, k, v = qkv(2, 8)
    positions = _positions(*STARTS)
    inner = observer(ObservedVarlenAttention.Config().build())
    lse = scores(q, k).logsumexp(-1)

    def kernel(q: torch.Tensor, *rest: Any, return_aux: Any, scale: float, enable_gqa: bool, **options: Any) -> Any:
        assert (return_aux.lse, scale, enable_gqa) == (True, SCALE, True)
        return torch.zeros_like(q), lse.transpose(0, 1).flatten(1)

    with mock.patch("torchtitan.models.common.attention.varlen_attn", kernel):
        masks = create_varlen_metadata_for_document(positions)
        out = attended(inner, q, k, v, attention_masks=masks, scale=SCALE, enable_gqa=True)
    assert out.shape == q.shape
    torch.testing.assert_close(inner.logits_max, lse.amax((0, 2)))


def test_several_passes_record_the_maximum_and_validation_records_none() -> None:
    mask = DenseMask(dense(_block_mask(_positions(*STARTS))))
    inner = observer(ObservedDenseAttention.Config().build())
    q, k, v = qkv(4, 6)
    with torch.no_grad():
        for factor in (0.5, 2.0, 1.0):
            attended(inner, factor * q, k, v, attention_masks=mask, scale=SCALE)
        torch.testing.assert_close(inner.logits_max, 2 * scores(q, k).amax((0, 2, 3)))
        kept = inner.logits_max.clone()
        attended(inner.eval(), 9 * q, k, v, attention_masks=mask, scale=SCALE)
    assert torch.equal(inner.logits_max, kept)


def test_attention_without_the_buffer_records_nothing() -> None:
    q, k, v = qkv(4, 8)
    mask = DenseMask(dense(_block_mask(_positions(*STARTS))))
    out = attended(ObservedDenseAttention.Config().build(), q, k, v, attention_masks=mask, scale=SCALE)
    assert out.shape == q.shape
