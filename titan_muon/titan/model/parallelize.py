"""TorchTitan's own parallelization of a model, and what this project does to the model after it."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_muon import registry
from titan_muon.titan import compat
from titan_muon.titan.model.attention import share_dense_mask
from titan_muon.titan.model.owned_placement import check_placement_rules, owned
from titan_muon.titan.model.pipeline import check_pipeline, wrap_pipelining
from titan_muon.titan.model.spec import parameter_shapes
from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.recipe.constraints import owns

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

registry.placements.register("owned", owned)

MASK_BLOCK = 128
"""Tokens in one block of FlexAttention's mask, torch's default."""


def with_placement(spec: "ModelSpec", recipe: Recipe) -> "ModelSpec":
    """`spec` with a parallelize_fn that also places the Muon matrices as `recipe` says and suits the backend.

    It raises RecipeError for a placement that is not there and for degrees that do not divide the model or that this
    torch cannot run; the parallelize_fn does for a sequence that context parallelism cannot cut.
    """
    # What a rule has owned is placed by the same means whatever `placement.muon` says.
    place, degrees = _placement("owned" if owns(recipe) else recipe.placement.muon), recipe.parallelism
    if recipe.placement.rule:
        check_placement_rules(recipe, parameter_shapes(spec))
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
    """`parallelize_fn` with a check of the sequence before it, and what the backend needs after it."""

    def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
        _check_sequence(kwargs["training"].seq_len, kwargs["parallelism"].context_parallel_degree)
        model = parallelize_fn(model, **kwargs)
        share_dense_mask(model)
        for module in model.modules() if compat.install() else ():
            # By sum, and divided apart: FSDP2 would reduce with PREMUL_SUM, which gloo does not have.
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def _placement(name: str) -> Callable[[registry.Parallelize, Recipe], registry.Parallelize]:
    try:
        return registry.placements.get(name)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _check_heads(model: Any, degree: int) -> None:
    attention = model.first_attention
    # Latent attention (MLA) has no key-value heads of its own, and None is as many as there are query heads.
    kv_heads = getattr(attention, "n_kv_heads", None)
    kv_heads = attention.n_heads if kv_heads is None else kv_heads
    if attention.n_heads % degree or kv_heads % degree:
        raise RecipeError(
            f"parallelism.tensor_parallel_degree = {degree} must divide the model's {attention.n_heads} query heads "
            f"and {kv_heads} key-value heads"
        )


def _check_experts(model: Any, degree: int) -> None:
    experts = {layer.moe.num_experts for layer in model.layers if layer.moe is not None}
    if degree > 1 and not experts:
        raise RecipeError(f"parallelism.expert_parallel_degree = {degree}, but the model has no experts; set it to 1")
    for number in experts:
        if number % degree:
            raise RecipeError(f"parallelism.expert_parallel_degree = {degree} must divide the model's {number} experts")


def _check_sequence(length: int, context_parallel: int) -> None:
    # torch shards the mask of packed documents in whole blocks, and says so only at the first batch.
    unit = MASK_BLOCK * context_parallel
    if context_parallel > 1 and length % unit:
        raise RecipeError(
            f"training.seq_len = {length} must be a multiple of {unit}: {MASK_BLOCK} tokens for each of "
            f"parallelism.context_parallel_degree = {context_parallel} ranks"
        )
