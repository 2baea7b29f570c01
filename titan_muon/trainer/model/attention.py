"""Choice of the inner attention; dense attention for the CPU, where FlexAttention has no backward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder

from titan_muon.trainer.recipe import RecipeError


@dataclass(frozen=True)
class DenseMask:
    """Mask of a forward. `allowed`: bool (batch, 1, queries, keys), true for allowed pairs."""

    allowed: Tensor


def dense(mask: BlockMask) -> Tensor:
    """The pairs that a mask allows, or its shard of queries under context parallelism."""
    rows, (queries, keys), device = mask.kv_num_blocks.shape[0], mask.seq_lengths, mask.kv_num_blocks.device
    return create_mask(mask.mask_mod, rows, 1, queries, keys, device=device)


class HeadsFirstAttention(FlexAttention):
    """FlexAttention whose subclass attends to (batch, heads, tokens, width) in `attend_heads`, which returns the output
    and the log-sum-exp (batch, heads, tokens), or None without `needs_lse`."""

    attend_heads: Callable[..., tuple[Tensor, Tensor | None]]

    # TorchTitan shards by the names of the first three arguments.
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out, lse = self.attend_heads(q, k, v, needs_lse=out_transform is not None, **options)
        if out_transform is None:
            return out.transpose(1, 2)
        assert lse is not None, "attend_heads returns what `needs_lse` asks for"
        return out_transform(out.transpose(1, 2), lse.transpose(1, 2))


class DenseMaskAttention(HeadsFirstAttention):
    """Scaled dot-product attention with the DenseMask of `share_dense_mask`.

    A subclass of FlexAttention, because TorchTitan gives document masks and context parallelism only to it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def attend_heads(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: DenseMask, needs_lse: bool = False, **options: Any
    ) -> tuple[Tensor, None]:
        """Queries (B, N, L, H), keys (B, M, K, H), values (B, M, K, V) to (B, N, L, V)."""
        assert isinstance(attention_masks, DenseMask), "share_dense_mask was not called on the model"
        assert not needs_lse, "dense attention has no out_transform"
        # PyTorch 2.13 on the CPU: the backward in bfloat16 takes 10 times the time of float32.
        dtype = torch.float32 if q.is_cpu and q.itemsize == 2 else q.dtype
        qs, ks, vs = (t.to(dtype) for t in (q, k, v))
        return self.attend(qs, ks, vs, attention_masks.allowed, **options).to(q.dtype), None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None, enable_gqa: bool = False
    ) -> Tensor:
        """As `attend_heads`, with `allowed` of a mask."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=enable_gqa)


def share_dense_mask(model: nn.Module) -> None:
    """Compute the DenseMask once per forward of `model`, as an argument of the forward."""
    if any(isinstance(module, DenseMaskAttention) for module in model.modules()):
        model.register_forward_pre_hook(_densify, with_kwargs=True)


def _densify(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    mask = kwargs.get("attention_masks")
    assert isinstance(mask, BlockMask), "dense attention needs the keyword attention_masks, a BlockMask"
    return args, {**kwargs, "attention_masks": DenseMask(dense(mask))}


_ON_GPU = {"flex": FlexAttention.Config, "varlen": VarlenAttention.Config}


def use_attention(model_config: Decoder.Config, choice: str, on_cpu: bool) -> None:
    """Set the inner attention of every layer to `choice`, a value of `model.attention`.

    Raises RecipeError for `flex` and `varlen` on the CPU, and `dense` with windows and sinks.
    """
    if choice == "auto":
        choice = "dense" if on_cpu else "flex"
    if on_cpu and choice in _ON_GPU:
        raise RecipeError(
            f"= {choice!r} has no backward on the CPU; use 'auto' or 'dense', or a GPU", key="model.attention"
        )
    attentions = [layer.attention for layer in model_config.layers]
    if choice == "dense" and any(a is None or hasattr(a, "sliding_window_size") for a in attentions):
        raise RecipeError(
            "= 'dense', the choice for CPUs, has no sliding windows, no attention sinks and no linear "
            "attention, which this model needs; use 'flex' and a GPU",
            key="model.attention",
        )
    config = DenseMaskAttention.Config if choice == "dense" else _ON_GPU[choice]
    # None: a layer of linear attention.
    for attention in filter(None, attentions):
        attention.inner_attention = config()
