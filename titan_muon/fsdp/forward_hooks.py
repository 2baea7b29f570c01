"""Hooks that have a model's forward apply what Muon's step has left, each layer's before FSDP2 all-gathers it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..features.late import LateApplies
from ..muon import Muon
from ..options import OptionError
from .private import GatheredGroup, own_groups, prefetched_groups


class _Layer:
    """An FSDP module before its forward.

    Args:
        module: whose forward it is.
        outer: FSDP modules that it is a part of.
        deferred: the updates that are left.
    """

    # Not Muon itself: a model would keep it, and its momentum, when it is closed and another is built.

    def __init__(self, module: FSDPModule, outer: Sequence[FSDPModule], deferred: LateApplies) -> None:
        self._module, self._outer, self._deferred = module, outer, deferred
        self._count = 0

    def update(self, *_: Any) -> None:
        """Have the weights updated that FSDP2 reads next."""
        if self._count == self._deferred.count and not self._deferred.left:
            return
        self._count = self._deferred.count
        own = own_groups(self._module)
        for module in (self._module, *self._outer):
            self._check(own_groups(module))
        # The computing stream too: it is about to wait for the all-gather, which waits for this.
        streams = [stream for group in own for stream in (group.computing_stream(), group.reading_stream())]
        self._deferred.finish(_params(own), streams)
        for group in prefetched_groups(self._module):
            self._deferred.finish(group.params(), [group.reading_stream()])

    def _check(self, groups: Iterable[GatheredGroup]) -> None:
        for group in groups:
            if group.is_gathered and self._deferred.waits(group.params()):
                raise ValueError(
                    f"{group.name}: was all-gathered before its update was applied, by unshard() or a method of "
                    "register_fsdp_forward_method; call finish_step() of Muon before that, and reshard() of the module "
                    "now, or set overlap = 'none'"
                )


def _params(groups: Iterable[GatheredGroup]) -> list[Tensor]:
    return [param for group in groups for param in group.params()]


def apply_in_forward(model: nn.Module, muon: Muon) -> None:
    """Have the model's forward apply what Muon's step leaves to it, by `overlap = "forward"`.

    The results of the step's last rounds, and their updates, are awaited by each layer of the next forward before FSDP2
    all-gathers its weights. State dicts of the model and of Muon, and the next step, have all of them first. Whatever
    else reads or writes weights between a step and the forward behind it calls `muon.finish_step()`: an average of
    weights, in a hook behind the step too, `unshard()`, a method of `register_fsdp_forward_method`, a pipeline schedule
    that unshards. All ranks call this once, after `fully_shard` and after Muon is built.

    Args:
        model: sharded by `fully_shard`, with all of Muon's parameters.
        muon: built with `overlap = "forward"`.

    Raises:
        ValueError: if Muon leaves nothing to a forward, or this was called for it, and for parameters that are in no
            module of `fully_shard`.
    """
    deferred = late_applies(muon)
    if deferred is None:
        raise ValueError("apply_in_forward: Muon's step leaves nothing to a forward; build it with overlap = 'forward'")
    if deferred.attached:
        raise ValueError("apply_in_forward: was called for this Muon before; call it once")
    trained = {param: fqn for group in muon.param_groups for fqn, param in _named(group)}
    if muon.plan.buckets:
        _check_gathered(model, trained)
    modules = _sharded(model)
    for name, module in modules.items():
        outer = [modules[other] for other in modules if other != name and _is_within(name, other)]
        assert isinstance(module, nn.Module), "FSDPModule is a class that modules have besides their own"
        # Before FSDP2's own hook, and as that one not in what is compiled of the module.
        hook = torch.compiler.disable(_Layer(module, outer, deferred).update)
        module.register_forward_pre_hook(hook, prepend=True)
    for part in model.modules():
        if any(param in trained for param in part.parameters(recurse=False)):
            part.register_state_dict_pre_hook(lambda *_: deferred.flush())
            part.register_load_state_dict_pre_hook(lambda *_: deferred.flush())
    deferred.attached = True


def late_applies(muon: Muon) -> LateApplies | None:
    """The updates that Muon's steps leave to a forward; None unless `overlap = "forward"`."""
    return next((feature for feature in muon.engine.features if isinstance(feature, LateApplies)), None)


def _check_gathered(model: nn.Module, trained: Mapping[Tensor, str]) -> None:
    """Raise OptionError for the first parameters, by their names, that are in no FSDP module of the model."""
    gathered = {param for module in _sharded(model).values() for param in _params(own_groups(module))}
    if outside := [fqn for param, fqn in trained.items() if param not in gathered]:
        raise OptionError(
            "overlap",
            f"= 'forward' takes parameters that FSDP2 all-gathers, and {', '.join(outside[:5])} are in no module of "
            "fully_shard: nothing tells when a forward reads them; shard the model by fully_shard, or set 'none'",
        )


def _sharded(model: nn.Module) -> dict[str, FSDPModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def _named(group: Mapping[str, Any]) -> Iterable[tuple[str, Tensor]]:
    return zip(group["param_names"], group["params"], strict=True)


def _is_within(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")
