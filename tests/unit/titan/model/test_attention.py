"""The CPU's attention separates packed documents, with the right values and gradients, and shares one mask."""

from unittest import mock

import pytest
import torch

import models  # noqa: F401 (registers the families)
from tests.unit.titan.model.batches import attended, initialized
from titan_muon.trainer.model import attention
from titan_muon.trainer.model.attention import DenseMask, DenseMaskAttention, dense, share_dense_mask
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
