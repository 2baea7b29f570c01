"""Matrix products in float8, MXFP8 and NVFP4: TorchTitan's converters of a model's configuration."""

from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8LinearConverter,
    NVFP4LinearConverter,
    QuantizationConverter,
)

from titan_muon.trainer.recipe import Recipe
from titan_muon.trainer.recipe.constraints import compiles_the_model


def converters(recipe: Recipe) -> tuple[QuantizationConverter.Config, ...]:
    """TorchTitan's converters for a model's configuration, which refuse missing hardware and packages when built."""
    compiled = {"model_compile_enabled": compiles_the_model(recipe)}
    float8, mxfp8, nvfp4 = recipe.float8, recipe.mxfp8, recipe.nvfp4
    made: list[QuantizationConverter.Config] = []
    if float8.linear:
        options = {"recipe_name": float8.recipe_name, "filter_fqns": list(float8.filter_fqns)}
        made.append(Float8LinearConverter.Config(**options, emulate=float8.emulate, **compiled))
    if float8.experts:
        made.append(Float8GroupedExpertsConverter.Config(**compiled))
    if mxfp8.linear:
        made.append(MXFP8LinearConverter.Config(fqns=list(mxfp8.fqns), **compiled))
    if mxfp8.experts:
        made.append(MXFP8GroupedExpertsConverter.Config(pad_multiple=mxfp8.pad_multiple, **compiled))
    if nvfp4.linear:
        made.append(NVFP4LinearConverter.Config(fqns=list(nvfp4.fqns), **compiled))
    return tuple(made)
