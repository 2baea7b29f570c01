"""The element-wise parts of a Muon step, on whatever part of a parameter is at hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LR_SCALES = ("match_rms_adamw", "original", "spectral")


def lr_scale(name: str, rows: int, cols: int) -> float:
    """Factor on the learning rate for a rows x cols matrix.

    `match_rms_adamw` gives updates the root mean square of AdamW's, 0.2 sqrt(max(m, n)) (Liu et al., "Muon is Scalable
    for LLM Training", arXiv:2502.16982). `original` is sqrt(max(1, m / n)) (Keller Jordan, 2024). `spectral` is
    sqrt(m / n) (Bernstein, "Deriving Muon", 2025; Yang et al., arXiv:2310.17813). Raises ValueError for another name.
    """
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    if name == "original":
        return math.sqrt(max(1, rows / cols))
    if name == "spectral":
        return math.sqrt(rows / cols)
    raise ValueError(f"lr_scale = {name!r} is not one of {', '.join(LR_SCALES)}")


def momentum(average: Tensor, grad: Tensor, decay: float, nesterov: bool) -> Tensor:
    """Advance the exponential moving average in place and give what Muon orthogonalizes.

    With `nesterov` that is a new tensor, the gradient blended with its average; otherwise it may be `average` itself,
    which the caller must not write to. torch.optim.Muon's convention: the gradient enters with weight 1 - decay.
    Average and gradient may have different dtypes: the arithmetic is in the wider one.
    """
    wide = torch.promote_types(average.dtype, grad.dtype)
    grad = grad.to(wide)
    advanced = average if average.dtype == wide else average.to(wide)
    advanced.lerp_(grad, 1 - decay)
    if advanced is not average:
        average.copy_(advanced)
    return grad.lerp(advanced, decay) if nesterov else advanced


def apply(param: Tensor, update: Tensor, lr: float, scale: float, weight_decay: float) -> None:
    """param <- (1 - lr weight_decay) param - lr scale update, in place; the decay is decoupled and not scaled."""
    param.mul_(1 - lr * weight_decay)
    param.add_(update, alpha=-lr * scale)
