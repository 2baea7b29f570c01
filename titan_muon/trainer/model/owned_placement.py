"""`placement.muon = "owned"` for TorchTitan's decoders: one rank stores each Muon matrix of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from titan_muon.assignment.roles import ParameterInfo, inspect_model
from titan_muon.assignment.rules import Assignment, assign_parameters, splits_with
from titan_muon.engine.orthogonalize import iteration
from titan_muon.engine.step.algorithm import work_of
from titan_muon.engine.tensors.names import canonical_fqn
from titan_muon.kernels.dispatch import Dispatch
from titan_muon.matrices.stacks import split_of
from titan_muon.options import MuonOptions
from titan_muon.owned import Owners, is_owned, own
from titan_muon.owned.owners import check_rules, placed
from titan_muon.owned.private import flat_mesh
from titan_muon.planner.machine import planning_machine
from titan_muon.registry import Parallelize
from titan_muon.selection import algorithm_of
from titan_muon.trainer.assign.container import optimizer_config, router_of
from titan_muon.trainer.device import planned_device
from titan_muon.trainer.recipe import Recipe, RecipeError, as_recipe_errors
from titan_muon.trainer.torchtitan import compat


def owned(parallelize_fn: Parallelize, recipe: Recipe) -> Parallelize:
    """`parallelize_fn` with owned Muon matrices in the layers; FSDP2 shards the other parameters.

    Raises RecipeError for a model other than TorchTitan's decoders; the returned function raises RecipeError for a
    model without a matrix to own.
    """
    if not compat.shards_decoders(parallelize_fn):
        raise RecipeError(
            f"= 'owned' knows TorchTitan's decoders, and {parallelize_fn.__module__} shards no decoder; use 'shard0'",
            key="placement.muon",
        )

    def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
        with compat.sharding_decoders_by(parallelize_fn, partial(_shard, recipe)):
            return parallelize_fn(model, **kwargs)

    return parallelize


def _shard(recipe: Recipe, apply: Callable[..., None], model: nn.Module, dp_mesh: DeviceMesh, **options: Any) -> None:
    if options["dp_mesh_dims"] is not None:
        raise RecipeError(
            f"= 'owned' needs parallelism.spmd_backend = 'partial_dtensor', not {recipe.parallelism.spmd_backend!r}",
            key="placement.muon",
        )
    layers = _layers(model)
    try:
        _own_layers(recipe, model, layers, dp_mesh, options)
    except ValueError as error:
        key = "placement.muon = 'owned'" if recipe.placement.muon == "owned" else "placement"
        raise RecipeError(f": {error}", key=key) from error
    # fully_shard takes every visible parameter of a module.
    with without_owned_parameters(layers):
        apply(model=model, dp_mesh=dp_mesh, **options)


def _layers(model: Any) -> list[nn.Module]:
    return [*model.layers.values(), *(getattr(model, "mtp_layers", None) or ())]


def _owner_mesh(recipe: Recipe, mesh: DeviceMesh) -> DeviceMesh:
    replicas = recipe.placement.replicas
    if replicas is None:
        # A rank in a rule is a place on the FSDP axis. Pipeline stages have separate groups.
        indexed = any(isinstance(rule.owner, int) for rule in recipe.placement.rule)
        replicas = "each" if indexed or recipe.parallelism.pipeline_parallel_degree > 1 else "one"
    return flat_mesh(mesh) if mesh.ndim == 2 and replicas == "one" else mesh


def _own_layers(
    recipe: Recipe, model: nn.Module, layers: list[nn.Module], dp_mesh: DeviceMesh, options: dict[str, Any]
) -> None:
    named = {canonical_fqn(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    config = optimizer_config(recipe)
    # A pipeline stage may match no rule; the container checks the whole model.
    whole = recipe.parallelism.pipeline_parallel_degree == 1
    assigned = assign_parameters(inspect_model([model]), config.rules, router_of(config), all_rules=whole)
    muon = {a.fqn for a in assigned if a.optimizer == "muon"}
    names: set[str] = set()
    if recipe.placement.muon == "owned":
        # `own` gathers layer by layer, so other parameters stay sharded.
        inside = {parameter for layer in layers for parameter in layer.parameters()}
        ownable = (a for a in assigned if a.fqn in muon and named[a.fqn] in inside)
        names = {a.fqn for a in ownable if _is_matrix(recipe, a) or _cuts(recipe, a, dp_mesh, options)}
        if not names and whole and not recipe.placement.rule:
            raise ValueError("Muon takes no matrix of the model's layers; use 'shard0'")
    chosen = {named[name]: owner for name, owner in placed(named, names, recipe.placement.rule).items()}
    axes = {p: (p.device_mesh.mesh_dim_names or ()) if isinstance(p, DTensor) else () for p in chosen}
    for expert_parallel in (False, True):
        params = {p: owner for p, owner in chosen.items() if ("ep" in axes[p]) == expert_parallel}
        if not params:
            continue
        mesh = options["edp_mesh"] if expert_parallel else dp_mesh
        owners = Owners(
            model,
            mesh=_owner_mesh(recipe, mesh),
            params=params,
            split=splits_with(recipe.muon.split, assigned),
            flops=_flops(recipe, planned_device(mesh.device_type)),
            elementwise={parameter for name, parameter in named.items() if name not in muon},
        )
        for layer in layers:
            if owners.within(layer):
                own(layer, owners=owners, **_own_options(options))


def _own_options(options: dict[str, Any]) -> dict[str, Any]:
    policy = options["reshard_after_forward_policy"]
    reshard: bool | None = get_fsdp_reshard_after_forward_policy(policy, options["pp_enabled"])
    if reshard and policy == "default":
        # Without "always", the last layer is not gathered again right after forward.
        reshard = None
    return {
        "mp_policy": MixedPrecisionPolicy(options["param_dtype"], options["reduce_dtype"], cast_forward_inputs=False),
        "reshard_after_forward": reshard,
        "offload_policy": CPUOffloadPolicy() if options["cpu_offload"] else None,
        # TorchTitan divides the loss by the tokens of all ranks, so gradients are summed.
        "gradient_divide_factor": 1.0,
    }


def _cuts(recipe: Recipe, stack: Assignment, dp_mesh: DeviceMesh, options: dict[str, Any]) -> bool:
    """Whether FSDP2 would shard each expert of a stack. Whole experts it stores in equal numbers on all ranks."""
    if _unread_stacks(recipe) is not None:
        return False
    degree = options["ep_degree"]
    # TorchTitan's count includes the replicas, unless experts are parallel.
    ranks = options["edp_mesh"]["efsdp"].size() * degree if degree > 1 else dp_mesh.size()
    return bool(ranks > stack.shape[0])


def _flops(recipe: Recipe, device: str) -> Callable[[int, int], int]:
    # Another algorithm's cost would unbalance the owners.
    muon = recipe.muon
    every = iteration(muon.ns_coefficients, muon.ns_steps, muon.expert.eps)
    rates = planning_machine(recipe.machine, device)
    dispatch = Dispatch(muon.expert.orthogonalize, muon.expert.ns_dtype, device, gpu=rates)
    options = {name: value for name, value in vars(muon).items() if name != "expert"}
    work = work_of([every], dispatch, algorithm_of(MuonOptions(**options, **vars(muon.expert))))
    return lambda rows, cols: work(0, rows, cols).flops


def check_placement_rules(recipe: Recipe, parameters: Mapping[str, ParameterInfo]) -> None:
    """Raise RecipeError for a placement.rule without a match, or for parameters outside of the layers."""
    with as_recipe_errors():
        check_rules(parameters, recipe.placement.rule)
    unread = _unread_stacks(recipe)
    for name in placed(parameters, (), recipe.placement.rule):
        if not name.startswith(("layers.", "mtp_layers.")):
            raise RecipeError(
                f": {name} cannot be owned: matrices are gathered from their owners layer by layer, and "
                'it is in no layer. Use a narrower pattern, or put a rule with placement = "shard0" before',
                key="placement.rule",
            )
        if unread is not None and len(parameters[name].shape) == 3:
            raise RecipeError(
                f': {name} cannot be owned with {unread}; set placement = "shard0" for it', key="placement.rule"
            )


def _unread_stacks(recipe: Recipe) -> str | None:
    """Recipe key that needs FSDP2's placement of expert stacks, or None."""
    # TorchTitan's Hugging Face conversion knows only some shardings of stacks; torchao has another gather.
    read = {
        "checkpoint.last_save_in_hf": recipe.checkpoint.last_save_in_hf,
        "checkpoint.initial_load_in_hf": recipe.checkpoint.initial_load_in_hf,
        "float8.experts": recipe.float8.experts,
    }
    return next((key for key, value in read.items() if value), None)


def _is_matrix(recipe: Recipe, assignment: Assignment) -> bool:
    split = split_of(assignment.fqn, recipe.muon.split)
    known = split is None and assignment.split is not None and assignment.role != "experts"
    return len(assignment.shape) == 2 or split is not None or known


@contextmanager
def without_owned_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which `modules` have no owned parameters, for code that takes all parameters."""
    shown = {module: dict(module._parameters) for root in modules for module in root.modules()}
    for module, parameters in shown.items():
        for name, parameter in parameters.items():
            if parameter is not None and is_owned(parameter):
                del module._parameters[name]
    try:
        yield
    finally:
        for module, parameters in shown.items():
            # FSDP2 has replaced the other parameters. Parameter groups follow the order.
            now = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({name: now.get(name, parameter) for name, parameter in parameters.items()})
