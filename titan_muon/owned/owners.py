"""Who owns which parameter of a model, decided once for the whole model, and the places where it is used."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..dtensor import layer_of, local
from ..matrices import stack_of
from ..options import Split
from ..plan.cost import standard_flops
from ..plan.ownership import OwnedItem, Ownership, assign_owners, load_lines
from .hooks import HookContext
from .param import ParamModuleInfo, is_owned, owner_mesh
from .param_group import CommContext

FlopCount = Callable[[int, int], int]
"""FLOPs of orthogonalizing a matrix of (rows, columns)."""

FIVE_STANDARD_STEPS: FlopCount = partial(standard_flops, steps=5)

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and torch.compile add to names."""


class Owners:
    """The owner of each parameter that is to be stored whole on one rank, balanced over a model.

    Longest processing time first, by the FLOPs of Newton-Schulz within a limit of bytes; the matrices of a layer are
    spread over ranks. Deterministic: every rank comes to the same result without communicating.

    Args:
        model: all modules that will be owned, after tensor parallelism, activation checkpointing and torch.compile, and
            before `fully_shard` takes the same parameters. It may be on the meta device.
        mesh: data-parallel mesh as `fully_shard` takes it: (shard,), or (replicate, shard) for HSDP with an owner in
            each replica. For one owner among all replicas give the flattened mesh.
        params: parameters to own; by default every matrix of the model.
        split: rules for parameters that are several matrices, or not 2D, see `options.Split`.
        flops: FLOPs of orthogonalizing a matrix of (rows, columns), for the balance; by default five standard steps.

    Attributes:
        ownership: owner of each parameter, a rank of the shard axis.
        traffic: bytes and calls that were sent from this rank to gather and reduce.

    Raises ValueError for a parameter that is tied, owned or sharded already, no matrix, or not the model's, and for a
    mesh that this rank is not in.
    """

    ownership: Ownership

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: DeviceMesh,
        params: Iterable[nn.Parameter] | None = None,
        split: Sequence[Split] = (),
        flops: FlopCount = FIVE_STANDARD_STEPS,
    ) -> None:
        self.comm = CommContext.of(mesh)
        self.traffic = self.comm.collectives.traffic
        self.context = HookContext(self.comm)
        self.infos: Mapping[str, ParamModuleInfo] = _module_infos(model, params)
        # All at once, before any is owned: balanced module by module, the first ranks would get the most of each.
        items = [_item(fqn, info.param, mesh, split, flops) for fqn, info in self.infos.items()]
        if not items:
            raise ValueError("there is nothing to own: the model has no matrix; give params, or use fully_shard alone")
        self.ownership = assign_owners(items, self.comm.shard_size)

    def owner(self, fqn: str) -> int:
        """The rank of the shard axis that owns a parameter."""
        return self.ownership.owners[[item.fqn for item in self.ownership.items].index(fqn)]

    def within(self, module: nn.Module) -> dict[str, ParamModuleInfo]:
        """The parameters of `module` that have an owner and are not yet there."""
        inside = set(module.modules())
        return {fqn: info for fqn, info in self.infos.items() if info.module in inside and not is_owned(info.param)}

    def set_requires_gradient_sync(self, reduces: bool) -> None:
        """Whether the next backward passes send gradients to the owners, as FSDP2's method of that name.

        With False they add up on each rank, in the reduce dtype, until a pass that does.
        """
        self.context.reduce_grads = reduces

    def table(self) -> str:
        """Who owns how much: a line for each rank of the shard axis."""
        return "\n".join(load_lines(dict(enumerate(self.ownership.loads()))))


def _module_infos(model: nn.Module, params: Iterable[nn.Parameter] | None) -> dict[str, ParamModuleInfo]:
    """Where each chosen parameter is, by its name. Raises ValueError for one that is tied or not there."""
    found: dict[nn.Parameter, list[tuple[str, ParamModuleInfo]]] = {}
    # With duplicates: a tied parameter would be swapped for its unsharded one in one of its modules alone.
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            fqn = _plain_name(f"{prefix}.{name}" if prefix else name)
            found.setdefault(parameter, []).append((fqn, ParamModuleInfo(module, name)))
    chosen = {p for p in found if p.ndim == 2} if params is None else set(params)
    strangers = [tuple(parameter.shape) for parameter in chosen if parameter not in found]
    if strangers:
        raise ValueError(f"params has parameters that the model does not have, of shapes {strangers}")
    infos: dict[str, ParamModuleInfo] = {}
    for parameter, places in found.items():
        if parameter not in chosen:
            continue
        if len(places) > 1:
            names = ", ".join(fqn for fqn, _ in places)
            raise ValueError(f"{names} are one tied parameter, which cannot be owned; leave it to fully_shard")
        infos.update(places)
    return infos


def _plain_name(fqn: str) -> str:
    """A parameter's name without wrappers."""
    for wrapper in WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def _item(fqn: str, parameter: Tensor, mesh: DeviceMesh, split: Sequence[Split], flops: FlopCount) -> OwnedItem:
    if is_owned(parameter):
        raise ValueError(f"{fqn}: owned already; own every module once")
    if parameter.ndim != 2 and not any(fnmatch.fnmatchcase(fqn, s.match) for s in split):
        raise ValueError(
            f"{fqn}: shape {tuple(parameter.shape)} is no matrix; leave it to fully_shard (Shard(0) keeps experts "
            "whole), or say with split how it is read"
        )
    _check_not_sharded(fqn, parameter, mesh)
    stack = stack_of(fqn, parameter.shape, split)
    columns = prod(parameter.shape[stack.row_dims :])
    cost = sum(flops(*matrix.shape(columns)) for matrix in stack.matrices)
    return OwnedItem(fqn, layer_of(fqn), cost, local(parameter).numel() * parameter.element_size())


def _check_not_sharded(fqn: str, parameter: Tensor, mesh: DeviceMesh) -> None:
    if not isinstance(parameter, DTensor):
        return
    # The owner's mesh is made of slices of one mesh, so what tensor parallelism gives can be joined with the
    # data-parallel one, and what FSDP2 gives, which has that axis already, cannot.
    try:
        owner_mesh(mesh, parameter.device_mesh, 0)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{fqn}: is placed on {parameter.device_mesh}, which cannot be joined with the data-parallel {mesh}; "
            "call own() before fully_shard, and give fully_shard what it returns as ignored_params"
        ) from error
