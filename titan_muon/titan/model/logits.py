"""Inner attentions that keep the largest logit of each head, as they see it, beside what they compute.

`flex` tells the largest logit itself, and so does `dense` on GPUs and where queries and values have other sizes (latent
attention). `varlen`, and `dense` otherwise, tell the kernel's log-sum-exp, which lies above it by at most the logarithm
of the number of keys that a query sees. All see only what masks leave, and none computes logits a second time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import spmd_types as spmd
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torchtitan.distributed.compile import maybe_regional_inductor
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

from titan_muon.titan.model.attention import DenseMaskAttention

OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LogitObserver:
    """An inner attention that keeps the largest logit of each of its heads while it trains."""

    training: bool
    register_buffer: Callable[..., None]
    _buffers: dict[str, torch.Tensor | None]

    def keep_in(self, logits_max: torch.Tensor) -> None:
        """Where they are kept from now on, shape (heads,), float32. Its owner sets it to -inf."""
        # A buffer: before its first step a pipeline stage runs on memory that nothing has been written to, to learn of
        # shapes, and PyTorch puts back buffers and nothing else. Not persistent, since a checkpoint has no use for it.
        self.register_buffer("logits_max", logits_max, persistent=False)

    def keep(self, logits: torch.Tensor) -> None:
        """Take in the largest logit of each query, shape (batch, heads, queries), or a bound of it."""
        # Not in validation, whose batches are no part of a step.
        kept = self._buffers.get("logits_max")
        if kept is None or not self.training:
            return
        with torch.no_grad(), spmd.no_typecheck():
            # A tensor that is updated, and no Python state, so that a compiled layer can keep it too.
            kept.copy_(torch.maximum(kept, logits.detach().amax((0, 2)).float()))


class ObservedDenseAttention(LogitObserver, DenseMaskAttention):
    """DenseMaskAttention that keeps its logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(DenseMaskAttention.Config):
        """No options."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        allowed: torch.Tensor,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """The same attention by operators that also tell of its logits."""
        bias = torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)
        if q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
            # What scaled_dot_product_attention runs here, called by its own name for the sake of its second output.
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
            self.keep(lse)
            return out
        # Its other way, which makes the logits one by one as well, in as few passes over them.
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        logits = (q * scale @ k.transpose(-2, -1)).add_(bias)
        self.keep(logits.amax(-1))
        return logits.softmax(-1) @ v


class ObservedFlexAttention(LogitObserver, FlexAttention):
    """FlexAttention that keeps its logits, which its kernel tells."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """No options of its own."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Callable[..., torch.Tensor] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """FlexAttention's, which requests the log-sum-exp alone of its kernel."""
        assert isinstance(attention_masks, BlockMask), f"{type(attention_masks)} is no BlockMask"
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        with maybe_regional_inductor(FlexAttention.inductor_configs):
            out, aux = FlexAttention.compiled_flex_attn(
                q,
                k,
                v,
                score_mod=score_mod,
                block_mask=attention_masks,
                scale=scale,
                enable_gqa=enable_gqa,
                return_aux=AuxRequest(lse=out_transform is not None, max_scores=True),
                kernel_options=self.kernel_options,
            )
        self.keep(aux.max_scores)
        out_BLNH = out.transpose(1, 2)
        return out_BLNH if out_transform is None else out_transform(out_BLNH, aux.lse.transpose(1, 2))


class ObservedVarlenAttention(LogitObserver, VarlenAttention):
    """VarlenAttention that keeps its kernel's log-sum-exp."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """No options of its own."""

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: OutTransform | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """VarlenAttention's, with its log-sum-exp requested."""

        def kept(out: torch.Tensor, lse_BLN: torch.Tensor) -> torch.Tensor:
            self.keep(lse_BLN.transpose(1, 2))
            return out if out_transform is None else out_transform(out, lse_BLN)

        return super().forward(
            q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, scale=scale, out_transform=kept, **kwargs
        )


OBSERVED = {
    DenseMaskAttention.Config: ObservedDenseAttention.Config,
    FlexAttention.Config: ObservedFlexAttention.Config,
    VarlenAttention.Config: ObservedVarlenAttention.Config,
}
"""For each inner attention the one that keeps its logits."""
