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
from ..options import Owner, PlacementRule, Split
from ..plan.cost import standard_flops
from ..plan.ownership import OwnedItem, Ownership, assign_owners, load_lines
from ..plan.types import MatrixStack
from .hooks import HookContext
from .param import ParamModuleInfo, is_owned, owner_mesh
from .param_group import CommContext
from .rules import check_rules, placed

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
            each replica. For one owner among all replicas give the flattened mesh. For stacks under expert parallelism
            the mesh whose ranks hold the same experts.
        params: parameters to own where no rule matches, or for each how its owners are found; by default every matrix
            of the model. Of a stack of matrices along dim 0 several ranks own some each.
        rules: rules on names; the first that matches decides, for any parameter of the model.
        split: rules for parameters that are several matrices, or not 2D, see `options.Split`.
        flops: FLOPs of orthogonalizing a matrix of (rows, columns), for the balance; by default five standard steps.
        elementwise: parameters that AdamW or the like takes, whose bytes alone are balanced; all vectors are.

    Attributes:
        ownership: owners of each parameter, ranks of the shard axis.
        traffic: bytes and calls that were sent from this rank to gather and reduce.

    Raises ValueError for a parameter that is tied, owned or sharded already, no matrix, or not the model's, for a mesh
    that this rank is not in, for a rule that matches nothing, and for an owner that is no rank.
    """

    ownership: Ownership

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: DeviceMesh,
        params: Iterable[nn.Parameter] | Mapping[nn.Parameter, Owner] | None = None,
        rules: Sequence[PlacementRule] = (),
        split: Sequence[Split] = (),
        flops: FlopCount = FIVE_STANDARD_STEPS,
        elementwise: Iterable[nn.Parameter] = (),
    ) -> None:
        self.comm = CommContext.of(mesh)
        self.traffic = self.comm.collectives.traffic
        self.context = HookContext(self.comm)
        places = _places(model)
        choices = _choices(places, params, rules)
        found = {fqn: each for each in places.values() for fqn, _ in each}
        self.infos: Mapping[str, ParamModuleInfo] = {fqn: _only_place(found[fqn]) for fqn in choices}
        # All at once, before any is owned: balanced module by module, the first ranks would get the most of each.
        items, weighed_alone = [], set(elementwise)
        named = choices.keys() if isinstance(params, Mapping) else placed(choices, (), rules).keys()
        for fqn, owner in choices.items():
            parameter = self.infos[fqn].param
            _check_ownable(fqn, parameter, mesh, split, named=fqn in named)
            counted = None if parameter in weighed_alone or parameter.ndim < 2 else flops
            items.append(_item(fqn, parameter, owner, split, counted))
        if not items:
            raise ValueError("there is nothing to own: the model has no matrix; give params, or use fully_shard alone")
        self.ownership = assign_owners(items, self.comm.shard_size)

    def owners(self, fqn: str) -> tuple[int, ...]:
        """The ranks of the shard axis that own a parameter, in the order in which they divide its dim 0."""
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


Places = Mapping[nn.Parameter, Sequence[tuple[str, ParamModuleInfo]]]
"""Names and modules of each parameter; a tied one has several."""


def _places(model: nn.Module) -> Places:
    found: dict[nn.Parameter, list[tuple[str, ParamModuleInfo]]] = {}
    # With duplicates: a tied parameter would be swapped for its unsharded one in one of its modules alone.
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            fqn = _plain_name(f"{prefix}.{name}" if prefix else name)
            found.setdefault(parameter, []).append((fqn, ParamModuleInfo(module, name)))
    return found


def _choices(
    places: Places,
    params: Iterable[nn.Parameter] | Mapping[nn.Parameter, Owner] | None,
    rules: Sequence[PlacementRule],
) -> dict[str, Owner]:
    """How the owners of each owned parameter are found, by its name."""
    chosen = {p for p in places if p.ndim == 2} if params is None else set(params)
    strangers = [tuple(parameter.shape) for parameter in chosen if parameter not in places]
    if strangers:
        raise ValueError(f"params has parameters that the model does not have, of shapes {strangers}")
    names = {fqn: parameter for parameter, found in places.items() for fqn, _ in found}
    given = params if isinstance(params, Mapping) else {}
    check_rules(names, rules)
    owners = placed(names, {fqn for fqn, parameter in names.items() if parameter in chosen}, rules)
    return {fqn: given.get(names[fqn], owner) for fqn, owner in owners.items()}


def _only_place(found: Sequence[tuple[str, ParamModuleInfo]]) -> ParamModuleInfo:
    """Where a parameter is. Raises ValueError for one that is in several places."""
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise ValueError(f"{names} are one tied parameter, which cannot be owned; leave it to fully_shard")
    return found[0][1]


def _plain_name(fqn: str) -> str:
    """A parameter's name without wrappers."""
    for wrapper in WRAPPERS:
        fqn = fqn.replace(wrapper, "")
    return fqn


def _item(fqn: str, parameter: Tensor, owner: Owner, split: Sequence[Split], flops: FlopCount | None) -> OwnedItem:
    """What a parameter weighs; without `flops`, its bytes alone."""
    held = local(parameter)
    size = held.numel() * parameter.element_size()
    if flops is None:
        return OwnedItem(fqn, layer_of(fqn), 0, size, owner=owner)
    stack = stack_of(fqn, parameter.shape, split)
    columns = prod(parameter.shape[stack.row_dims :])
    rows = [sum(stop - start for start, stop in block.rows) for block in stack.matrices]
    cost = sum(flops(height, columns) for height in rows)
    if not _is_stack(parameter, stack):
        return OwnedItem(fqn, layer_of(fqn), cost, size, owner=owner)
    # Of a stack that expert parallelism has cut, this rank and its peers divide what is theirs.
    return OwnedItem(fqn, layer_of(fqn), cost * len(held) // len(parameter), size, len(held), owner)


def _is_stack(parameter: Tensor, stack: MatrixStack) -> bool:
    """Whether no matrix of a parameter has rows of two of its slices along dim 0."""
    height = prod(parameter.shape[1 : stack.row_dims])
    return stack.row_dims > 1 and all(
        matrix.rows[0].start // height == (matrix.rows[-1].stop - 1) // height for matrix in stack.matrices
    )


def _check_ownable(fqn: str, parameter: Tensor, mesh: DeviceMesh, split: Sequence[Split], *, named: bool) -> None:
    """Raise ValueError for a parameter that cannot be owned. With `named`, it was asked for by itself."""
    if is_owned(parameter):
        raise ValueError(f"{fqn}: owned already; own every module once")
    if parameter.ndim == 0:
        raise ValueError(f"{fqn}: a scalar has nothing to divide; leave it to fully_shard")
    if not named and parameter.ndim not in (2, 3) and not any(fnmatch.fnmatchcase(fqn, s.match) for s in split):
        raise ValueError(
            f"{fqn}: shape {tuple(parameter.shape)} is no matrix; leave it to fully_shard, say with split how it is "
            "read, or name it in a placement rule"
        )
    _check_not_sharded(fqn, parameter, mesh)


def _check_not_sharded(fqn: str, parameter: Tensor, mesh: DeviceMesh) -> None:
    if not isinstance(parameter, DTensor):
        return
    # The owner's mesh is made of slices of one mesh, so what tensor parallelism gives can be joined with the
    # data-parallel one, and what FSDP2 gives, which has that axis already, cannot.
    try:
        owner_mesh(mesh, parameter.device_mesh, [0])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{fqn}: is placed on {parameter.device_mesh}, which cannot be joined with the data-parallel {mesh}; "
            "call own() before fully_shard, and give fully_shard what it returns as ignored_params"
        ) from error
