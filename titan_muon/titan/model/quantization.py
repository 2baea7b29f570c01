"""Matrix products in float8, MXFP8 and NVFP4: TorchTitan's converters of a model's configuration."""

import importlib
from collections.abc import Collection
from operator import attrgetter
from typing import Any

from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8Linear,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8Linear,
    MXFP8LinearConverter,
    NVFP4Linear,
    NVFP4LinearConverter,
    QuantizationConverter,
)
from torchtitan.components.quantization.utils import module_filter_fn
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts

from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.recipe.constraints import compiles_the_model
from titan_muon.titan.recipe.sections import Float8

NVIDIA, AMD = (8, 9), (9, 4)
"""Oldest compute capability with float8: Ada, and gfx942 (MI300)."""
BLACKWELL = (10, 0)
MX_BLOCK, FP4_BLOCK = 32, 128
"""Sizes of a converted layer are multiples of these numbers: of MXFP8's scaled blocks, of NVFP4's kernels."""


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
        instead = "; float8.emulate = true tries it without them" if section.linear and not section.experts else ""
        raise RecipeError(
            f"{key} = true is not accepted on {_described(capability)}; float8 needs NVIDIA GPUs of compute capability "
            f"8.9 and newer, or AMD's from gfx942 on. Set it to false{instead}."
        )


def _described(capability: tuple[int, int] | None) -> str:
    if capability is None:
        return "a machine without CUDA GPUs"
    return f"a GPU of compute capability {'.'.join(map(str, capability))}"


def check_blackwell(recipe: Recipe, capability: tuple[int, int] | None, *, amd: bool) -> None:
    """Raise RecipeError for MXFP8 and NVFP4 without support on this machine; arguments as in `check_float8`."""
    parts = {"mxfp8.linear": MXFP8Linear, "mxfp8.experts": MXFP8Linear, "nvfp4.linear": NVFP4Linear}
    for key, module in parts.items():
        if not attrgetter(key)(recipe):
            continue
        if module is None:
            raise RecipeError(
                f"{key} = true needs the package torchao with torchao.prototype.moe_training; install a newer one, or "
                f"set {key} = false"
            )
        if amd or capability is None or capability < BLACKWELL:
            raise RecipeError(
                f"{key} = true is not accepted on {_described(capability)}; it needs NVIDIA GPUs of compute capability "
                "10.0 and newer (Blackwell). Set it to false, or use float8."
            )


def converters(recipe: Recipe, model: Any) -> tuple[QuantizationConverter.Config, ...]:
    """TorchTitan's converters for a model's configuration. Raises RecipeError if no module can be converted."""
    compiled = compiles_the_model(recipe)
    made = _float8(recipe, model, compiled=compiled)
    if recipe.mxfp8.linear:
        _check_linear("mxfp8.fqns", recipe.mxfp8.fqns, model, MX_BLOCK)
        made.append(MXFP8LinearConverter.Config(fqns=list(recipe.mxfp8.fqns), model_compile_enabled=compiled))
    if recipe.mxfp8.experts:
        _check_experts("mxfp8.experts", model)
        multiple = recipe.mxfp8.pad_multiple
        made.append(MXFP8GroupedExpertsConverter.Config(pad_multiple=multiple, model_compile_enabled=compiled))
    if recipe.nvfp4.linear:
        _check_linear("nvfp4.fqns", recipe.nvfp4.fqns, model, FP4_BLOCK)
        made.append(NVFP4LinearConverter.Config(fqns=list(recipe.nvfp4.fqns), model_compile_enabled=compiled))
    return tuple(made)


def _check_linear(key: str, names: Collection[str], model: Any, multiple: int) -> None:
    """Raise RecipeError if the parts of names match no linear layer, or one with other sizes than multiples."""
    linears = {fqn: linear for fqn, linear, *_ in model.traverse(Linear.Config)}
    chosen = [fqn for fqn in linears if not names or any(name in fqn for name in names)]
    if not chosen:
        raise RecipeError(f"{key} = {list(names)} match no linear layer; names are such as {min(linears)}")
    for fqn in chosen:
        sizes = linears[fqn].out_features, linears[fqn].in_features
        if any(size % multiple for size in sizes):
            raise RecipeError(
                f"{key} = {list(names)} match {fqn} of shape {sizes}, and this format needs multiples of {multiple}; "
                "choose narrower parts of names, or another model"
            )


def _check_experts(key: str, model: Any) -> None:
    if not any(model.traverse(GroupedExperts.Config)):
        raise RecipeError(f"{key} = true, but the model has no experts; set it to false")


def _float8(recipe: Recipe, model: Any, *, compiled: bool) -> list[QuantizationConverter.Config]:
    section, filters = recipe.float8, list(recipe.float8.filter_fqns)
    made: list[QuantizationConverter.Config] = []
    # TorchTitan silently trains in bfloat16 if no module matches.
    if section.linear:
        if not any(module_filter_fn(linear, fqn, filters) for fqn, linear, *_ in model.traverse(Linear.Config)):
            raise RecipeError(
                "float8.linear = true, but no linear layer outside float8.filter_fqns has sizes that 16 divides; "
                "set it to false"
            )
        options = {"recipe_name": section.recipe_name, "filter_fqns": filters, "emulate": section.emulate}
        made.append(Float8LinearConverter.Config(**options, model_compile_enabled=compiled))
    if section.experts:
        _check_experts("float8.experts", model)
        made.append(Float8GroupedExpertsConverter.Config(model_compile_enabled=compiled))
    return made
