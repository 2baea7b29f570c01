"""Choice of the inner attention; dense attention for the CPU, where FlexAttention has no backward."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder

from titan_muon.titan.recipe import RecipeError


@dataclass(frozen=True)
class DenseMask:
    """Bool mask of shape (batch, 1, queries, keys), true for allowed pairs."""

    allowed: Tensor

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> "DenseMask":
        """Dense form of `block_mask`, or of its shard of queries under context parallelism."""
        batch, queries = block_mask.kv_num_blocks.shape[0], block_mask.seq_lengths[0]
        keys, device = block_mask.seq_lengths[1], block_mask.kv_num_blocks.device
        return cls(create_mask(block_mask.mask_mod, batch, 1, queries, keys, device=device))


class DenseMaskAttention(FlexAttention):
    """Scaled dot-product attention with the DenseMask of `share_dense_mask`.

    A subclass, because TorchTitan gives document masks and context parallelism only to FlexAttention.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: DenseMask, **options: Any
    ) -> Tensor:
        """Queries (B, L, N, H), keys (B, K, M, H), values (B, K, M, V) to (B, L, N, V)."""
        assert isinstance(attention_masks, DenseMask), "share_dense_mask was not called on the model"
        # PyTorch 2.13 on the CPU: the backward in bfloat16 takes 10 times the time of float32.
        dtype = torch.float32 if q_BLNH.is_cpu and q_BLNH.itemsize == 2 else q_BLNH.dtype
        q, k, v = (t.transpose(1, 2).to(dtype) for t in (q_BLNH, k_BLNH, v_BLNH))
        return self.attend(q, k, v, attention_masks.allowed, **options).transpose(1, 2).to(q_BLNH.dtype)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None, enable_gqa: bool = False
    ) -> Tensor:
        """Queries (B, N, L, H), keys (B, M, K, H), values (B, M, K, V) to (B, N, L, V)."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=enable_gqa)


def share_dense_mask(model: nn.Module) -> None:
    """Compute the DenseMask once per forward of `model`, as an argument of the forward."""
    if any(isinstance(module, DenseMaskAttention) for module in model.modules()):
        model.register_forward_pre_hook(_densify, with_kwargs=True)


def _densify(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    mask = kwargs.get("attention_masks")
    assert isinstance(mask, BlockMask), "dense attention needs the keyword attention_masks, a BlockMask"
    return args, {**kwargs, "attention_masks": DenseMask.from_block_mask(mask)}


_ON_GPU = {"flex": FlexAttention.Config, "varlen": VarlenAttention.Config}


def use_attention(model_config: Decoder.Config, choice: str, on_cpu: bool) -> None:
    """Set the inner attention of every layer to `choice`, a value of `model.attention`.

    Raises RecipeError for an unknown choice, and for `flex` and `varlen` on the CPU.
    """
    if choice == "auto":
        choice = "dense" if on_cpu else "flex"
    if choice not in ("dense", *_ON_GPU):
        raise RecipeError(f"model.attention = {choice!r} is unknown; choose from: auto, dense, {', '.join(_ON_GPU)}")
    if on_cpu and choice in _ON_GPU:
        raise RecipeError(f"model.attention = {choice!r} has no backward on the CPU; use 'auto' or 'dense', or a GPU")
    config = DenseMaskAttention.Config if choice == "dense" else _ON_GPU[choice]
    for layer in model_config.layers:
        layer.attention.inner_attention = config()
