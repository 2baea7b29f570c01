"""Muon (Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ...options import OptionError
from ..tensors.dtensor import is_host
from ..tensors.storage import STEP
from .algorithm import Algorithm, Group, Tensors
from .foreach import MomentumCall, UpdateCall


class MuonAlgorithm(Algorithm):
    """Orthogonalized exponential moving average of gradients, with decoupled weight decay; base of the others."""

    gather_kernel: Literal["momentum", "signs", "copy"] | None = "momentum"

    def before_gather(self, call: MomentumCall, momentum: Tensors, grads: Tensors) -> None:
        update_momentum(momentum, grads, call.packed, self.decay(call.group), call.group["nesterov"])

    def decay(self, group: Group) -> float:
        """The decay of the momentum in this step, which rises linearly from `momentum_start`."""
        steps, momentum = self.options.momentum_warmup_steps, group["momentum"]
        if not steps or group[STEP] >= steps:
            return momentum
        start = self.options.momentum_start
        return start + (momentum - start) * group[STEP] / steps

    def rates(self, group: Group) -> tuple[float | Tensor, float | Tensor]:
        """The learning rate and the weight decay of this step."""
        lr, decay = group["lr"], group["weight_decay"]
        if isinstance(lr, Tensor):
            lr = rate(lr)
        if self.options.decay_follows_lr:
            highest = highest_rate(group)
            assert highest is not None, "the step leaves out groups with an unknown highest rate"
            decay = decay * lr / highest if isinstance(highest, Tensor) or highest > 0 else 0.0
        return lr, decay

    def factor(self, call: UpdateCall) -> float:
        """Factor on the learning rate."""
        return lr_factor(call.group["adjust_lr_fn"], *call.out_in)

    def after_return(self, call: UpdateCall, params: Tensors) -> None:
        """param <- (1 - lr weight_decay) param - lr factor update. The decay may be cautious."""
        call.memory.resize_(call.scratch_bytes)
        try:
            if call.chunk is None:
                self.add(params, call.updates, call.scratch, call=call)
            else:
                call.chunk.update(params, call.updates, partial(self.add, scratch=(), call=call), call.group[STEP])
        finally:
            call.memory.resize_(0)

    def add(self, params: Tensors, updates: Tensors, scratch: Tensors, *, call: UpdateCall) -> None:
        """The update of `after_return`; the decay is decoupled and not scaled.

        `scratch`, if not empty, takes the updates in the parameters' dtype.
        """
        lr, decay = self.rates(call.group)
        if self.options.cautious:
            decay_cautiously(params, updates, lr * decay)
            decay = 0.0
        kept = 1 - lr * decay
        if params[0].dtype.itemsize < 4 and is_host(params[0].device):
            # For lists on a CPU, PyTorch rounds a number to 16 bits first: 0.998 to 0.996.
            kept = torch.as_tensor(kept, dtype=torch.float32)
        torch._foreach_mul_(params, kept)
        if scratch:
            # On a GPU, operators on lists of mixed dtypes launch one kernel per tensor. Copies do not.
            torch._foreach_copy_(scratch, updates)
        add_scaled(params, scratch or updates, -lr * self.factor(call))


def lr_factor(adjust_lr_fn: float | str | None, rows: int, cols: int) -> float:
    """Factor on the learning rate for a rows x cols matrix. Raises OptionError for an unknown name."""
    if isinstance(adjust_lr_fn, int | float):
        return adjust_lr_fn * math.sqrt(max(rows, cols))
    original = math.sqrt(max(1, rows / cols))
    factors = {
        # The root mean square of AdamW's updates (Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982).
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
        # Keller Jordan, 2024.
        "original": original,
        # Bernstein, "Deriving Muon", 2025; Yang et al., arXiv:2310.17813.
        "spectral_unclamped": math.sqrt(rows / cols),
        # torch.optim.Muon's default.
        None: original,
    }
    if adjust_lr_fn not in factors:
        raise OptionError("adjust_lr_fn", f"= {adjust_lr_fn!r} is not one of {', '.join(map(str, factors))}")
    return factors[adjust_lr_fn]


def update_momentum(momentum: Tensors, grads: Tensors, packed: Tensors, decay: float, nesterov: bool) -> None:
    """Update exponential moving averages in place and write the input of Newton-Schulz to `packed`, if not empty.

    The input is the average, or with `nesterov` the gradient blended with the average. Gradients have weight 1 - decay,
    as in torch.optim.Muon. Averages share a dtype, and so do gradients; the arithmetic runs in the wider dtype.
    """
    wide = torch.promote_types(momentum[0].dtype, grads[0].dtype)
    wide_grads = grads if grads[0].dtype == wide else in_dtype(grads, wide)
    updated = momentum if momentum[0].dtype == wide else in_dtype(momentum, wide)
    torch._foreach_lerp_(updated, wide_grads, 1 - decay)
    if updated is not momentum:
        torch._foreach_copy_(momentum, updated)
    if not packed:
        return
    if nesterov and wide_grads is grads:
        updated = torch._foreach_lerp(grads, updated, decay)
    elif nesterov:
        torch._foreach_lerp_(wide_grads, updated, decay)
        updated = wide_grads
    torch._foreach_copy_(packed, updated)


def rate(lr: float | Tensor) -> float | Tensor:
    """The rate as a number, or as a scalar tensor of a device, because reading would wait."""
    if not isinstance(lr, Tensor):
        return lr
    return lr.item() if is_host(lr.device) else lr.reshape(())


RATE_ROUNDING = 1e-3
"""Excess over the highest rate that is not a higher rate, because some schedulers multiply the rate in each step."""


def highest_rate(group: Mapping[str, Any]) -> float | Tensor | None:
    """The highest learning rate of a group's schedule, or None if unknown.

    This is `max_lr`, of the user or of OneCycleLR, else the `initial_lr` of a scheduler. Neither counts if the rate is
    higher, as under CyclicLR. `initial_lr` does not count beside a factor by layer (`lr_scale`), nor for a rate in a
    tensor of a device, which the host cannot compare.
    """
    explicit = "max_lr" in group
    lr, highest = rate(group["lr"]), rate(group["max_lr"] if explicit else group.get("initial_lr", math.nan))
    if isinstance(lr, Tensor) or isinstance(highest, Tensor) or "lr_scale" in group:
        return highest if explicit else None
    return highest if lr <= highest * (1 + RATE_ROUNDING) else None


def add_scaled(params: Tensors, added: Tensors, factor: float | Tensor) -> None:
    """param <- param + factor added, in place, with bits that do not depend on how the tensors are cut."""
    if isinstance(factor, Tensor):
        # `alpha` takes a number. The product is rounded once more than with `alpha`.
        torch._foreach_add_(params, torch._foreach_mul(added, factor))
        return
    dtype = params[0].dtype
    if dtype == added[0].dtype and dtype.itemsize < 4 and is_host(params[0].device):
        # At the end of a vector, CPU kernels round `alpha * added` to 16 bits, and replicas that apply an update in
        # different pieces would drift apart. Operators on mixed dtypes compute in float32 and round the sum once.
        added = in_dtype(added, torch.float32)
    torch._foreach_add_(params, added, alpha=factor)


def decay_cautiously(params: Tensors, updates: Tensors, factor: float | Tensor) -> None:
    """param <- (1 - factor) param where param * update >= 0, in place (Chen et al., 2025, arXiv:2510.12402)."""
    decays = torch._foreach_mul(params, updates)
    torch._foreach_sign_(decays)
    torch._foreach_add_(decays, 1)
    torch._foreach_clamp_max_(decays, 1)
    torch._foreach_mul_(decays, params)
    add_scaled(params, decays, -factor)


def in_dtype(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Copies of the tensors in `dtype`."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies
