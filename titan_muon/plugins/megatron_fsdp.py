"""Models of Megatron-FSDP (package `megatron_fsdp`, classic and experimental): the calls around an optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.exchange.agreement import Agreement
from ..engine.tensors.dtensor import local, set_rows
from ..engine.tensors.names import named_parameters
from ..muon import Muon
from ..options import OptionError
from ..selection import MARKS
from .clip import OTHER_EXPERTS


def follow_megatron_fsdp(optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimizer train a model that Megatron-FSDP has sharded.

    Call this once on all ranks, in place of Megatron-FSDP's `fully_shard_optimizer`: after the model is sharded, and
    before the first step and before a checkpoint is loaded. Each step then waits for the reduced gradients, and ends
    with the new weights in the model. `zero_grad` clears the gradient buffers of the model too.

    Args:
        optimizer: a `Hybrid` of the model, or a `Muon` or other optimizer of its named parameters.
        model: from `fully_shard_model`, or sharded by `megatron_fsdp.experimental.fully_shard`.

    Raises:
        ValueError: for parameters that Megatron-FSDP did not shard; in the first step, for gradients of zero, which
            `fully_shard_optimizer` makes; for an experimental model with sharded optimizer states over replicas of the
            gradients (HFSDP), whose second backward pass fails in the package.
        OptionError: for overlap, because Megatron-FSDP installs weights at the end of the step; for decoupled
            gradients, which only Transformer Engine's FusedAdam reads.
    """
    parts = (optimizer, *getattr(optimizer, "optimizers", {}).values())
    for muon in (part for part in parts if isinstance(part, Muon)):
        if muon.options.overlap != "none":
            problem = f"= {muon.options.overlap!r} has no hooks in a model of Megatron-FSDP; set 'none'"
            raise OptionError("overlap", problem)
    named: list[tuple[str, Any]] = list(named_parameters(optimizer.param_groups))
    for fqn, parameter in named:
        if not isinstance(parameter, DTensor) or not any(hasattr(parameter, mark) for mark in MARKS):
            raise ValueError(
                f"{fqn}: is not a sharded parameter of Megatron-FSDP; build the optimizer after fully_shard_model (or "
                "the experimental fully_shard), and before the first forward pass"
            )
    if all(hasattr(parameter, MARKS[1]) for _, parameter in named):
        _follow_experimental(optimizer, named)
    else:
        _Classic(optimizer, model)
        buffers: Any = model.param_and_grad_buffer
        experts = {param for group in buffers.parameter_groups if group.is_expert_param for param in group.params}
        for _, parameter in named:
            if parameter.orig_param in experts:
                # Replicas of tensor parallelism have equal meshes too.
                setattr(parameter, OTHER_EXPERTS, True)
    from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    for _, parameter in named:
        # By the order in which Megatron-FSDP cuts the parameter. Collective over its mesh.
        set_rows(parameter, gather_and_compute_chunk_metadata(parameter).offsets[0])


def _follow_experimental(optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> None:
    from megatron_fsdp.experimental import Flat, Partial, fully_shard_optimizer

    for fqn, parameter in named:
        group: Any = getattr(parameter, MARKS[1])
        reduced = group.main_grad.placements if group.main_grad is not None else ()
        pairs = zip(reduced, group.main_weight.placements, strict=False)
        if any(isinstance(grad, Partial) and isinstance(weight, Flat) for grad, weight in pairs):
            raise ValueError(
                f"{fqn}: experimental Megatron-FSDP cannot shard weights over an axis with partial gradients (HFSDP): "
                "its second backward pass fails; use fully_shard_model, or Replicate for the optimizer on that axis"
            )
    fully_shard_optimizer(optimizer)


class _Classic:
    """The hooks around the steps of an optimizer."""

    def __init__(self, optimizer: Optimizer, model: Any) -> None:
        if model.param_and_grad_buffer.use_decoupled_grad:
            raise OptionError("use_decoupled_grad", "= True of fully_shard_model hides gradients; set False")
        self._optimizer, self._model, self._stepped = optimizer, model, False
        self._zero_grad = optimizer.zero_grad
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(lambda *_: model.install_optimized_model_weights())
        optimizer.zero_grad = self._zero  # type: ignore[method-assign]

    def _before(self, *_: Any) -> None:
        # Counts backward passes since the last synchronization. A second one would undo a clipping of gradients.
        if self._model.microbatch_count:
            self._model.finish_grad_sync()
        if not self._stepped:
            self._stepped = self._first_gradients_move()

    def _first_gradients_move(self) -> bool:
        """Whether a gradient is not zero. Raises ValueError on all ranks if weights would only decay."""
        groups = self._optimizer.param_groups
        grads = [local(p.grad) for _, p in named_parameters(groups) if p.grad is not None]
        agreement = Agreement(getattr(self._optimizer, "process_group", None))
        moves = agreement.any_rank(any(bool(grad.count_nonzero()) for grad in grads))
        # torch.distributed.checkpoint makes states by a step with rates and gradients of zero.
        if not moves and any(bool(group["lr"]) for group in groups):
            raise ValueError(
                "all gradients of the first step are zero, as fully_shard_optimizer of Megatron-FSDP makes them, and "
                "the step would decay the weights; call follow_megatron_fsdp in place of fully_shard_optimizer"
            )
        return moves

    def _zero(self, set_to_none: bool = True) -> None:
        self._zero_grad(set_to_none)
        self._model.zero_grad_buffer()
