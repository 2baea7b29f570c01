"""Qwen3, dense and mixture of experts (arXiv:2505.09388). Sizes of the released configs."""

from dataclasses import dataclass

from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import FlexAttention, GQAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from models import common

STD = 0.02
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a flavor. `hidden`: width of an expert, or of the feed-forward if `experts` is 0."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    experts: int = 0
    top_k: int = 0
    tied: bool = False
    vocab_size: int = 151_936
    max_seq_len: int = 40_960
    theta: float = 1e6


FLAVORS = {
    "tiny": Size(layers=4, dim=128, heads=8, kv_heads=4, head_dim=32, hidden=512, vocab_size=512),
    "moe_tiny": Size(
        layers=4, dim=128, heads=8, kv_heads=4, head_dim=32, hidden=128, experts=16, top_k=2, vocab_size=512
    ),
    "0.6B": Size(layers=28, dim=1024, heads=16, kv_heads=8, head_dim=128, hidden=3072, tied=True),
    "1.7B": Size(layers=28, dim=2048, heads=16, kv_heads=8, head_dim=128, hidden=6144, tied=True),
    "8B": Size(layers=36, dim=4096, heads=32, kv_heads=8, head_dim=128, hidden=12_288),
    "30B-A3B": Size(layers=48, dim=2048, heads=32, kv_heads=4, head_dim=128, hidden=768, experts=128, top_k=8),
}


def build(flavor: str, vocab_size: int | None) -> ModelSpec:
    """ModelSpec of a flavor; `vocab_size` replaces the flavor's."""
    size = FLAVORS[flavor]
    vocab = size.vocab_size if vocab_size is None else vocab_size
    model = Qwen3Model.Config(
        dim=size.dim,
        vocab_size=vocab,
        enable_weight_tying=size.tied,
        tok_embeddings=common.embedding(vocab, size.dim, STD, tied=size.tied),
        layers=[_layer(size) for _ in range(size.layers)],
        norm=common.norm(size.dim, EPS),
        lm_head=common.head(vocab, size.dim, STD),
    )
    return ModelSpec(
        name="qwen3",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook if size.experts else None,
        state_dict_adapter=Qwen3StateDictAdapter,
    )


def _layer(size: Size) -> Qwen3TransformerBlock.Config:
    feed_forward = None
    if not size.experts:
        feed_forward = make_ffn_config(
            dim=size.dim,
            hidden_dim=size.hidden,
            w1_param_init=common.linear_init(STD),
            w2w3_param_init=common.linear_init(STD),
        )
    return Qwen3TransformerBlock.Config(
        attention_norm=common.norm(size.dim, EPS),
        attention=_attention(size),
        ffn_norm=common.norm(size.dim, EPS),
        feed_forward=feed_forward,
        moe=_experts(size) if size.experts else None,
    )


def _attention(size: Size) -> GQAttention.Config:
    return make_gqa_config(
        dim=size.dim,
        n_heads=size.heads,
        n_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        wqkv_param_init=common.linear_init(STD),
        wo_param_init=common.linear_init(common.residual_std(STD, size.layers)),
        inner_attention=FlexAttention.Config(),
        rope=CosSinRoPE.Config(dim=size.head_dim, max_seq_len=size.max_seq_len, theta=size.theta),
        qk_norm=common.norm(size.head_dim, EPS),
        fuse_qkv=False,
    )


def _experts(size: Size) -> MoE.Config:
    return make_moe_config(
        num_experts=size.experts,
        router=make_router_config(
            dim=size.dim,
            num_experts=size.experts,
            gate_param_init=common.linear_init(STD),
            top_k=size.top_k,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=make_routed_experts_config(
            dim=size.dim,
            hidden_dim=size.hidden,
            num_experts=size.experts,
            top_k=size.top_k,
            param_init=common.experts_init(STD, common.residual_std(STD, size.layers)),
            comm_backend="standard",
        ),
    )
