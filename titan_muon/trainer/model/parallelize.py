"""TorchTitan's parallelization of a model, plus placement and the CPU's needs."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_muon import registry
from titan_muon.trainer.model.attention import share_dense_mask, use_attention
from titan_muon.trainer.model.owned_placement import check_placement_rules, owned
from titan_muon.trainer.model.pipeline import check_pipeline, wrap_pipelining
from titan_muon.trainer.model.spec import whole_model
from titan_muon.trainer.recipe import Recipe, RecipeError, as_recipe_errors
from titan_muon.trainer.recipe.constraints import owns
from titan_muon.trainer.torchtitan import compat

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

registry.placements.register("owned", owned)


def with_placement(spec: "ModelSpec", recipe: Recipe) -> "ModelSpec":
    """`spec` with the recipe's placement and the backend's needs in parallelize_fn.

    Raises RecipeError for an unknown placement and for degrees unfit for the model.
    """
    degrees = recipe.parallelism
    with as_recipe_errors():
        place = registry.placements.get("owned" if owns(recipe) else recipe.placement.muon)
    if recipe.placement.rule:
        check_placement_rules(recipe, whole_model(spec))
    check_pipeline(spec.model, degrees)
    _check_heads(spec.model, degrees.tensor_parallel_degree)
    _check_experts(spec.model, degrees.expert_parallel_degree)
    pipelining_fn = spec.pipelining_fn
    return dataclasses.replace(
        spec,
        parallelize_fn=wrap_parallelize(place(spec.parallelize_fn, recipe)),
        pipelining_fn=None if pipelining_fn is None else wrap_pipelining(pipelining_fn, recipe),
    )


def wrap_parallelize(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`parallelize_fn` with changes for the backend after."""

    def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
        model = parallelize_fn(model, **kwargs)
        share_dense_mask(model)
        for module in model.modules() if compat.install() else ():
            # Sum and divide separately, because gloo lacks FSDP2's PREMUL_SUM.
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def fit_to_machine(config: "Trainer.Config") -> "Trainer.Config":
    """A configuration of TorchTitan's own trainer, changed in place so that it trains on this machine.

    On a CPU, attention is dense and gradients are summed without gloo's missing operation. An older PyTorch gets the
    SPMD backend `partial_dtensor`. On GPUs with the newest PyTorch nothing changes.
    """
    spec = config.model_spec
    assert spec is not None, "the configuration has a model"
    if compat.install():
        use_attention(spec.model, "auto", True)
        config.training.disable_cuda_graphs = True
    config.model_spec = dataclasses.replace(spec, parallelize_fn=wrap_parallelize(spec.parallelize_fn))
    if config.parallelism.spmd_backend == "spmd_types":
        config.parallelism.spmd_backend = compat.spmd_backend("auto")
    return config


def _check_heads(model: Any, degree: int) -> None:
    attention = model.first_attention
    # None means the number of query heads; latent attention (MLA) has no key-value heads.
    kv_heads = getattr(attention, "n_kv_heads", None)
    kv_heads = attention.n_heads if kv_heads is None else kv_heads
    if attention.n_heads % degree or kv_heads % degree:
        raise RecipeError(
            f"= {degree} must divide the model's {attention.n_heads} query heads and {kv_heads} key-value heads",
            key="parallelism.tensor_parallel_degree",
        )


def _check_experts(model: Any, degree: int) -> None:
    experts = {layer.moe.num_experts for layer in model.layers if layer.moe is not None}
    if degree > 1 and not experts:
        raise RecipeError(
            f"= {degree}, but the model has no experts; set it to 1", key="parallelism.expert_parallel_degree"
        )
    for number in sorted(experts):
        if number % degree:
            raise RecipeError(
                f"= {degree} must divide the model's {number} experts", key="parallelism.expert_parallel_degree"
            )
