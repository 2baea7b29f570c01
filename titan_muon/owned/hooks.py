"""Forward and backward passes over units: when each is gathered, when its gradients are reduced, and when it is freed.

A unit is gathered before the forward of its module and freed after it, gathered again when the first gradient of the
module's output is there, and reduced and freed when the gradients of its inputs are. The neighbour that comes next is
already on its way. Freeing with the last gradient of a weight instead would be too early: a frozen weight has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..exchange import Collectives
from . import private
from .param_group import Group, State, Unit
from .reduction import Reductions


class Passes:
    """What the units of a model share: their order, and the reductions under way.

    Attributes:
        reduces: whether a backward pass sends gradients to the owners; if not they add up on each rank.
        stations: the modules, in the order of the forward pass.
    """

    def __init__(self, group: Group, collectives: Collectives) -> None:
        self.reductions = Reductions(group, collectives)
        self.reduces = True
        self.stations: list[Station] = []
        self._last = -1
        self._running: int | None = None

    def append(self, station: Station) -> int:
        """Add the next module of the forward pass. Returns its number."""
        self.stations.append(station)
        return len(self.stations) - 1

    def prefetch_forward(self, number: int) -> None:
        """Start gathering what comes after module `number`; free what an earlier pass expected and did not reach."""
        anew, self._last = number <= self._last, number
        for station in self.stations:
            if station.unit.state is State.COMING and (anew or station.number != number + 1):
                station.unit.reshard()
        if number + 1 < len(self.stations):
            self.stations[number + 1].unit.prefetch()

    def prefetch_backward(self, number: int) -> None:
        """Start gathering what comes before module `number`, if its backward is still to come."""
        if number > 0 and self.stations[number - 1].awaits_backward:
            self.stations[number - 1].unit.prefetch()

    def enter_backward(self) -> None:
        """Have this backward pass, which has reached a first unit, tidied up at its end."""
        current = private.backward_pass()
        if current != self._running:
            self._running = current
            private.at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._running = None
        for station in reversed(self.stations):
            if station.in_backward:
                station.end_backward()
        self.reductions.finish()
        for station in self.stations:
            station.unit.reshard()
            station.awaits_backward = False

    @property
    def live_bytes(self) -> int:
        """Bytes that unsharded parameters take now."""
        return sum(station.unit.live_bytes for station in self.stations)


class Station:
    """A module with a unit: the hooks that have the unit there when the module computes.

    Args:
        module: whose forward uses the unit.
        policy: dtypes, as FSDP2 takes them.
        keeps: whether the unit stays gathered from forward to backward.
        divisor: what sums of gradients are divided by.

    Attributes:
        awaits_backward: between its forward and its backward.
        in_backward: between the first gradient of its output and those of its inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        unit: Unit,
        passes: Passes,
        policy: MixedPrecisionPolicy,
        *,
        keeps: bool,
        divisor: float,
    ) -> None:
        self.unit = unit
        self.awaits_backward = self.in_backward = False
        self._passes, self._policy, self._keeps, self._divisor = passes, policy, keeps, divisor
        self.number = passes.append(self)
        module.register_forward_pre_hook(self._pre_forward, with_kwargs=True)
        # After an exception too, or the copies would outlive the weights.
        module.register_forward_hook(self._post_forward, always_call=True)

    @torch.compiler.disable
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.unit.unshard()
        if private.backward_pass() is None:
            self._passes.prefetch_forward(self.number)
        if self._policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), self._policy.param_dtype)
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, structure = tree_flatten((args, kwargs))
        marked = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if marked:
            outputs = _InputsDone.apply(self.end_backward, *(leaves[i] for i in marked))
            for i, output in zip(marked, outputs, strict=True):
                leaves[i] = output
        return tree_unflatten(leaves, structure)

    @torch.compiler.disable
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if private.backward_pass() is None:
            differentiable = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if differentiable:
                register_multi_grad_hook(differentiable, self._pre_backward, mode="any")
                self.awaits_backward = True
            if not (self._keeps and differentiable):
                self.unit.reshard()
        return _cast(output, self._policy.output_dtype)

    @torch.compiler.disable
    def _pre_backward(self, gradient: Tensor) -> None:
        self._passes.enter_backward()
        self.in_backward = True
        self.unit.unshard()
        self._passes.prefetch_backward(self.number)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Take the gradients of this module, send them to the owners, and free the parameters."""
        self._passes.enter_backward()
        self.in_backward = self.awaits_backward = False
        reduces, dtype = self._passes.reduces, self._policy.reduce_dtype
        for parameter in self.unit.trained():
            parameter.take_gradient(None if reduces else dtype)
        self.unit.reshard()
        if reduces:
            self._passes.reductions.start(self.unit, dtype, self._divisor)


class _InputsDone(torch.autograd.Function):
    """The identity on a module's inputs; its backward runs when the module's own is over."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.done()
        return None, *gradients


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """All floating-point tensors of a tree in `dtype`, or as they are for None."""
    if dtype is None:
        return tree
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
