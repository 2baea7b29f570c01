"""Inner attentions with a record of each head's largest logit, from unmasked pairs.

`flex` records the largest logit, and so does `dense` on GPUs and with different sizes of queries and values (latent
attention). `varlen`, and `dense` otherwise, record the log-sum-exp: an upper bound, larger by at most the logarithm of
the number of visible keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torchtitan.distributed.compile import maybe_regional_inductor
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

from titan_muon.trainer.model.attention import DenseMaskAttention, HeadsFirstAttention

OutTransform = Callable[[Tensor, Tensor], Tensor]


class LogitObserver:
    """Inner attention with a record of each head's largest logit in training, in the buffer `logits_max` (heads,).

    The caller registers the buffer, and resets it to -inf.
    """

    training: bool
    register_buffer: Callable[..., None]
    _buffers: dict[str, Tensor | None]

    def keep(self, logits: Tensor) -> None:
        """Record the largest logit of each query, or an upper bound: (batch, heads, queries)."""
        # Not in validation, whose batches belong to no step.
        maxima = self._buffers.get("logits_max")
        if maxima is None or not self.training:
            return
        with torch.no_grad(), spmd.no_typecheck():
            # In place, so that a compiled layer can record.
            maxima.copy_(torch.maximum(maxima, logits.detach().amax((0, 2)).float()))


class ObservedDenseAttention(LogitObserver, DenseMaskAttention):
    """DenseMaskAttention with recorded logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(DenseMaskAttention.Config):
        pass

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None, enable_gqa: bool = False
    ) -> Tensor:
        bias = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)
        if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
            # The operator of scaled_dot_product_attention, because of its second output.
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
            self.keep(lse)
            return out
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        logits = (q * scale @ k.transpose(-2, -1)).add_(bias)
        self.keep(logits.amax(-1))
        return logits.softmax(-1) @ v


class ObservedFlexAttention(LogitObserver, HeadsFirstAttention):
    """FlexAttention with the kernel's largest logits recorded."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def attend_heads(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: BlockMask, needs_lse: bool, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(attention_masks, BlockMask), f"{type(attention_masks)} is no BlockMask"
        # FlexAttention.forward has no other request for auxiliary outputs than the log-sum-exp.
        asked = AuxRequest(lse=needs_lse, max_scores=True)
        options = {"score_mod": None, "scale": None, "enable_gqa": False, **options, "return_aux": asked}
        with maybe_regional_inductor(FlexAttention.inductor_configs):
            out, aux = FlexAttention.compiled_flex_attn(
                q, k, v, block_mask=attention_masks, kernel_options=self.kernel_options, **options
            )
        self.keep(aux.max_scores)
        return out, aux.lse


class ObservedVarlenAttention(LogitObserver, VarlenAttention):
    """VarlenAttention with the kernel's log-sum-exp recorded."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(self, *qkv: Tensor, out_transform: OutTransform | None = None, **options: Any) -> Tensor:
        def kept(out: Tensor, lse: Tensor) -> Tensor:
            self.keep(lse.transpose(1, 2))
            return out if out_transform is None else out_transform(out, lse)

        return super().forward(*qkv, out_transform=kept, **options)


OBSERVED = {
    DenseMaskAttention.Config: ObservedDenseAttention.Config,
    FlexAttention.Config: ObservedFlexAttention.Config,
    VarlenAttention.Config: ObservedVarlenAttention.Config,
}
