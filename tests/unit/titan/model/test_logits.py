"""Inner attentions keep the largest logit of each head under the masks of packed documents, and compute the same."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

import models  # noqa: F401 (registers the families)
from tests.unit.titan.model.batches import attended
from tests.unit.titan.model.test_attention import LENGTH, _block_mask, _positions
from titan_muon.trainer.model import logits
from titan_muon.trainer.model.attention import DenseMask, DenseMaskAttention, dense
from titan_muon.trainer.model.logits import ObservedDenseAttention, ObservedFlexAttention, ObservedVarlenAttention

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


def rows_of_kernel(rows: torch.Tensor) -> torch.Tensor:
    """(batch, heads, queries) as a kernel has them: one row of all tokens on a version with folded batches."""
    return rows


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
    largest, lse = (rows_of_kernel(rows) for rows in (scores(q, k).amax(-1), scores(q, k).logsumexp(-1)))

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


def test_logits_are_kept_in_a_nonpersistent_buffer_if_there_is_one() -> None:
    inner = observer(ObservedDenseAttention.Config().build())
    assert [name for name, _ in inner.named_buffers()] == ["logits_max"]
    assert inner.state_dict() == {}
    q, k, v = qkv(4, 8)
    mask = DenseMask(dense(_block_mask(_positions(*STARTS))))
    out = attended(ObservedDenseAttention.Config().build(), q, k, v, attention_masks=mask, scale=SCALE)
    assert out.shape == q.shape
