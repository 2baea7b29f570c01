"""TorchTitan's own parallelization of a model, and what this project does to the model after it."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_muon.titan import compat
from titan_muon.titan.attention import share_dense_mask
from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.sections import Parallelism, Placement

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec


def with_placement(spec: "ModelSpec", placement: Placement, parallelism: Parallelism) -> "ModelSpec":
    """`spec` with a parallelize_fn that also places the Muon matrices and suits the backend.

    Raises RecipeError for a placement that is not there, and for pipeline parallelism before torch 2.14.
    """
    _check_placement(placement.muon)
    _check_pipeline(parallelism.pipeline_parallel_degree)
    return dataclasses.replace(spec, parallelize_fn=_then_ours(spec.parallelize_fn))


def _then_ours(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def parallelize(model: nn.Module, **kwargs: Any) -> nn.Module:
        model = parallelize_fn(model, **kwargs)
        share_dense_mask(model)
        if compat.install():
            reduce_by_plain_sum(model)
        return model

    return parallelize


def reduce_by_plain_sum(model: nn.Module) -> None:
    """Have FSDP reduce gradients by sum and divide apart: gloo has no reduction that multiplies first."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _check_placement(name: str) -> None:
    if name == "owned":
        raise RecipeError("placement.muon = 'owned' is not available yet; use 'shard0'")
    if name != "shard0":
        raise RecipeError(f"placement.muon = {name!r} is unknown; choose from: shard0, owned")


def _check_pipeline(degree: int) -> None:
    if degree > 1 and not compat.has_pipeline_parallel():
        raise RecipeError(f"parallelism.pipeline_parallel_degree = {degree} needs torch 2.14 or newer; set it to 1")
