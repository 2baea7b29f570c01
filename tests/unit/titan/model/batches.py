"""Models with initial values, and outputs of their attentions."""

from typing import Any

import torch
from torch import Tensor


def initialized(config: Any, seed: int = 0) -> Any:
    """The model of a configuration on the CPU, with the initial values of a seed."""
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def attended(inner: Any, *qkv: Tensor, **options: Any) -> Tensor:
    """Output of an inner attention for queries, keys and values of (batch, length, heads, width)."""
    out: Tensor = inner(*qkv, **options)
    return out.view(*qkv[0].shape[:2], *out.shape[-2:])
