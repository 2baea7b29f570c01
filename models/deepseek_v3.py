"""DeepSeek-V3 (arXiv:2412.19437) and models of the same architecture, Moonlight (2502.16982) and Kimi K2 (2507.20534).

Multi-head latent attention, shared and routed experts, dense first layers. Sizes of the released configs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, TransformerBlock
from torchtitan.models.deepseek_v3 import build_mla_moe_layers, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from models import common

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a flavor. `q_rank` 0: full query projection; `yarn` 1: plain RoPE."""

    layers: int
    dense_layers: int
    dim: int
    heads: int
    q_rank: int
    dense_hidden: int
    expert_hidden: int
    experts: int
    shared_experts: int
    top_k: int
    route_scale: float
    vocab_size: int
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    groups: int | None = None
    groups_kept: int | None = None
    std: float = 0.006
    theta: float = 1e4
    yarn: float = 1.0
    yarn_beta_fast: float = 32.0
    max_seq_len: int = 8192


FLAVORS = {
    "tiny": Size(
        layers=4,
        dense_layers=1,
        dim=128,
        heads=8,
        q_rank=64,
        kv_rank=32,
        nope_dim=16,
        rope_dim=16,
        v_dim=16,
        dense_hidden=512,
        expert_hidden=96,
        experts=16,
        shared_experts=1,
        top_k=2,
        route_scale=1.0,
        std=0.02,
        vocab_size=512,
    ),
    "671B": Size(
        layers=61,
        dense_layers=3,
        dim=7168,
        heads=128,
        q_rank=1536,
        dense_hidden=18_432,
        expert_hidden=2048,
        experts=256,
        shared_experts=1,
        top_k=8,
        groups=8,
        groups_kept=4,
        route_scale=2.5,
        yarn=40.0,
        max_seq_len=163_840,
        vocab_size=129_280,
    ),
    "moonlight_16B_A3B": Size(
        layers=27,
        dense_layers=1,
        dim=2048,
        heads=16,
        q_rank=0,
        dense_hidden=11_264,
        expert_hidden=1408,
        experts=64,
        shared_experts=2,
        top_k=6,
        route_scale=2.446,
        std=0.02,
        theta=5e4,
        vocab_size=163_840,
    ),
    "kimi_k2": Size(
        layers=61,
        dense_layers=1,
        dim=7168,
        heads=64,
        q_rank=1536,
        dense_hidden=18_432,
        expert_hidden=2048,
        experts=384,
        shared_experts=1,
        top_k=8,
        route_scale=2.827,
        theta=5e4,
        yarn=32.0,
        yarn_beta_fast=1.0,
        max_seq_len=131_072,
        vocab_size=163_840,
    ),
}


def build(flavor: str, vocab_size: int | None) -> ModelSpec:
    """ModelSpec of a flavor; `vocab_size` replaces the flavor's."""
    size = FLAVORS[flavor]
    vocab = size.vocab_size if vocab_size is None else vocab_size
    model = DeepSeekV3Model.Config(
        dim=size.dim,
        vocab_size=vocab,
        tok_embeddings=common.embedding(vocab, size.dim, size.std),
        layers=_layers(size),
        norm=common.norm(size.dim, EPS),
        lm_head=common.head(vocab, size.dim, size.std),
        mtp_layers=[],
    )
    return ModelSpec(
        name="deepseek_v3",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_deepseekv3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=DeepSeekV3StateDictAdapter,
    )


def _layers(size: Size) -> list[TransformerBlock.Config]:
    layers: list[TransformerBlock.Config] = build_mla_moe_layers(
        n_layers=size.layers,
        n_dense_layers=size.dense_layers,
        dim=size.dim,
        n_heads=size.heads,
        q_lora_rank=size.q_rank,
        kv_lora_rank=size.kv_rank,
        qk_nope_head_dim=size.nope_dim,
        qk_rope_head_dim=size.rope_dim,
        v_head_dim=size.v_dim,
        mscale=1.0,
        dense_hidden_dim=size.dense_hidden,
        moe_hidden_dim=size.expert_hidden,
        num_experts=size.experts,
        num_shared_experts=size.shared_experts,
        router_top_k=size.top_k,
        router_score_func="sigmoid",
        router_num_expert_groups=size.groups,
        router_num_limited_groups=size.groups_kept,
        router_route_scale=size.route_scale,
        router_route_norm=True,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=common.linear_init(size.std),
        norm_init=common.NORM_INIT,
        depth_init=lambda layer: common.linear_init(size.std),
        depth_experts_init=lambda layer: common.experts_init(size.std, size.std),
        rope=_rope(size),
    )
    for layer in layers:
        attention: Any = layer.attention
        for part in (layer.attention_norm, layer.ffn_norm, attention.q_norm, attention.kv_norm):
            part.eps = EPS  # TorchTitan's builder leaves 1e-5
    return layers


def _rope(size: Size) -> ComplexRoPE.Config:
    rope = partial(ComplexRoPE.Config, dim=size.rope_dim, max_seq_len=size.max_seq_len, theta=size.theta)
    if size.yarn == 1.0:
        return rope()
    return rope(scaling="yarn", rope_factor=size.yarn, beta_fast=size.yarn_beta_fast, original_seq_len=4096)
