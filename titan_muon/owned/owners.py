"""Who owns which parameter of a model, decided once for the whole model, and the places where it is used."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..dtensor import layer_of, local
from ..exchange import Collectives
from ..matrices import stack_of
from ..options import Split
from ..plan.cost import standard_flops
from ..plan.ownership import OwnedItem, Ownership, assign_owners, load_lines
from .hooks import Passes
from .param import is_owned, owner_mesh
from .param_group import Group

FlopCount = Callable[[int, int], int]
"""FLOPs of orthogonalizing a matrix of (rows, columns)."""

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and torch.compile add to names."""


@dataclass(frozen=True)
class Site:
    """Where a parameter is: an attribute of a module."""

    module: nn.Module
    name: str


class Owners:
    """The owner of each parameter that is to rest whole on one rank, balanced over a model.

    Longest processing time first, by the FLOPs of Newton-Schulz within a limit of bytes; the matrices of a layer are
    spread over ranks. Deterministic: every rank comes to the same result without talking.

    Args:
        model: all modules that will be owned, after tensor parallelism, activation checkpointing and torch.compile, and
            before `fully_shard` takes the same parameters. It may be on the meta device.
        mesh: the data-parallel mesh as `fully_shard` takes it: (shard,), or (replicate, shard) for HSDP with an owner
            in each replica. For one owner among all replicas give the flattened mesh.
        params: the parameters to own; by default every matrix of the model.
        split: which parameters are several matrices, or not 2D, see `matrices.Split`.
        flops: of orthogonalizing a matrix of (rows, columns), for the balance; by default five standard steps.

    Attributes:
        ownership: who owns what, by rank of the shard axis.
        traffic: what has been sent from this rank to gather and reduce.

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
        flops: FlopCount | None = None,
    ) -> None:
        self.group = _group(mesh)
        self.collectives = Collectives()
        self.traffic = self.collectives.traffic
        self.passes = Passes(self.group, self.collectives)
        self.sites: Mapping[str, Site] = _sites(model, params)
        counted = _five_standard_steps if flops is None else flops
        items = [_item(fqn, site, mesh, split, counted) for fqn, site in self.sites.items()]
        if not items:
            raise ValueError("there is nothing to own: the model has no matrix; give params, or use fully_shard alone")
        self.ownership = assign_owners(items, self.group.size)

    def owner(self, fqn: str) -> int:
        """The rank of the shard axis that owns a parameter."""
        return self.ownership.owners[[item.fqn for item in self.ownership.items].index(fqn)]

    def within(self, module: nn.Module) -> dict[str, Site]:
        """The parameters of `module` that have an owner and are not yet at rest there."""
        inside = set(module.modules())
        return {
            fqn: site
            for fqn, site in self.sites.items()
            if site.module in inside and not is_owned(getattr(site.module, site.name))
        }

    def set_requires_gradient_sync(self, reduces: bool) -> None:
        """Whether the next backward passes send gradients to the owners, as FSDP2's method of that name.

        With False they add up on each rank, in the reduce dtype, until a pass that does.
        """
        self.passes.reduces = reduces

    def table(self) -> str:
        """Who owns how much: a line for each rank of the shard axis."""
        return "\n".join(load_lines(dict(enumerate(self.ownership.loads()))))


def _group(mesh: DeviceMesh) -> Group:
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh has {mesh.ndim} axes; give (shard,) or (replicate, shard), as to fully_shard")
    if mesh.get_coordinate() is None:
        ranks = mesh.mesh.flatten().tolist()
        raise ValueError(f"this rank is not in the mesh {ranks}: it can neither own parameters there nor use them")
    shard = mesh.get_group(mesh.ndim - 1)
    return Group(
        mesh=mesh,
        shard=shard,
        replicate=mesh.get_group(0) if mesh.ndim == 2 else None,
        rank=mesh.get_local_rank(mesh.ndim - 1),
        size=mesh.size(mesh.ndim - 1),
        total=mesh.size(),
    )


def _sites(model: nn.Module, params: Iterable[nn.Parameter] | None) -> dict[str, Site]:
    """Where each chosen parameter is, by its name. Raises ValueError for one that is tied or not there."""
    found: dict[nn.Parameter, list[tuple[str, Site]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            fqn = plain_name(f"{prefix}.{name}" if prefix else name)
            found.setdefault(parameter, []).append((fqn, Site(module, name)))
    chosen = {p for p in found if p.ndim == 2} if params is None else set(params)
    strangers = [tuple(parameter.shape) for parameter in chosen if parameter not in found]
    if strangers:
        raise ValueError(f"params has parameters that the model does not have, of shapes {strangers}")
    sites: dict[str, Site] = {}
    for parameter, places in found.items():
        if parameter not in chosen:
            continue
        if len(places) > 1:
            names = ", ".join(fqn for fqn, _ in places)
            raise ValueError(f"{names} are one tied parameter, which cannot be owned; leave it to fully_shard")
        sites.update(places)
    return sites


def plain_name(fqn: str) -> str:
    """A parameter's name without wrappers."""
    for wrapper in WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def _five_standard_steps(rows: int, cols: int) -> int:
    return standard_flops(rows, cols, 5)


def _item(fqn: str, site: Site, mesh: DeviceMesh, split: Sequence[Split], flops: FlopCount) -> OwnedItem:
    parameter = getattr(site.module, site.name)
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
    rows = [sum(stop - start for start, stop in block.rows) for block in stack.matrices]
    cost = sum(flops(height, columns) for height in rows)
    return OwnedItem(fqn, layer_of(fqn), cost, local(parameter).numel() * parameter.element_size())


def _check_not_sharded(fqn: str, parameter: Tensor, mesh: DeviceMesh) -> None:
    if not isinstance(parameter, DTensor):
        return
    try:
        owner_mesh(mesh, parameter.device_mesh, 0)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{fqn}: rests on {parameter.device_mesh}, which has no place beside the data-parallel {mesh}; call own() "
            "before fully_shard, and give fully_shard what it returns as ignored_params"
        ) from error


def use_device(mesh: DeviceMesh) -> torch.device:
    """Where parameters of a mesh are used."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
