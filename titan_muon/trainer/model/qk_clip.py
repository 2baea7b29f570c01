"""QK-clip on TorchTitan's decoders: weight rows of each head, and ranks of the heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

import torch
from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention

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
from titan_muon.trainer.model.logits import OBSERVED, LogitObserver
from titan_muon.trainer.recipe import RecipeError, sections

Projection = tuple[str, nn.Module, tuple[HeadRows, ...]]


def observe_logits(model: Decoder.Config, section: sections.QKClip) -> None:
    """Record logits in every layer, unless QK-clip is off.

    Raises RecipeError for attention with unknown projections, and with `clip` for normalized queries and keys.
    """
    if section.mode == "off":
        return
    for number, layer in enumerate(model.layers):
        attention, problem = layer.attention, f'= "{section.mode}" is not possible: layers.{number}'
        inner = type(getattr(attention, "inner_attention", None))
        if not isinstance(attention, GQAttention.Config | LatentAttention.Config) or inner not in OBSERVED:
            raise RecipeError(
                f'{problem} has attention of another kind than Llama, Qwen and DeepSeek; set it to "off"',
                key="qk_clip.mode",
            )
        if section.mode == "clip" and isinstance(attention, GQAttention.Config) and attention.qk_norm is not None:
            raise RecipeError(
                f"{problem} normalizes queries and keys after their projections (qk-norm), so that scaling those "
                'changes no logit, and the norms bound them already; set it to "log" or "off"',
                key="qk_clip.mode",
            )
        config = attention.inner_attention
        options = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
        attention.inner_attention = OBSERVED[inner](**options)


def build_qk_clip(
    section: sections.QKClip,
    model: Decoder.Config,
    parts: Sequence[nn.Module],
    parallel_dims: ParallelDims,
    device: torch.device,
) -> QKClip | None:
    """QK-clip for this rank's model parts, with buffers for logits; None if off. `parts`: on `device`."""
    if section.mode == "off":
        return None
    blocks = {f"layers.{key}": block for part in parts for key, block in part.get_submodule("layers").named_children()}
    layers = [
        AttentionLayer(name := f"layers.{number}", layer.attention.n_heads, tuple(_weights(blocks, name)))
        for number, layer in enumerate(model.layers)
    ]
    clips = section.mode == "clip"
    clip = QKClip(layers, threshold=section.threshold, alpha=section.alpha, clips=clips, device=device)
    ranks = parallel_dims.tp
    rank = parallel_dims.get_mesh("tp").get_local_rank() if parallel_dims.tp_enabled else 0
    for layer in layers:
        if layer.name in blocks:
            inner, heads = blocks[layer.name].get_submodule("attention.inner_attention"), layer.heads // ranks
            assert isinstance(inner, LogitObserver), f"{layer.name}: observe_logits was not called on the configuration"
            # A pipeline stage first runs on uninitialized memory, and PyTorch restores only buffers.
            inner.register_buffer("logits_max", clip.logits(layer.name, rank * heads, heads), persistent=False)
    return clip


def _weights(blocks: dict[str, nn.Module], name: str) -> Iterator[HeadWeight]:
    if name not in blocks:
        return
    for path, linear, pattern in _projections(blocks[name].get_submodule("attention")):
        for kind, tensor in linear.named_parameters():
            yield HeadWeight(canonical_fqn(f"{name}.attention.{path}.{kind}"), tensor, pattern)


def _projections(attention: nn.Module) -> Iterable[Projection]:
    if isinstance(attention, LatentAttention):
        nope, query = attention.qk_nope_head_dim, "wq" if attention.q_lora_rank == 0 else "wq_b"
        queries = latent_query_rows(nope, attention.qk_rope_head_dim)
        keys = latent_key_rows(nope, attention.v_head_dim)
        return (query, getattr(attention, query), queries), ("wkv_b", attention.wkv_b, keys)
    assert isinstance(attention, GQAttention), "observe_logits has refused others"
    linear, dim = attention.qkv_linear, attention.head_dim
    if isinstance(linear, FusedQKVLinear):
        return (("qkv_linear.wqkv", linear.wqkv, fused_rows(dim, linear.heads_per_kv)),)
    assert isinstance(linear, QKVLinear), "GQAttention has one of the two"
    return ("qkv_linear.wq", linear.wq, query_rows(dim)), ("qkv_linear.wk", linear.wk, key_rows(dim))


def qk_clip_lines(section: sections.QKClip, sent: int, world_size: int) -> Iterable[str]:
    """Effect and traffic of QK-clip in a step (`sent` bytes); empty if QK-clip is off."""
    if section.mode == "off":
        return
    does = "the largest logits are logged"
    if section.mode == "clip":
        does = f"heads with logits above {section.threshold:g} are clipped, alpha {section.alpha:g}"
    yield f"QK-clip: {does}; " + (f"one all-reduce of {sent:,} bytes a step" if world_size > 1 else "nothing is sent")


def reduced_bytes(model: Decoder.Config) -> int:
    """Bytes of QK-clip's collective per step: float32 per head."""
    heads = sum(layer.attention.n_heads for layer in model.layers if layer.attention is not None)
    return heads * torch.float32.itemsize
