"""Parts for Hugging Face: the optimizer of a Trainer, and QK-clip with the largest logits of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..engine.tensors.names import canonical_fqn
from ..hybrid import Hybrid
from .qk_clip import AttentionLayer, HeadWeight, QKClip, key_rows, query_rows

OBSERVED = "sdpa_with_logits"
"""Name of the attention in Transformers' registries."""


def trainer_optimizer(model: nn.Module, arguments: Any, **options: Any) -> tuple[type[Hybrid], dict[str, Any]]:
    """The argument `optimizer_cls_and_kwargs` of a Trainer: a Hybrid of the model.

    Learning rate, weight decay, and AdamW's betas and eps come from `arguments`; `options` come before.

    Args:
        model: as given to the Trainer.
        arguments: `transformers.TrainingArguments`, or a subclass as `trl.SFTConfig`.
        options: other keywords of `Hybrid`.
    """
    adamw = {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    rates = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    return Hybrid, {"model": model, **rates, **options, "adamw": {**adamw, **options.get("adamw", {})}}


def transformers_qk_clip(
    model: nn.Module, *, threshold: float = 100.0, alpha: float = 0.5, clips: bool = True
) -> QKClip:
    """QK-clip for attention of Hugging Face, which observes the logits of training: call `apply` after each step.

    For `q_proj` and `k_proj` with `head_dim`, as of Llama, Mistral and Qwen2, and `attn_implementation="sdpa"`. Another
    pass over the logits finds the largest, with the logits of one key head in memory at a time. Call this after the
    model is sharded (`fully_shard`, DDP) and before the first forward.

    Arguments as of `QKClip`. Raises ValueError for a model without such attention, for queries that a norm or a gate
    follows, for another attention implementation, and as `QKClip`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    names: dict[str, Any] = {
        canonical_fqn(name): module
        for name, module in model.named_modules()
        if hasattr(module, "q_proj") and hasattr(module, "k_proj")
        if isinstance(getattr(module, "head_dim", None), int)
    }
    # A wrapper, as of DDP or PEFT, may be no model of Transformers.
    parts: list[Any] = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    if not (names and parts):
        raise ValueError(
            "transformers_qk_clip: no module of the model has head_dim, q_proj and k_proj, or none is a model of "
            "Transformers; observe the logits yourself, and feed a QKClip"
        )
    if parts[0].config._attn_implementation not in ("sdpa", OBSERVED):
        used = f"attn_implementation = {parts[0].config._attn_implementation!r}"
        raise ValueError(f"transformers_qk_clip: {used} returns no logits; load the model with 'sdpa'")
    layers = [_layer(name, attention, clips=clips) for name, attention in names.items()]
    clip = QKClip(layers, threshold=threshold, alpha=alpha, clips=clips)
    for layer in layers:
        names[layer.name].largest_logits = clip.logits(layer.name, 0, layer.heads)
    AttentionInterface.register(OBSERVED, _attend)
    AttentionMaskInterface.register(OBSERVED, sdpa_mask)
    parts[0].set_attn_implementation(OBSERVED)
    return clip


def _layer(name: str, attention: Any, *, clips: bool) -> AttentionLayer:
    size, heads = attention.head_dim, attention.config.num_attention_heads
    norms = [norm for norm in ("q_norm", "k_norm", "q_layernorm", "k_layernorm") if getattr(attention, norm, None)]
    if clips and norms:
        why = "so that scaling the projections changes no logit; use clips=False to report logits"
        raise ValueError(f"{name}: {norms[0]} normalizes after the projection, {why}")
    weights = []
    for path, pattern in (("q_proj", query_rows(size)), ("k_proj", key_rows(size))):
        tensors = dict(getattr(attention, path).named_parameters())
        if not tensors.keys() <= {"weight", "bias"}:
            raise ValueError(f"{name}.{path} has {', '.join(tensors)}, of which QK-clip cannot scale the product")
        weights += [HeadWeight(f"{name}.{path}.{kind}", tensor, pattern) for kind, tensor in tensors.items()]
    if len(weights[0].tensor) != heads * size:
        raise ValueError(
            f"{name}.q_proj has {len(weights[0].tensor)} rows, and {heads} heads of {size} have another number"
        )
    return AttentionLayer(name, heads, tuple(weights if clips else weights[:1]))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if module.training and hasattr(module, "largest_logits"):
        with torch.no_grad():
            scaling = options.get("scaling")
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            found = _largest_logits(query * scaling, key, attention_mask, causal=getattr(module, "is_causal", True))
            torch.maximum(module.largest_logits, found, out=module.largest_logits)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _largest_logits(query: Tensor, key: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """(heads,) float32, of pairs that attend. `query`, `key`: (batch, heads or key heads, tokens, head_dim)."""
    if mask is None and causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    maxima = []
    for head, queries in enumerate(query.chunk(key.shape[1], dim=1)):
        logits = queries @ key[:, head, None].transpose(-2, -1)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        maxima.append(logits.amax((0, 2, 3)))
    return torch.cat(maxima).float()
