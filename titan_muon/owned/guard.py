"""Refuses to read nothing: PyTorch gives an empty tensor, without a word, to ranks that have no part of a DTensor."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from .param import holders, is_owned
from .param_group import Unit


def guard(tensor: Any, fqn: str) -> None:
    """Have `full_tensor` and `redistribute` of an owned tensor raise ValueError on ranks that have no part of it."""
    if isinstance(tensor, DTensor) and is_owned(tensor) and tensor.device_mesh.get_coordinate() is None:
        refuse = partial(_refuse, fqn, holders(tensor))
        tensor.full_tensor = refuse  # type: ignore[method-assign]
        tensor.redistribute = refuse  # type: ignore[method-assign]


def guard_state_dict(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Guard the entries of a module's state dict, and its parameters at rest."""
    for parameter in unit.parameters:
        guard(parameter.rest, parameter.fqn)
    for name, _ in module.named_parameters(recurse=False):
        if prefix + name in state_dict:
            guard(state_dict[prefix + name], prefix + name)


def _refuse(fqn: str, ranks: tuple[int, ...], *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{fqn} rests whole on rank {', '.join(map(str, ranks))} and this rank has nothing of it; read it on all ranks "
        "with titan_muon.owned.gather(tensor), and a whole model with titan_muon.owned.full_state_dict(model)"
    )
