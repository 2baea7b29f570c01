"""Module hooks that unshard a param group, reduce its gradients, and reshard.

A group is unsharded in its module's forward, and in backward from the first gradient of the output until the gradients
of the inputs, where gradients are reduced. The next group is prefetched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from . import private
from .comm import OwnerComm
from .param_group import OwnedParamGroup, OwnedState
from .reduction import Reductions


class HookContext:
    """The hooks of a model, in the order of the forward pass.

    `reduce_grads`: whether a backward pass sends gradients to the owners, or adds them up on each rank.
    """

    def __init__(self, comm: OwnerComm) -> None:
        self.reductions = Reductions(comm)
        self.reduce_grads = True
        self.hooks: list[ModuleHooks] = []
        self._last_forward = -1
        self._backward: int | None = None
        # A weak reference, because only autograd holds the callback, which dies with a pass that raised.
        self._end_of_backward: Callable[[], object] = lambda: None

    def enter_forward(self, index: int) -> None:
        # A successful backward pass has reset `_backward`.
        if self._backward is not None:
            self._forget_backward()
        # A failed or branching forward leaves a prefetched group, and a forward without backward the last group. In a
        # new forward even the expected group may hold old weights.
        new_forward, self._last_forward = index <= self._last_forward, index
        for hooks in self.hooks:
            if hooks.group.state is OwnedState.UNSHARDING and (new_forward or hooks.index != index):
                hooks.group.reshard()

    def _forget_backward(self) -> None:
        self._backward = None
        self.reductions.discard()
        for hooks in self.hooks:
            hooks.in_backward = hooks.awaits_backward = False
            for param in hooks.group.trained:
                param.discard_unsharded_grads()
            # A kept group may be older than an update in between.
            hooks.group.reshard()

    def enter_backward(self) -> None:
        """Register the cleanup at the end of the current backward pass, once per pass."""
        # By number, because a pass that raised would leave a flag set.
        current = private.backward_pass()
        if current == self._backward:
            return
        if self._backward is not None and self._end_of_backward() is None:
            self._forget_backward()
        at_end = partial(self._final_callback)
        self._backward, self._end_of_backward = current, weakref.ref(at_end)
        private.at_end_of_backward(at_end)

    def _final_callback(self) -> None:
        self._backward = None
        # Modules without input gradients, in backward order, so that the reductions of all ranks match.
        for hooks in reversed(self.hooks):
            if hooks.in_backward:
                hooks.post_backward()
        self.reductions.finish()
        # The loss may not use a module with a kept or prefetched group.
        for hooks in self.hooks:
            hooks.group.reshard()
            hooks.awaits_backward = False


class ModuleHooks:
    """Hooks that keep a param group unsharded during its module's compute.

    `reshard_after_forward`: None: all but the last group. `index`: position in the order of the forward pass.
    """

    def __init__(
        self,
        module: nn.Module,
        group: OwnedParamGroup,
        context: HookContext,
        policy: MixedPrecisionPolicy,
        *,
        reshard_after_forward: bool | None,
        divide_factor: float,
    ) -> None:
        self.group, self.index = group, len(context.hooks)
        self.awaits_backward = self.in_backward = False
        self._context, self._policy = context, policy
        self._reshard_after_forward, self._divide_factor = reshard_after_forward, divide_factor
        context.hooks.append(self)
        module.register_forward_pre_hook(self._pre_forward, with_kwargs=True)
        # After an exception too, or unsharded parameters would outlive the weights.
        module.register_forward_hook(self._post_forward, always_call=True)

    # torch.compile would trace the parameter swap and the collectives into the graph.
    @torch.compiler.disable
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if private.backward_pass() is None:
            self._context.enter_forward(self.index)
        self.group.unshard()
        self.group.wait_for_unshard()
        # Within backward (activation checkpointing), backward has passed the next module already.
        if private.backward_pass() is None:
            for following in self._context.hooks[self.index + 1 : self.index + 2]:
                following.group.unshard()
        if self._policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), self._policy.param_dtype)
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, structure = tree_flatten((args, kwargs))
        marked = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if marked:
            outputs = _PostBackward.apply(self.post_backward, *(leaves[i] for i in marked))
            for i, output in zip(marked, outputs, strict=True):
                leaves[i] = output
        return tree_unflatten(leaves, structure)

    @torch.compiler.disable
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # Within backward (recomputation) the parameters stay, and the outer graph has a hook.
        if private.backward_pass() is None:
            differentiable = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if differentiable:
                # The first output gradient already needs the weights, and some may never come.
                register_multi_grad_hook(differentiable, self._pre_backward, mode="any")
                self.awaits_backward = True
            reshard, is_last = self._reshard_after_forward, self.index + 1 == len(self._context.hooks)
            if reshard is None and is_last and differentiable:
                # The last module's backward is next, and a new gather would not overlap.
                self.group.keep()
            elif reshard is None or reshard or not differentiable:
                self.group.reshard()
        return _cast(output, self._policy.output_dtype)

    @torch.compiler.disable
    def _pre_backward(self, gradient: Tensor) -> None:
        self._context.enter_backward()
        self.in_backward = True
        self.group.unshard()
        self.group.wait_for_unshard()
        if self.index > 0 and (previous := self._context.hooks[self.index - 1]).awaits_backward:
            previous.group.unshard()

    @torch.no_grad()
    def post_backward(self) -> None:
        self._context.enter_backward()
        self.in_backward = self.awaits_backward = False
        reduces, trained = self._context.reduce_grads, self.group.trained
        dtype = private.reduce_dtype(self._policy, [param.owned_param.dtype for param in trained])
        for param in trained:
            # Sums over microbatches stay in the reduce dtype.
            param.accumulate_unsharded_grad(None if reduces else dtype)
        # Before the reduction allocates its input, to lower the peak.
        self.group.reshard()
        if reduces:
            self._context.reductions.start(self.group, dtype, self._divide_factor)


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs; backward runs after all gradients of the module's weights."""

    # Not on the weights: a frozen weight has no gradient, and the order of weight gradients is unknown.
    @staticmethod
    def forward(ctx: Any, post_backward: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.post_backward = post_backward
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.post_backward()
        return None, *gradients


def refuse_use_while_owned(module: nn.Module, group: OwnedParamGroup) -> None:
    """Make a module raise ValueError while its owned parameters are not unsharded."""

    def check_unsharded(*_: object) -> None:
        # An owned parameter has the global shape on every rank, so the product would fail without a hint.
        if group.state is not OwnedState.UNSHARDED:
            raise ValueError(
                f"{type(module).__name__}: its owned parameters are unsharded only within the forward of {group.name}, "
                "which was given to own(); call that module, or give this module to own()"
            )

    module.register_forward_pre_hook(check_unsharded)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
