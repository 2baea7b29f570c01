"""`own`: store matrices of a module whole on single ranks, beside `fully_shard` for all other parameters.

owners = Owners(model, mesh=mesh)
for block in model.layers:
    fully_shard(block, mesh=mesh, ignored_params=own(block, owners=owners))
fully_shard(model, mesh=mesh)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ..planner.ownership import PlacementRule
from ..removed import refusing_removed
from .hooks import ModuleHooks, refuse_use_while_owned
from .owners import Owners
from .param import OwnedParam, ParamModuleInfo
from .param_group import OwnedParamGroup
from .state_dict import register_state_dict_hooks


@refusing_removed
def own(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    params: Iterable[nn.Parameter] | None = None,
    rules: Sequence[PlacementRule] = (),
    owners: Owners | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    offload_policy: OffloadPolicy | None = None,
    gradient_divide_factor: float | None = None,
) -> set[nn.Parameter]:
    """Store each matrix of a module whole on a single rank, so that a Muon step needs no communication.

    Call `own` in the order of the forward pass. Only the forward of `module` may use its parameters.

    Args:
        module: plain module, or a module given to `fully_shard` with the same parameters ignored.
        mesh, params, rules: as in `Owners`, if nothing else of the model is owned.
        owners: for the whole model, instead of these arguments.
        mp_policy: policy of `fully_shard`. Without `reduce_dtype`, gradients travel as in `fully_shard` of the
            installed PyTorch: in `param_dtype`, and from 2.15 on in the dtype of the stored parameters. A
            `param_dtype_override_fn` must give all owned parameters of a module one dtype.
        reshard_after_forward: whether to free unsharded parameters between forward and backward; by default all except
            the last module's.
        offload_policy: CPUOffloadPolicy keeps owned parameters and gradients on the host.
        gradient_divide_factor: divisor of gradient sums; by default the number of ranks.

    Returns the owned parameters, for `ignored_params` of `fully_shard`. Raises ValueError like `Owners`, and for a
    module without parameters to own or with several dtypes.
    """
    if owners is not None and (mesh is not None or params is not None or rules):
        raise ValueError("own takes mesh, params and rules, or owners, which have them")
    if owners is None:
        if mesh is None:
            raise ValueError("own needs a mesh, or the owners of the whole model")
        owners = Owners(module, mesh=mesh, params=params, rules=rules)
    infos, name = owners.within(module), type(module).__name__
    if not infos:
        raise ValueError(f"{name}: has no parameter with an owner, or all are owned already")
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    param_dtype = _param_dtype(infos, policy)
    comm, offload = owners.comm, isinstance(offload_policy, CPUOffloadPolicy)
    owned = [OwnedParam(fqn, info, comm.mesh, owners.owners(fqn), offload) for fqn, info in infos.items()]
    group = OwnedParamGroup(name, owned, comm, param_dtype)
    factor = comm.mesh.size() if gradient_divide_factor is None else gradient_divide_factor
    reshard = reshard_after_forward
    ModuleHooks(module, group, owners.context, policy, reshard_after_forward=reshard, divide_factor=factor)
    for inner in dict.fromkeys(info.module for info in infos.values()):
        refuse_use_while_owned(inner, group)
        register_state_dict_hooks(inner, group)
    return {param.owned_param for param in owned}


def _param_dtype(infos: Mapping[str, ParamModuleInfo], policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """The dtype of unsharded parameters, or None for the dtype of the stored ones. Raises ValueError for several."""
    # From PyTorch 2.15 on.
    override = getattr(policy, "param_dtype_override_fn", None)
    dtypes: dict[torch.dtype, str] = {}
    for fqn, info in infos.items():
        param = info.param
        if param.grad_dtype != param.dtype:
            raise ValueError(f"{fqn}: has grad_dtype {param.grad_dtype}, which own() cannot keep; leave it unset")
        chosen = policy.param_dtype if override is None else override(param)
        chosen = policy.param_dtype if chosen is None else chosen
        dtypes[param.dtype if chosen is None else chosen] = fqn
    if len(dtypes) > 1:
        named = ", ".join(f"{fqn} is {dtype}" for dtype, fqn in dtypes.items())
        raise ValueError(
            f"{named}: the owned parameters of a module need a common dtype in forward; set mp_policy.param_dtype, "
            "give them one dtype in its param_dtype_override_fn, or leave some to fully_shard (params)"
        )
    return policy.param_dtype if override is None else next(iter(dtypes))
