"""Float8 matrix products: TorchTitan's converters of a model's configuration."""

import importlib
from typing import Any

from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8Linear,
    Float8LinearConverter,
    QuantizationConverter,
)
from torchtitan.components.quantization.utils import module_filter_fn
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts

from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.recipe.sections import Float8

NVIDIA, AMD = (8, 9), (9, 4)
"""Oldest compute capability with float8: Ada, and gfx942 (MI300)."""


def has_torchao() -> bool:
    """Whether torchao is installed and has TorchTitan's recipes."""
    # With an older torchao, TorchTitan warns and trains without float8.
    if Float8Linear is None:
        return False
    return hasattr(importlib.import_module("torchao.float8").Float8LinearConfig, "from_recipe_name")


def check_float8(section: Float8, capability: tuple[int, int] | None, *, amd: bool, torchao: bool) -> None:
    """Raise RecipeError for float8 without support on this machine.

    `capability`: of the GPU, or None. `torchao`: a usable torchao is installed.
    """
    keys = [key for key in ("linear", "experts") if getattr(section, key)]
    if not keys:
        return
    key = f"float8.{keys[0]}"
    if not torchao:
        raise RecipeError(f"{key} = true needs the package torchao (0.9 or newer); install it, or set {key} = false")
    has_float8 = capability is not None and capability >= (AMD if amd else NVIDIA)
    if not has_float8 and not section.emulate:
        device = "a machine without CUDA GPUs"
        if capability is not None:
            device = f"a GPU of compute capability {'.'.join(map(str, capability))}"
        instead = "; float8.emulate = true tries it without them" if section.linear and not section.experts else ""
        raise RecipeError(
            f"{key} = true is not accepted on {device}; float8 needs NVIDIA GPUs of compute capability 8.9 and newer, "
            f"or AMD's from gfx942 on. Set it to false{instead}."
        )


def float8_converters(recipe: Recipe, model: Any) -> tuple[QuantizationConverter.Config, ...]:
    """TorchTitan's converters for a model's configuration. Raises RecipeError if no module can be converted."""
    section, filters = recipe.float8, list(recipe.float8.filter_fqns)
    compiled = recipe.compile.enable and "model" in recipe.compile.components
    converters: list[QuantizationConverter.Config] = []
    # TorchTitan silently trains in bfloat16 if no module matches.
    if section.linear:
        if not any(module_filter_fn(linear, fqn, filters) for fqn, linear, *_ in model.traverse(Linear.Config)):
            raise RecipeError(
                "float8.linear = true, but no linear layer outside float8.filter_fqns has sizes that 16 divides; "
                "set it to false"
            )
        options = {"recipe_name": section.recipe_name, "filter_fqns": filters, "emulate": section.emulate}
        converters.append(Float8LinearConverter.Config(**options, model_compile_enabled=compiled))
    if section.experts:
        if not any(model.traverse(GroupedExperts.Config)):
            raise RecipeError("float8.experts = true, but the model has no experts; set it to false")
        converters.append(Float8GroupedExpertsConverter.Config(model_compile_enabled=compiled))
    return tuple(converters)
