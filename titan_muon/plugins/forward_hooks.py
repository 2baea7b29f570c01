"""Forward hooks to apply late updates before FSDP2 all-gathers a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..engine.tensors.names import listed, named_parameters
from ..features.forward import ForwardUpdates
from ..features.private import GatheredGroup, own_groups, prefetched_groups
from ..muon import Muon
from ..options import OptionError


def _pre_forward(module: FSDPModule, outer: Sequence[FSDPModule], deferred: ForwardUpdates) -> Callable[..., None]:
    """The forward pre-hook of an FSDP module.

    `outer`: FSDP modules around the module. `deferred`: not the Muon object, because hooks would keep a closed
    optimizer and its momentum alive.
    """
    applied = 0

    def pre_forward(*_: Any) -> None:
        nonlocal applied
        if applied == deferred.count and not deferred.holds_memory:
            return
        applied, own = deferred.count, own_groups(module)
        for group in (group for around in (module, *outer) for group in own_groups(around)):
            if group.is_gathered and deferred.waits(group.params()):
                raise ValueError(
                    f"{group.name}: was all-gathered before the update was applied, by unshard() or a method of "
                    "register_fsdp_forward_method; call finish_step() of Muon before the all-gather, and reshard() of "
                    "the module now, or set overlap = 'none'"
                )
        # The computing stream would wait for the updates anyway.
        streams = [stream for group in own for stream in (group.computing_stream(), group.reading_stream())]
        deferred.end_for(_params(own), streams)
        for group in prefetched_groups(module):
            deferred.end_for(group.params(), [group.reading_stream()])

    return pre_forward


def _params(groups: Iterable[GatheredGroup]) -> list[Tensor]:
    return [param for group in groups for param in group.params()]


def apply_in_forward(model: nn.Module, muon: Muon) -> None:
    """Make the model's forward apply the late updates of Muon's steps (`overlap = "forward"`).

    Each layer applies the updates before FSDP2 all-gathers the layer. Call `muon.finish_step()` before other code reads
    or writes weights between a step and the next forward: an average of weights (also in a step hook), `unshard()`, a
    method of `register_fsdp_forward_method`, or a pipeline schedule with unshards, but not for state dicts. All ranks
    call `apply_in_forward` once, after `fully_shard`, with a model that has all of Muon's parameters.

    Raises:
        ValueError: for a Muon without `overlap = "forward"`, for a second call, and for parameters outside of every
            `fully_shard` module.
    """
    deferred = forward_updates(muon)
    if deferred is None:
        raise ValueError("apply_in_forward: Muon has no late updates; build Muon with overlap = 'forward'")
    if deferred.attached:
        raise ValueError("apply_in_forward: was called for this Muon before; call it only once")
    trained = {parameter: fqn for fqn, parameter in named_parameters(muon.param_groups)}
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    gathered = {param for module in modules.values() for param in _params(own_groups(module))}
    if muon.plan.buckets and (outside := [fqn for param, fqn in trained.items() if param not in gathered]):
        raise OptionError(
            "overlap",
            f"= 'forward' takes parameters that FSDP2 all-gathers, and {listed(outside)} are in no module of "
            "fully_shard; shard the model by fully_shard, or set 'none'",
        )
    for name, module in modules.items():
        outer = [modules[other] for other in modules if other != name and (not other or name.startswith(f"{other}."))]
        assert isinstance(module, nn.Module), "fully_shard makes only modules an FSDPModule"
        # Before FSDP2's hook, and like that hook outside of the compiled module.
        hook = torch.compiler.disable(_pre_forward(module, outer, deferred))
        module.register_forward_pre_hook(hook, prepend=True)
    for submodule in model.modules():
        if any(param in trained for param in submodule.parameters(recurse=False)):
            submodule.register_state_dict_pre_hook(lambda *_: deferred.finish())
            submodule.register_load_state_dict_pre_hook(lambda *_: deferred.finish())
    deferred.attached = True


def forward_updates(muon: Muon) -> ForwardUpdates | None:
    """The late updates of Muon, if any."""
    overlap = muon.engine.overlap
    return overlap if isinstance(overlap, ForwardUpdates) else None
