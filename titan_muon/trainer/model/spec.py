"""TorchTitan's ModelSpec of a recipe's model."""

from typing import TYPE_CHECKING, Any

import torch

from titan_muon import registry
from titan_muon.assignment.roles import ParameterInfo, inspect_model
from titan_muon.trainer.device import plans_for_host
from titan_muon.trainer.model.attention import use_attention
from titan_muon.trainer.recipe import RecipeError, as_recipe_errors

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec


def model_spec(
    name: str, flavor: str, *, vocab_size: int | None = None, attention: str = "auto", on_cpu: bool | None = None
) -> "ModelSpec":
    """TorchTitan's specification of a flavor of the registered family `name`; arguments as in `[model]`.

    `on_cpu`: whether to choose the attention for a CPU, by default as for the planned device or else this machine.

    Raises RecipeError for an unknown family or flavor, and as `use_attention`.
    """
    with as_recipe_errors():
        family = registry.models.get(name)
    flavors = family.flavors()
    if flavor not in flavors:
        unknown = registry.UnknownName("model.flavor", flavor, flavors)
        raise RecipeError(f"{unknown.problem} (of model.name = {name!r})", key=unknown.key)
    spec: ModelSpec = family.build(flavor, vocab_size)
    use_attention(spec.model, attention, plans_for_host() if on_cpu is None else on_cpu)
    return spec


def whole_model(spec: "ModelSpec") -> dict[str, ParameterInfo]:
    """All trained parameters of a model, by name."""
    return inspect_model([_on_meta(spec)])


def check_modules(spec: "ModelSpec", name: str) -> None:
    """Raise RecipeError if TorchTitan cannot initialize and shard a module of the family `name`."""
    try:
        _on_meta(spec).verify_module_protocol()
    except RuntimeError as error:
        raise RecipeError(
            f"= {name!r}: {error}. Build these modules by TorchTitan's classes, as "
            "torchtitan.models.common.linear.Linear.Config(in_features=..., out_features=...).build() instead of "
            "torch.nn.Linear(...)",
            key="model.name",
        ) from error


def _on_meta(spec: "ModelSpec") -> Any:
    with torch.device("meta"):
        return spec.model.build()
