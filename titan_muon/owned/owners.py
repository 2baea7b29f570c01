"""Who owns which parameter of a model, decided once for the whole model, and the places where it is used."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Literal, get_args

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..options import OptionError, Owner, PlacementRule, Split, check
from ..plan.owned.ownership import OwnedItem, Ownership, assign_owners, load_lines
from ..plan.terms.types import MatrixStack
from ..plan.terms.work import standard_flops
from ..tensors.dtensor import layer_of
from ..tensors.matrices import stack_of
from .hooks import HookContext
from .param import Inner, ParamModuleInfo, is_owned, owner_mesh
from .param_group import CommContext

FlopCount = Callable[[int, int], int]
"""FLOPs of orthogonalizing a matrix of (rows, columns)."""

FIVE_STANDARD_STEPS: FlopCount = partial(standard_flops, steps=5)


def cut_by_peers(parameters: Mapping[str, Tensor]) -> dict[str, DeviceMesh]:
    """The parameters that tensor parallelism cuts, each with its mesh, the same for all.

    Raises ValueError for what no single rank can hold for its peers.
    """
    found: dict[str, DeviceMesh] = {}
    for fqn, parameter in parameters.items():
        inner = Inner.of(parameter)
        if inner.mesh is None or all(placement.is_replicate() for placement in inner.placements):
            continue
        other = next(iter(found.values()), inner.mesh)
        if inner.mesh.ndim > 1 or type(inner.placements[0]) is not Shard or inner.mesh != other:
            raise ValueError(
                f"{fqn}: is placed as {inner.placements} on {inner.mesh}; tensor_parallel = 'whole' takes what "
                "Shard cuts on one mesh of one axis: leave it to 'peers'"
            )
        found[fqn] = inner.mesh
    return found


def owned_items(
    parameters: Mapping[str, Tensor],
    owners: Mapping[str, Owner],
    *,
    gathered: Mapping[str, DeviceMesh],
    split: Sequence[Split],
    flops: FlopCount,
    elementwise: Collection[Tensor],
) -> list[OwnedItem]:
    """What each parameter weighs.

    One of the peers on their mesh holds all of what is `gathered`, and then each of them a copy of everything else.
    """
    peers = next((mesh.size() for mesh in gathered.values()), 1)
    items = []
    for fqn, parameter in parameters.items():
        counted = None if parameter in elementwise or parameter.ndim < 2 else flops
        item = _item(fqn, parameter, owners[fqn], split, counted, whole=fqn in gathered)
        items.append(item if fqn in gathered else replace(item, replicas=peers))
    return items


def _item(
    fqn: str, parameter: Tensor, owner: Owner, split: Sequence[Split], flops: FlopCount | None, *, whole: bool
) -> OwnedItem:
    """What a parameter weighs, or with `whole` all pieces of it together; without `flops`, its bytes alone."""
    inner = Inner.of(parameter)
    held = parameter.shape if whole else inner.size(parameter.shape)
    size = held.numel() * parameter.element_size()
    if flops is None:
        return OwnedItem(fqn, layer_of(fqn), 0, size, owner=owner)
    stack = stack_of(fqn, parameter.shape, split)
    columns = prod(parameter.shape[stack.row_dims :])
    cost = sum(flops(*matrix.shape(columns)) for matrix in stack.matrices)
    # Pieces along dim 0 come together as a whole alone: parts of several owners have no rows of their own in a piece.
    if not _is_stack(parameter, stack) or (whole and inner.placements[0].is_shard(0)):
        return OwnedItem(fqn, layer_of(fqn), cost, size, owner=owner)
    # Of a stack that expert parallelism has cut, this rank and its peers divide what is theirs.
    return OwnedItem(fqn, layer_of(fqn), cost * held[0] // len(parameter), size, held[0], owner)


def _is_stack(parameter: Tensor, stack: MatrixStack) -> bool:
    """Whether no matrix of a parameter has rows of two of its slices along dim 0."""
    height = prod(parameter.shape[1 : stack.row_dims])
    return stack.row_dims > 1 and all(
        matrix.rows[0].start // height == (matrix.rows[-1].stop - 1) // height for matrix in stack.matrices
    )


def placed(names: Iterable[str], chosen: Collection[str], rules: Sequence[PlacementRule]) -> dict[str, Owner]:
    """How the owners of each parameter that is owned are found; `chosen` are owned where no rule matches."""
    found: dict[str, Owner] = {}
    for name in names:
        index = _first(name, rules)
        if index is None and name in chosen:
            found[name] = "balanced"
        elif index is not None and rules[index].placement == "owned":
            found[name] = rules[index].owner
    return found


def check_rules(names: Iterable[str], rules: Sequence[PlacementRule]) -> None:
    """Raise ValueError for a rule that no parameter follows, and for one that says what no rule can."""
    # A misspelt glob would otherwise leave its parameters where they were, and nothing would tell.
    used = {_first(name, rules) for name in names}
    for index, rule in enumerate(rules):
        place = f"placement.rule[{index}]"
        try:
            check(PlacementRule, vars(rule))
        except OptionError as error:
            raise ValueError(f"{place}.{error}") from error
        if index not in used:
            raise ValueError(
                f"{place}.match = {rule.match!r} matches no parameter: nothing has such a name, or rules before it "
                "match all that have; correct it, move it up or remove it"
            )
        if rule.placement == "shard0" and rule.owner != "balanced":
            raise ValueError(f"{place}.owner = {rule.owner!r}: what is sharded has no owner; set placement = 'owned'")


def _first(name: str, rules: Sequence[PlacementRule]) -> int | None:
    # fnmatchcase, not fnmatch: that one folds case on some systems, and the same rules would place otherwise there.
    return next((index for index, rule in enumerate(rules) if fnmatchcase(name, rule.match)), None)


TensorParallel = Literal["peers", "whole"]
"""Who holds a matrix that tensor parallelism cuts: each of its ranks a piece, or one of them all."""

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
        tensor_parallel: who holds what tensor parallelism cuts: with "peers" an owner's tensor-parallel ranks a piece
            each, which meet in every step; with "whole" one rank everything, so that a step communicates nothing, and
            the forward and backward passes take its pieces to those ranks and back.

    Attributes:
        ownership: owners of each parameter, ranks of the shard axis; with "whole", if anything is cut, of that axis and
            tensor parallelism together, the latter counting fastest.
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
        tensor_parallel: TensorParallel = "peers",
    ) -> None:
        if tensor_parallel not in get_args(TensorParallel):
            raise ValueError(
                f"tensor_parallel = {tensor_parallel!r} is not one of {', '.join(get_args(TensorParallel))}"
            )
        places = _places(model)
        choices = _choices(places, params, rules)
        found = {fqn: each for each in places.values() for fqn, _ in each}
        self.infos: Mapping[str, ParamModuleInfo] = {fqn: _only_place(found[fqn]) for fqn in choices}
        named = choices.keys() if isinstance(params, Mapping) else placed(choices, (), rules).keys()
        for fqn, info in self.infos.items():
            _check_ownable(fqn, info.param, mesh, split, named=fqn in named)
        parameters = {fqn: info.param for fqn, info in self.infos.items()}
        self._gathered = cut_by_peers(parameters) if tensor_parallel == "whole" else {}
        self.comm = CommContext.of(mesh, next(iter(self._gathered.values()), None))
        self.traffic = self.comm.collectives.traffic
        self.context = HookContext(self.comm)
        # All at once, before any is owned: balanced module by module, the first ranks would get the most of each.
        items = owned_items(
            parameters, choices, gathered=self._gathered, split=split, flops=flops, elementwise=set(elementwise)
        )
        if not items:
            raise ValueError("there is nothing to own: the model has no matrix; give params, or use fully_shard alone")
        self.ownership = assign_owners(items, self.comm.shard_size * self.comm.peer_size)

    def owners(self, fqn: str) -> tuple[int, ...]:
        """The ranks that own a parameter, as `ownership` counts them, in the order in which they divide its dim 0."""
        return self.ownership.owners[[item.fqn for item in self.ownership.items].index(fqn)]

    def places(self, fqn: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The owners of a parameter in the shard axis, and the tensor-parallel rank of each that holds all, or None."""
        size = self.comm.peer_size
        shards, peers = zip(*(divmod(rank, size) for rank in self.owners(fqn)), strict=True)
        return shards, peers if fqn in self._gathered else None

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
        """Who owns how much: a line for each rank, as `ownership` counts them."""
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
