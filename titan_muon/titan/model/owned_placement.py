"""`placement.muon = "owned"` for TorchTitan's decoders: each Muon matrix of the layers is stored whole on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from titan_muon.matrices import split_of
from titan_muon.orthogonalize import Dispatch, iteration
from titan_muon.owned import Owners, is_owned, own
from titan_muon.owned.private import flattened
from titan_muon.registry import Parallelize
from titan_muon.titan import compat
from titan_muon.titan.device import planned_device
from titan_muon.titan.optimizers import HybridOptimizers, optimizer_config
from titan_muon.titan.reading.roles import see
from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.rules import Assignment, assign, splits_with


def owned(parallelize_fn: Parallelize, recipe: Recipe) -> Parallelize:
    """`parallelize_fn` that has the Muon matrices of the layers owned, and lets FSDP2 shard all else.

    Raises RecipeError for a model that is no decoder of TorchTitan; the function raises it for one without a matrix to
    own.
    """
    if not compat.shards_decoders(parallelize_fn):
        raise RecipeError(
            f"placement.muon = 'owned' knows TorchTitan's decoders, and {parallelize_fn.__module__} shards no decoder; "
            "use 'shard0'"
        )

    def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
        with compat.sharding_decoders_by(parallelize_fn, partial(_shard, recipe)):
            return parallelize_fn(model, **kwargs)

    return parallelize


def _shard(recipe: Recipe, apply: Callable[..., None], model: nn.Module, dp_mesh: DeviceMesh, **options: Any) -> None:
    # Called in place of TorchTitan's apply_fsdp_to_decoder, with its arguments.
    if options["dp_mesh_dims"] is not None:
        raise RecipeError(
            f"placement.muon = 'owned' needs parallelism.spmd_backend = 'partial_dtensor', not "
            f"{recipe.parallelism.spmd_backend!r}"
        )
    layers = _layers(model)
    mesh = flattened(dp_mesh) if dp_mesh.ndim == 2 and recipe.placement.replicas == "one" else dp_mesh
    try:
        _own_layers(recipe, model, layers, mesh, options)
    except ValueError as error:
        raise RecipeError(f"placement.muon = 'owned': {error}") from error
    # fully_shard takes every parameter that it finds in a module, owned or not.
    with hidden(layers):
        apply(model=model, dp_mesh=dp_mesh, **options)


def _layers(model: Any) -> list[nn.Module]:
    # Layers for multi-token prediction are there in some decoders only, and may be None in those.
    return [*model.layers.values(), *(getattr(model, "mtp_layers", None) or ())]


def _own_layers(
    recipe: Recipe, model: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, options: dict[str, Any]
) -> None:
    config, flops = optimizer_config(recipe), _flops(recipe, planned_device(mesh.device_type))
    taken = _matrices(recipe, config, model, layers)
    if not taken:
        return
    params, split = list(taken.values()), splits_with(recipe.muon.split, taken)
    owners = Owners(model, mesh=mesh, params=params, split=split, flops=flops)
    precision = MixedPrecisionPolicy(options["param_dtype"], options["reduce_dtype"], cast_forward_inputs=False)
    policy = options["reshard_after_forward_policy"]
    reshard: bool | None = get_fsdp_reshard_after_forward_policy(policy, options["pp_enabled"])
    if reshard and policy == "default":
        # Without "always", the last layer need not be gathered again just after it was used.
        reshard = None
    for layer in layers:
        if owners.within(layer):
            own(
                layer,
                owners=owners,
                mp_policy=precision,
                reshard_after_forward=reshard,
                offload_policy=CPUOffloadPolicy() if options["cpu_offload"] else None,
                # TorchTitan divides the loss by the tokens of all ranks, so gradients are summed.
                gradient_divide_factor=1.0,
            )


def _flops(recipe: Recipe, device: str) -> Callable[[int, int], int]:
    """What the recipe's Newton-Schulz costs on a type of device."""
    # By the algorithm that will run: the Gram iteration makes wide matrices cheaper, and owners that are balanced by
    # another cost would wait for each other.
    muon = recipe.muon
    steps = iteration(muon.ns_coefficients, muon.ns_steps, muon.eps).steps
    dispatch = Dispatch(muon.orthogonalize, muon.ns_dtype, device)
    return lambda rows, cols: dispatch.choose(rows, cols, steps).flops(rows, cols, steps)


def _matrices(
    recipe: Recipe, config: HybridOptimizers.Config, model: nn.Module, layers: Iterable[nn.Module]
) -> dict[Assignment, nn.Parameter]:
    """What Muon takes of the layers: matrices, and what a split reads as matrices."""
    # What is outside of the layers stays sharded, since `own` gathers layer by layer. So do stacks of experts: whole on
    # one rank, a stack would be most of what the ranks hold.
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    named = {canonical_fqn(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # A pipeline stage may have nothing for a rule, nor for Muon. The container checks both on the whole model.
    whole = recipe.parallelism.pipeline_parallel_degree == 1
    taken = assign(see([model], canonical_fqn), config.rules, config.defaults, all_rules=whole)
    chosen = {
        a: named[a.fqn] for a in taken if a.optimizer == "muon" and named[a.fqn] in inside and _is_matrix(recipe, a)
    }
    if not chosen and whole:
        raise ValueError("Muon takes no matrix of the model's layers; use 'shard0'")
    return chosen


def _is_matrix(recipe: Recipe, assignment: Assignment) -> bool:
    split = split_of(assignment.fqn, recipe.muon.split)
    read = split is not None and (split.row_dims is not None or split.dims != "")
    known = split is None and assignment.split is not None and assignment.role != "experts"
    return len(assignment.shape) == 2 or read or known


@contextmanager
def hidden(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While open, no module within `modules` has the parameters that are owned, so that nothing else takes them."""
    shown = {module: dict(module._parameters) for root in modules for module in root.modules()}
    for module, parameters in shown.items():
        for name, parameter in parameters.items():
            if parameter is not None and is_owned(parameter):
                del module._parameters[name]
    try:
        yield
    finally:
        for module, parameters in shown.items():
            # FSDP2 has put DTensors in place of the others. The old order comes back: parameter groups follow it.
            now = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({name: now.get(name, parameter) for name, parameter in parameters.items()})
