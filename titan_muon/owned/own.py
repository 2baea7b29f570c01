"""`own`: let the matrices of a module rest whole on single ranks, beside `fully_shard` for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .guard import guard_state_dict
from .hooks import Station
from .owners import Owners, Site, use_device
from .param import at_rest
from .param_group import Face, OwnedParameter, State, Unit


def own(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    params: Iterable[nn.Parameter] | None = None,
    owners: Owners | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    offload_policy: OffloadPolicy | None = None,
    gradient_divide_factor: float | None = None,
) -> set[nn.Parameter]:
    """Have matrices of a module rest whole on one rank each, so that a Muon step needs no communication.

    Before the module's forward each owner sends its matrices to the others; after it the copies are freed, and come
    back for backward; in backward the gradients are reduced to the owners. Call it in the order of the forward pass:
    the next module's matrices travel while this one computes. A parameter may be used only within that forward.

        owners = Owners(model, mesh=mesh)
        for block in model.layers:
            fully_shard(block, mesh=mesh, ignored_params=own(block, owners=owners))
        fully_shard(model, mesh=mesh)

    Args:
        module: a plain module or one that is already given to `fully_shard` with the same parameters ignored.
        mesh: as for `Owners`, with `params`, if this module is all that is owned.
        params: see `Owners`.
        owners: who owns what over the whole model; instead of `mesh` and `params`.
        mp_policy: as for `fully_shard`: parameters travel and compute in `param_dtype`, gradients in `reduce_dtype`.
        reshard_after_forward: free the copies between forward and backward.
        offload_policy: CPUOffloadPolicy keeps parameters at rest, and their gradients, on the host.
        gradient_divide_factor: what sums of gradients are divided by; by default the ranks of the mesh, for the mean.

    Returns:
        The parameters at rest, for `ignored_params` of `fully_shard`.

    Raises:
        ValueError: as `Owners` does, and if the module has nothing to own or parameters of several dtypes.
    """
    if owners is None:
        if mesh is None:
            raise ValueError("own needs a mesh, or the owners of the whole model")
        owners = Owners(module, mesh=mesh, params=params)
    elif mesh is not None or params is not None:
        raise ValueError("own takes mesh and params, or owners, which have both")
    sites = owners.within(module)
    name = type(module).__name__
    if not sites:
        raise ValueError(f"{name}: has none of the parameters that have an owner, or they are owned already")
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    _check_dtypes(sites, policy)
    parameters = [_owned(fqn, site, owners, offload_policy) for fqn, site in sites.items()]
    group = owners.group
    unit = Unit(name, parameters, group, owners.collectives, policy.param_dtype, use_device(group.mesh))
    divisor = group.total if gradient_divide_factor is None else gradient_divide_factor
    Station(module, unit, owners.passes, policy, keeps=not reshard_after_forward, divisor=divisor)
    for inner in dict.fromkeys(site.module for site in sites.values()):
        _guard_module(inner, unit)
    return {parameter.rest for parameter in parameters}


def _check_dtypes(sites: dict[str, Site], policy: MixedPrecisionPolicy) -> None:
    dtypes = {getattr(site.module, site.name).dtype: fqn for fqn, site in sites.items()}
    if policy.param_dtype is None and len(dtypes) > 1:
        named = ", ".join(f"{fqn} is {dtype}" for dtype, fqn in dtypes.items())
        raise ValueError(f"{named}: parameters that travel together have one dtype; set mp_policy.param_dtype")


def _owned(fqn: str, site: Site, owners: Owners, offload_policy: OffloadPolicy | None) -> OwnedParameter:
    parameter = getattr(site.module, site.name)
    owner = owners.owner(fqn)
    face = Face.of(parameter)
    rest = at_rest(parameter, owners.group.mesh, owner)
    if isinstance(offload_policy, CPUOffloadPolicy) and not rest.is_meta:
        rest = nn.Parameter(rest.detach().cpu(), requires_grad=rest.requires_grad)
    return OwnedParameter(fqn, site.module, site.name, owner, rest, face)


def _guard_module(inner: nn.Module, unit: Unit) -> None:
    """Refuse the use of parameters that are not there, and show others the parameters at rest."""

    def refuse_use_at_rest(*_: object) -> None:
        if unit.state is not State.UNSHARDED:
            raise ValueError(
                f"{type(inner).__name__}: its owned parameters are there only within the forward of {unit.name}, which "
                "was given to own(); call that module, or own this one by itself"
            )

    inner.register_forward_pre_hook(refuse_use_at_rest)
    inner.register_state_dict_pre_hook(lambda *_: unit.reshard())
    inner.register_load_state_dict_pre_hook(lambda *_: unit.reshard())
    inner.register_state_dict_post_hook(partial(guard_state_dict, unit))
