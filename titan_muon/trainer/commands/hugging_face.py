"""A saved model as a folder of Hugging Face: weights, configuration and tokenizer.

TorchTitan's adapters name and shape the weights; the configuration is read off TorchTitan's.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from torch import Tensor
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3.model import Qwen3Model

from titan_muon.trainer.commands.saved_model import SavedModel
from titan_muon.trainer.data.tokenizers import BYTES, BPETokenizer, ByteTokenizer
from titan_muon.trainer.recipe import RecipeError

MARKS = ("<|begin|>", "<|end|>")
"""Texts of the opening and the closing mark of `data.tokenizer` "bytes" and "bpe"."""
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")
EXPERT_BIAS = "expert_bias_E"
LATENT_EPS = 1e-6
"""Fixed in DeepseekV3ForCausalLM."""


def save(saved: SavedModel, folder: Path, *, drop_expert_bias: bool) -> None:
    """Write the model, config.json and the tokenizer into a new folder.

    `drop_expert_bias`: leave out the bias of load balancing where Transformers' architecture has none.

    Raises RecipeError for a model without a counterpart in Transformers, and for weights that the counterpart lacks.
    """
    recipe, tokenizer = saved.recipe, saved.tokenizer
    config = hf_config(saved.spec.model, recipe.model.name)
    states: dict[str, Tensor] = {}
    assert saved.spec.state_dict_adapter is not None, "hf_config knows families with an adapter"
    adapter = saved.spec.state_dict_adapter(saved.spec.model, None)
    for name, tensor in saved.model.state_dict().items():
        converted = adapter.to_hf({name: tensor})
        # A view of a stack of experts would share the stack's memory, which safetensors refuses.
        states |= {key: part.detach().clone(memory_format=torch.contiguous_format) for key, part in converted.items()}
        tied = config["tie_word_embeddings"] and name == "lm_head.weight"
        dropped = drop_expert_bias and name.endswith(EXPERT_BIAS)
        if not (converted or tied or dropped) and tensor.any():
            remedy = (
                "; --drop-expert-bias exports without: some tokens get other experts" if EXPERT_BIAS in name else ""
            )
            raise RecipeError(f"{name} has no counterpart in {config['architectures'][0]}{remedy}")
    config |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    config["torch_dtype"] = str(next(saved.model.parameters()).dtype).removeprefix("torch.")
    folder.mkdir(parents=True)
    save_torch_state_dict(states, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in folder.glob("*.safetensors"):
        # safetensors writes files that only their owner can read.
        file.chmod((folder / "config.json").stat().st_mode)
    if recipe.data.tokenizer == "hf":
        for file in (file for names in TOKENIZER_FILES for file in Path(recipe.data.tokenizer_path or "").glob(names)):
            shutil.copy(file, folder)
        return
    fast_tokenizer(tokenizer).save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": MARKS[0], "eos_token": MARKS[1]}
    about |= {"clean_up_tokenization_spaces": False, "model_max_length": recipe.training.seq_len}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def fast_tokenizer(tokenizer: Any) -> Tokenizer:
    """A `tokenizers.Tokenizer` with the ids of `data.tokenizer` "bytes" or "bpe", which opens every text."""
    if isinstance(tokenizer, ByteTokenizer):
        fast = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(BYTES)}, [], byte_fallback=True))
        fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    else:
        assert isinstance(tokenizer, BPETokenizer), "other tokenizers are files"
        fast = Tokenizer.from_str(tokenizer.bpe.to_str())
        # A short text has fewer merges than ids.
        fast.add_tokens([f"<|unused {number}|>" for number in range(fast.get_vocab_size(), tokenizer.bos_id)])
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    opening = (MARKS[0], tokenizer.bos_id)
    fast.post_processor = processors.TemplateProcessing(single=f"{MARKS[0]} $A", special_tokens=[opening])
    return fast


def hf_config(model: Any, name: str) -> dict[str, Any]:
    """Content of config.json for TorchTitan's configuration of a model of the family `name`."""
    first, last = model.layers[0], model.layers[-1]
    dense, moe, attention = first.feed_forward, last.moe, first.attention
    norms = (model.norm, first.attention_norm, first.ffn_norm, getattr(attention, "qk_norm", None))
    eps = list(dict.fromkeys(norm.eps for norm in norms if norm))
    if len(eps) > 1:
        raise RecipeError(
            f"= {name!r} has norms with eps {eps}; Transformers has one for all of a model", key="model.name"
        )
    config: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "hidden_act": "silu",
        "rms_norm_eps": eps[0],
        "tie_word_embeddings": model.enable_weight_tying,
        "attention_bias": False,
        "max_position_embeddings": getattr(attention.rope, "max_seq_len", None),
        "rope_theta": attention.rope.theta,
    }
    if dense is not None:
        config["intermediate_size"] = dense.w1.out_features
    if moe is not None:
        experts, router = moe.routed_experts.inner_experts, moe.router
        config |= {
            "num_experts_per_tok": router.top_k,
            "norm_topk_prob": router.route_norm,
            "moe_intermediate_size": experts.hidden_dim,
        }
    score = None if moe is None else (router.score_func, router.num_expert_groups or router.route_scale)
    if isinstance(model, Llama3Model.Config | Qwen3Model.Config):
        config["num_key_value_heads"] = attention.n_kv_heads or attention.n_heads
        config["head_dim"] = attention.head_dim or model.dim // attention.n_heads
    if isinstance(model, Llama3Model.Config) and attention.rope.scaling in ("none", "llama"):
        return config | _of("llama", "LlamaForCausalLM") | _llama_scaling(attention.rope)
    if isinstance(model, Qwen3Model.Config) and attention.rope.scaling == "none" and moe is None:
        return config | _of("qwen3", "Qwen3ForCausalLM")
    if isinstance(model, Qwen3Model.Config) and attention.rope.scaling == "none" and score == ("softmax", 1.0):
        return config | _of("qwen3_moe", "Qwen3MoeForCausalLM") | {"num_experts": moe.num_experts}
    if isinstance(model, DeepSeekV3Model.Config) and moe is not None and router.score_func == "sigmoid":
        return config | _of("deepseek_v3", "DeepseekV3ForCausalLM") | _deepseek(model, name)
    raise RecipeError(f"= {name!r}: Transformers has no counterpart that is known here", key="model.name")


def _of(kind: str, architecture: str) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [architecture]}


def _llama_scaling(rope: Any) -> dict[str, Any]:
    if rope.scaling == "none":
        return {}
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = {"rope_type": "llama3", "factor": rope.scaling_factor, **{name: getattr(rope, name) for name in names}}
    return {"rope_scaling": scaling}


def _deepseek(model: Any, name: str) -> dict[str, Any]:
    attention, moe = model.layers[0].attention, model.layers[-1].moe
    if {attention.q_norm.eps, attention.kv_norm.eps} != {LATENT_EPS}:
        eps = f"eps {attention.kv_norm.eps} in the norms of latent attention, and DeepseekV3ForCausalLM {LATENT_EPS}"
        raise RecipeError(f"= {name!r} has {eps}; Transformers would compute other logits", key="model.name")
    rope, hidden = attention.rope, moe.routed_experts.inner_experts.hidden_dim
    config = {
        "num_key_value_heads": attention.n_heads,
        "q_lora_rank": attention.q_lora_rank or None,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts.w1.out_features // hidden,
        "n_group": moe.router.num_expert_groups or 1,
        "topk_group": moe.router.num_limited_groups or 1,
        "routed_scaling_factor": moe.router.route_scale,
        "first_k_dense_replace": sum(layer.moe is None for layer in model.layers),
        "num_nextn_predict_layers": 0,
        **{
            name: getattr(attention, name)
            for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        },
    }
    if rope.scaling == "yarn":
        names: Mapping[str, Any] = {name: getattr(rope, name) for name in ("beta_fast", "beta_slow", "truncate")}
        scales = {"factor": rope.rope_factor, "mscale": attention.mscale, "mscale_all_dim": attention.mscale}
        length = {"original_max_position_embeddings": rope.original_seq_len}
        config["rope_scaling"] = {"rope_type": "yarn", **scales, **names, **length}
    return config
