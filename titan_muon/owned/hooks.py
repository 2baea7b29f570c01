"""Hooks on modules: when a param group is unsharded, when its gradients are reduced, and when it is resharded.

A group is unsharded before the forward of its module and resharded after it; unsharded again when the first gradient of
the module's output is there, and reduced and resharded when the gradients of its inputs are. The neighbour that comes
next is already on its way.
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
from .param_group import CommContext, OwnedParamGroup, OwnedState
from .reduction import Reductions


class HookContext:
    """What the hooks of a model share: the modules' order, and the reductions under way.

    Attributes:
        reduce_grads: whether a backward pass sends gradients to the owners; if not they add up on each rank.
        hooks: those of each module, in the order of the forward pass.
    """

    def __init__(self, comm: CommContext) -> None:
        self.reductions = Reductions(comm)
        self.reduce_grads = True
        self.hooks: list[ModuleHooks] = []
        self._last_forward = -1
        self._backward: int | None = None
        # Autograd alone has what it will call at the end, so that it is gone with a pass that raised.
        self._end_of_backward: Callable[[], object] = lambda: None

    def enter_forward(self, index: int) -> None:
        """Before the forward of module `index`, free what others have left and nobody will use."""
        # No backward pass is running now. One that ended well has said so.
        if self._backward is not None:
            self._forget_backward()
        # An earlier forward that failed, or took another way, left a group on its way, and one whose backward did not
        # come kept its last. A lower index than the last tells of a new forward, in which even the expected group may
        # hold old weights.
        new_forward, self._last_forward = index <= self._last_forward, index
        for hooks in self.hooks:
            if hooks.group.state is OwnedState.UNSHARDING and (new_forward or hooks.index != index):
                hooks.group.reshard()

    def _forget_backward(self) -> None:
        """After a backward pass that raised: what it left would be counted into the next one's gradients."""
        self._backward = None
        self.reductions.discard()
        for hooks in self.hooks:
            hooks.in_backward = hooks.awaits_backward = False
            for param in hooks.group.trained:
                param.discard_unsharded_grads()
            # Kept for the rest of that pass, it may be older than an update in between.
            hooks.group.reshard()

    def prefetch_forward(self, index: int) -> None:
        """Start unsharding what comes after module `index`."""
        if index + 1 < len(self.hooks):
            self.hooks[index + 1].group.unshard()

    def prefetch_backward(self, index: int) -> None:
        """Start unsharding what comes before module `index`, if its backward is still to come."""
        if index > 0 and self.hooks[index - 1].awaits_backward:
            self.hooks[index - 1].group.unshard()

    def enter_backward(self) -> None:
        """Have this backward pass, which has reached some module, tidied up at its end."""
        # By its number and not by a flag: one that raised never came to its end, and the flag would stay set.
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
        # A module whose inputs need no gradient, such as the first, has no other end. In the order of backward, as the
        # reductions of all ranks have to match.
        for hooks in reversed(self.hooks):
            if hooks.in_backward:
                hooks.post_backward()
        self.reductions.finish()
        # Kept or prefetched for a backward that did not come, as the module had no part in this loss.
        for hooks in self.hooks:
            hooks.group.reshard()
            hooks.awaits_backward = False

    @property
    def unsharded_bytes(self) -> int:
        """Bytes that unsharded parameters take now."""
        return sum(hooks.group.unsharded_bytes for hooks in self.hooks)


class ModuleHooks:
    """The hooks that have a param group unsharded when its module computes.

    Args:
        module: module whose forward uses the group.
        group: parameters of the module.
        context: what it shares with the modules before and after it.
        policy: dtypes, as FSDP2 takes them.
        reshard_after_forward: whether the group is freed between forward and backward; None frees all but the last.
        divide_factor: number that sums of gradients are divided by.

    Attributes:
        index: place in the order of the forward pass.
        awaits_backward: between its forward and its backward.
        in_backward: between the first gradient of its output and those of its inputs.
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
        # After an exception too, or the copies would outlive the weights.
        module.register_forward_hook(self._post_forward, always_call=True)

    # torch.compile would trace the swap of parameters and the collectives into the graph of the module.
    @torch.compiler.disable
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if private.backward_pass() is None:
            self._context.enter_forward(self.index)
        self.group.unshard()
        self.group.wait_for_unshard()
        # A forward within backward is activation checkpointing: the way is backwards there, and what comes after this
        # module has had its turn.
        if private.backward_pass() is None:
            self._context.prefetch_forward(self.index)
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
        # Recomputed within backward, the parameters are about to be used: they stay, and the outer graph has its hook.
        if private.backward_pass() is None:
            differentiable = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if differentiable:
                # `any`: the first gradient of several outputs already needs the weights, and one may never come.
                register_multi_grad_hook(differentiable, self._pre_backward, mode="any")
                self.awaits_backward = True
            # With no backward to free it, a group that is kept would be stale after the next update.
            if self._reshard_after_forward or not differentiable:
                self.group.reshard()
            elif self._reshard_after_forward is None:
                self._leave_for_backward()
        return _cast(output, self._policy.output_dtype)

    def _leave_for_backward(self) -> None:
        # The backward of the last module comes next: what is freed now would be gathered again at once, with nothing to
        # compute meanwhile. Out of use, as every forward gathers the weights that there are then.
        if self.index + 1 == len(self._context.hooks):
            self.group.keep()
        else:
            self.group.reshard()

    @torch.compiler.disable
    def _pre_backward(self, gradient: Tensor) -> None:
        self._context.enter_backward()
        self.in_backward = True
        self.group.unshard()
        self.group.wait_for_unshard()
        self._context.prefetch_backward(self.index)

    @torch.no_grad()
    def post_backward(self) -> None:
        """Take the gradients of this module, send them to the owners, and reshard."""
        self._context.enter_backward()
        self.in_backward = self.awaits_backward = False
        # None is the dtype of the unsharded parameter on every torch; FSDP2 itself reduces in the parameter's own dtype
        # from 2.15 on.
        reduces, dtype = self._context.reduce_grads, self._policy.reduce_dtype
        for param in self.group.trained:
            # Sums over microbatches are kept in the reduce dtype; one that is sent at once is cast on its way.
            param.accumulate_unsharded_grad(None if reduces else dtype)
        # Before the reduction allocates its input: the two never add to the peak.
        self.group.reshard()
        if reduces:
            self._context.reductions.start(self.group, dtype, self._divide_factor)


class _PostBackward(torch.autograd.Function):
    """The identity on a module's inputs; its backward runs when all gradients of the module's weights are there."""

    # On the inputs and not on the weights: a frozen weight has no gradient, and the last one of several is not known.
    @staticmethod
    def forward(ctx: Any, post_backward: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.post_backward = post_backward
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.post_backward()
        return None, *gradients


def refuse_use_while_owned(module: nn.Module, group: OwnedParamGroup) -> None:
    """Have a module raise ValueError when it computes while the param group that its parameters are of is not there."""

    def check_unsharded(*_: object) -> None:
        # An owned parameter has the whole's shape everywhere: the product would fail far from here, with other words.
        if group.state is not OwnedState.UNSHARDED:
            raise ValueError(
                f"{type(module).__name__}: its owned parameters are there only within the forward of {group.name}, "
                "which was given to own(); call that module, or own this one by itself"
            )

    module.register_forward_pre_hook(check_unsharded)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """All floating-point tensors of a tree in `dtype`, or as they are for None."""
    if dtype is None:
        return tree
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
