"""`own`: let the matrices of a module be whole on single ranks, beside `fully_shard` for everything else.

owners = Owners(model, mesh=mesh)
for block in model.layers:
    fully_shard(block, mesh=mesh, ignored_params=own(block, owners=owners))
fully_shard(model, mesh=mesh)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ..options import PlacementRule
from .hooks import ModuleHooks, refuse_use_while_owned
from .owners import Owners, TensorParallel
from .param import OwnedParam, ParamModuleInfo
from .param_group import OwnedParamGroup
from .state_dict import register_state_dict_hooks


def own(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    params: Iterable[nn.Parameter] | None = None,
    rules: Sequence[PlacementRule] = (),
    tensor_parallel: TensorParallel = "peers",
    owners: Owners | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    offload_policy: OffloadPolicy | None = None,
    gradient_divide_factor: float | None = None,
) -> set[nn.Parameter]:
    """Have matrices of a module stored whole on one rank each, so that a Muon step needs no communication.

    Call it in the order of the forward pass. A parameter is used within the forward of its module alone.

    Args:
        module: plain module, or one that is already given to `fully_shard` with the same parameters ignored.
        mesh: mesh as for `Owners`, with `params`, if this module is all that is owned.
        params, rules, tensor_parallel: see `Owners`; rules are on the names of the module's parameters.
        owners: owners of the whole model's parameters, instead of `mesh` and what is said of it.
        mp_policy: policy of `fully_shard`; gradients travel in `reduce_dtype`, or without one in `param_dtype`.
        reshard_after_forward: whether the copies are freed between forward and backward; by default all but those of
            the last module that is owned, which would be gathered again at once.
        offload_policy: CPUOffloadPolicy keeps owned parameters, and their gradients, on the host.
        gradient_divide_factor: number that sums of gradients are divided by; by default the ranks, for the mean.

    Returns the owned parameters, for `ignored_params` of `fully_shard`. Raises ValueError as `Owners` does, and if the
    module has nothing to own or parameters of several dtypes.
    """
    if owners is not None and (mesh is not None or params is not None or rules or tensor_parallel != "peers"):
        raise ValueError("own takes mesh, params, rules and tensor_parallel, or owners, which have them")
    if owners is None:
        owners = _owners_of(module, mesh, params=params, rules=rules, tensor_parallel=tensor_parallel)
    infos, name = owners.within(module), type(module).__name__
    if not infos:
        raise ValueError(f"{name}: has none of the parameters that have an owner, or they are owned already")
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    _check_dtypes(infos, policy)
    comm, offload = owners.comm, isinstance(offload_policy, CPUOffloadPolicy)
    owned = [OwnedParam(fqn, info, comm.mesh, *owners.places(fqn), offload) for fqn, info in infos.items()]
    group = OwnedParamGroup(name, owned, comm, policy.param_dtype)
    factor = comm.mesh.size() if gradient_divide_factor is None else gradient_divide_factor
    reshard = reshard_after_forward
    ModuleHooks(module, group, owners.context, policy, reshard_after_forward=reshard, divide_factor=factor)
    for inner in dict.fromkeys(info.module for info in infos.values()):
        refuse_use_while_owned(inner, group)
        register_state_dict_hooks(inner, group)
    return {param.owned_param for param in owned}


def _owners_of(module: nn.Module, mesh: DeviceMesh | None, **said: Any) -> Owners:
    if mesh is None:
        raise ValueError("own needs a mesh, or the owners of the whole model")
    return Owners(module, mesh=mesh, **said)


def _check_dtypes(infos: Mapping[str, ParamModuleInfo], policy: MixedPrecisionPolicy) -> None:
    """Raise ValueError for parameters of several dtypes that would be in one buffer."""
    dtypes = {info.param.dtype: fqn for fqn, info in infos.items()}
    if policy.param_dtype is None and len(dtypes) > 1:
        named = ", ".join(f"{fqn} is {dtype}" for dtype, fqn in dtypes.items())
        raise ValueError(f"{named}: parameters that travel together have one dtype; set mp_policy.param_dtype")
