"""Models by name: family and flavour to a TorchTitan ModelSpec, one module per family.

A flavour is a row of sizes. The ones called `tiny` train on a laptop; the others have the published sizes.
"""

import difflib
import importlib
from typing import TYPE_CHECKING

from titan_muon.titan import compat
from titan_muon.titan.recipe import RecipeError

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

# The families import torchtitan, which must find the gaps closed.
compat.install()

_FAMILIES = ("deepseek_v3", "llama3", "qwen3")


def families() -> tuple[str, ...]:
    """Names for `model.name`."""
    return _FAMILIES


def flavors(name: str) -> tuple[str, ...]:
    """Names for `model.flavor` of the family `name`. Raises RecipeError if there is no such family."""
    _check("model.name", name, _FAMILIES)
    return tuple(importlib.import_module(f"models.{name}").FLAVORS)


def model_spec(
    name: str,
    flavor: str,
    *,
    vocab_size: int | None = None,
    attention: str = "auto",
    on_cpu: bool | None = None,
) -> "ModelSpec":
    """A new specification of one model.

    `vocab_size` replaces the flavour's own, for a tokenizer that is not the model's. `attention` is a
    choice of `model.attention`, for the CPU if `on_cpu`, which is this machine's device unless given. q, k
    and v are parameters of their own, so each is one matrix. Raises RecipeError if the family, the flavour
    or the attention is unknown, or if the attention cannot run on the device.
    """
    from titan_muon.titan.model.attention import use_attention

    _check("model.flavor", flavor, flavors(name))
    spec = importlib.import_module(f"models.{name}").build(flavor, vocab_size)
    use_attention(spec.model, attention, compat.install() if on_cpu is None else on_cpu)
    return spec


def _check(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RecipeError(f"{key} = {value!r} is unknown{hint} Choose from: {', '.join(choices)}")
