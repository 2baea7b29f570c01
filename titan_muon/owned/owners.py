"""The owner of each parameter of a model, chosen for the whole model before `own`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..engine.layout.work import standard_flops
from ..engine.tensors.dtensor import layer_of
from ..engine.tensors.names import unwrapped
from ..matrices.stacks import split_of, stack_of
from ..options import OptionError, Split, check
from ..planner.ownership import OwnedItem, Owner, Ownership, PlacementRule, assign_owners, load_lines
from ..removed import refusing_removed
from .comm import OwnerComm
from .hooks import HookContext
from .param import OriginalPlacement, ParamModuleInfo, is_owned, owner_mesh

FlopCount = Callable[[int, int], int]
"""FLOPs to orthogonalize a (rows, columns) matrix."""

FIVE_STANDARD_STEPS: FlopCount = partial(standard_flops, steps=5)


def placed(names: Iterable[str], chosen: Collection[str], rules: Sequence[PlacementRule]) -> dict[str, Owner]:
    """The owner setting of each owned parameter; `chosen` are owned if no rule matches."""
    owners: dict[str, Owner] = {}
    for name in names:
        index = _first(name, rules)
        if index is None and name in chosen:
            owners[name] = "balanced"
        elif index is not None and rules[index].placement == "owned":
            owners[name] = rules[index].owner
    return owners


def check_rules(names: Iterable[str], rules: Sequence[PlacementRule]) -> None:
    """Raise ValueError for an invalid rule or a rule without parameters."""
    used = {_first(name, rules) for name in names}
    for index, rule in enumerate(rules):
        place = f"placement.rule[{index}]"
        try:
            check(PlacementRule, vars(rule))
        except OptionError as error:
            raise ValueError(f"{place}.{error}") from error
        if index not in used:
            raise ValueError(
                f"{place}.match = {rule.match!r} matches no parameter: no parameter has such a name, or earlier rules "
                "match all of these; correct the rule, move it up or remove it"
            )
        if rule.placement == "shard0" and rule.owner != "balanced":
            raise ValueError(
                f"{place}.owner = {rule.owner!r}: sharded parameters have no owner; set placement = 'owned'"
            )


def _first(name: str, rules: Sequence[PlacementRule]) -> int | None:
    return next((index for index, rule in enumerate(rules) if fnmatchcase(name, rule.match)), None)


class Owners:
    """The owner of each parameter to store whole on a single rank, balanced over a model.

    Longest first, by FLOPs of Newton-Schulz within a limit of bytes; the matrices of a layer are spread over ranks.
    Every rank computes equal owners without communication.

    Args:
        model: with all modules to own, after tensor parallelism, activation checkpointing and torch.compile, and before
            `fully_shard` of the same parameters. May be on the meta device.
        mesh: data-parallel mesh as in `fully_shard`: (shard,), or (replicate, shard) for HSDP with an owner in each
            replica (flattened: a single owner among all replicas). Under expert parallelism, the mesh of the ranks with
            the same experts.
        params: parameters to own if no rule matches, or their owner settings; by default every matrix. A stack may have
            several owners.
        rules: for any parameter of the model; the first match decides.
        split: for parameters with several matrices, or not 2D, see `options.Split`.
        flops: of orthogonalizing a (rows, columns) matrix, for the balance; by default five standard steps.
        elementwise: parameters for AdamW and similar rules, balanced by bytes like all vectors.

    Attributes:
        ownership: owners of each parameter as ranks of the shard axis.
        traffic: bytes and calls sent from this rank.

    Raises ValueError for a parameter tied, owned or sharded already, without matrices, or outside the model; for a mesh
    without this rank; for a rule without a match; and for an owner outside the ranks.
    """

    ownership: Ownership

    @refusing_removed
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
        every = _named_infos(model)
        choices = _choices(every, params, rules)
        self.infos = {fqn: every[fqn] for fqn in choices}
        named = choices.keys() if isinstance(params, Mapping) else placed(choices, (), rules).keys()
        names = defaultdict[nn.Parameter, list[str]](list)
        for fqn, info in every.items():
            names[info.param].append(fqn)
        for fqn, info in self.infos.items():
            if len(tied := names[info.param]) > 1:
                raise ValueError(
                    f"{', '.join(tied)} are one tied parameter, which cannot be owned; leave it to fully_shard"
                )
            _check_ownable(fqn, info.param, mesh, split, named=fqn in named)
        if not choices:
            raise ValueError("nothing to own: the model has no matrix; pass params, or use only fully_shard")
        self.comm = OwnerComm(mesh)
        self.traffic, self.context = self.comm.traffic, HookContext(self.comm)
        bytes_alone = set(elementwise)
        # For the whole model, because module by module the first ranks would get most of each module.
        items = [
            _item(fqn, info.param, choices[fqn], split, None if info.param in bytes_alone else flops)
            for fqn, info in self.infos.items()
        ]
        self.ownership = assign_owners(items, self.comm.shard_size)

    def owners(self, fqn: str) -> tuple[int, ...]:
        """The owners of a parameter on the shard axis, in the order of dim 0."""
        return self.ownership.owners[[item.fqn for item in self.ownership.items].index(fqn)]

    def within(self, module: nn.Module) -> dict[str, ParamModuleInfo]:
        """The parameters of `module` to own and not yet owned."""
        inside = set(module.modules())
        return {fqn: info for fqn, info in self.infos.items() if info.module in inside and not is_owned(info.param)}

    def set_requires_gradient_sync(self, reduces: bool) -> None:
        """As FSDP2's method. With False gradients add up on each rank, in the reduce dtype, until a pass with True."""
        self.context.reduce_grads = reduces

    def table(self) -> str:
        return "\n".join(load_lines(dict(enumerate(self.ownership.loads()))))


Infos = Mapping[str, ParamModuleInfo]
"""The place of each parameter, by name. A tied parameter has several names."""


def _named_infos(model: nn.Module) -> Infos:
    # With duplicates, because a tied parameter would be unsharded in only one of its modules.
    return {
        unwrapped(f"{prefix}.{name}" if prefix else name): ParamModuleInfo(module, name)
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def _choices(
    every: Infos,
    params: Iterable[nn.Parameter] | Mapping[nn.Parameter, Owner] | None,
    rules: Sequence[PlacementRule],
) -> dict[str, Owner]:
    """The owner setting of each parameter to own."""
    inside = {info.param for info in every.values()}
    chosen = {parameter for parameter in inside if parameter.ndim == 2} if params is None else set(params)
    if strangers := sorted({tuple(parameter.shape) for parameter in chosen - inside}):
        raise ValueError(f"params has parameters that the model does not have, of shapes {strangers}")
    settings = params if isinstance(params, Mapping) else {}
    check_rules(every, rules)
    owners = placed(every, {fqn for fqn, info in every.items() if info.param in chosen}, rules)
    return {fqn: settings.get(every[fqn].param, owner) for fqn, owner in owners.items()}


def _item(fqn: str, parameter: Tensor, owner: Owner, split: Sequence[Split], flops: FlopCount | None) -> OwnedItem:
    """The load of a parameter. Without `flops` only bytes count."""
    held = OriginalPlacement.of(parameter).size(parameter.shape)
    item = OwnedItem(fqn, layer_of(fqn), 0, held.numel() * parameter.element_size(), owner=owner)
    if flops is None or parameter.ndim < 2:
        return item
    stack = stack_of(fqn, parameter.shape, split)
    columns = prod(parameter.shape[stack.row_dims :])
    cost = sum(flops(*matrix.shape(columns)) for matrix in stack.matrices)
    if stack.row_dims == 1 or not stack.is_separable(parameter.shape):
        return replace(item, flops=cost)
    # This rank and its expert-parallel peers divide only the local experts.
    return replace(item, flops=cost * held[0] // len(parameter), units=held[0])


def _check_ownable(fqn: str, parameter: Tensor, mesh: DeviceMesh, split: Sequence[Split], *, named: bool) -> None:
    """`named`: a rule or `params` names the parameter."""
    if is_owned(parameter):
        raise ValueError(f"{fqn}: owned already; call own once for every module")
    if parameter.ndim == 0:
        raise ValueError(f"{fqn}: a scalar has nothing to divide; leave it to fully_shard")
    if not named and parameter.ndim not in (2, 3) and split_of(fqn, split) is None:
        raise ValueError(
            f"{fqn}: shape {tuple(parameter.shape)} is not a matrix; leave it to fully_shard, describe its matrices "
            "with split, or name it in a placement rule"
        )
    if not isinstance(parameter, DTensor):
        return
    # The owner mesh needs slices of a common root mesh. A mesh of FSDP2 already contains the data-parallel axis.
    try:
        owner_mesh(mesh, parameter.device_mesh, [0])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{fqn}: is placed on {parameter.device_mesh}, which cannot be joined with the data-parallel {mesh}; "
            "call own() before fully_shard, and give fully_shard what it returns as ignored_params"
        ) from error
