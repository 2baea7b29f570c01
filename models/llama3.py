"""Llama 3 (The Llama 3 Herd of Models, arXiv:2407.21783, table 3)."""

from dataclasses import dataclass

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from models import common

STD = 0.02
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a flavor; a head has dim / heads columns."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab_size: int = 128_256
    max_seq_len: int = 8192
    theta: float = 5e5


FLAVORS = {
    "tiny_64": Size(layers=6, dim=64, heads=4, kv_heads=2, hidden=256, vocab_size=512),
    "tiny": Size(layers=6, dim=128, heads=8, kv_heads=4, hidden=512, vocab_size=512),
    "tiny_256": Size(layers=6, dim=256, heads=16, kv_heads=8, hidden=1024, vocab_size=512),
    "tiny_512": Size(layers=6, dim=512, heads=32, kv_heads=16, hidden=2048, vocab_size=512),
    "42M": Size(layers=8, dim=512, heads=8, kv_heads=8, hidden=1408, vocab_size=16_384),
    "8B": Size(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14_336),
    "70B": Size(layers=80, dim=8192, heads=64, kv_heads=8, hidden=28_672),
}


def build(flavor: str, vocab_size: int | None) -> ModelSpec:
    """ModelSpec of a flavor; `vocab_size` replaces the flavor's."""
    size = FLAVORS[flavor]
    vocab = size.vocab_size if vocab_size is None else vocab_size
    model = Llama3Model.Config(
        dim=size.dim,
        vocab_size=vocab,
        tok_embeddings=common.embedding(vocab, size.dim, STD),
        layers=[_layer(size) for _ in range(size.layers)],
        norm=common.norm(size.dim, EPS),
        lm_head=common.head(vocab, size.dim, STD),
    )
    return ModelSpec(
        name="llama3",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )


def _layer(size: Size) -> Llama3TransformerBlock.Config:
    into_residual = common.linear_init(common.residual_std(STD, size.layers))
    return Llama3TransformerBlock.Config(
        attention_norm=common.norm(size.dim, EPS),
        attention=make_gqa_config(
            dim=size.dim,
            n_heads=size.heads,
            n_kv_heads=size.kv_heads,
            wqkv_param_init=common.linear_init(STD),
            wo_param_init=into_residual,
            inner_attention=FlexAttention.Config(),
            rope=ComplexRoPE.Config(dim=size.dim // size.heads, max_seq_len=size.max_seq_len, theta=size.theta),
            fuse_qkv=False,
        ),
        ffn_norm=common.norm(size.dim, EPS),
        feed_forward=make_ffn_config(
            dim=size.dim,
            hidden_dim=size.hidden,
            w1_param_init=common.linear_init(STD),
            w2w3_param_init=common.linear_init(STD),
        ),
    )
