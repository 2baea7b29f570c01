"""Checks of a recipe against this machine, before training and in a dry run for this machine."""

from collections.abc import Iterator

from titan_muon.trainer.data.documents import Documents
from titan_muon.trainer.data.tokenizers import check_tokenizer_folder
from titan_muon.trainer.recipe import Recipe, RecipeError
from titan_muon.trainer.recipe.schema import values
from titan_muon.trainer.torchtitan import compat

ON_GPUS_ALONE = (
    "parallelism.enable_fsdp_symm_mem",
    "compile.enable_async_tensor_parallel",
    "profiler.enable_memory_snapshot",
)


def check_machine(recipe: Recipe) -> None:
    """Raise RecipeError for options without support on this machine's device, and as `data_problems`."""
    if compat.install():
        refuse_on_cpu(recipe)
    for problem in data_problems(recipe):
        raise problem


def refuse_on_cpu(recipe: Recipe) -> None:
    """Raise RecipeError for GPU-only options."""
    current = values(recipe)
    for key in ON_GPUS_ALONE:
        if current[key]:
            raise RecipeError("= true is not accepted on the CPU; it needs GPUs. Set it to false.", key=key)
    if recipe.checkpoint.enable and recipe.checkpoint.async_mode == "async_with_pinned_mem":
        raise RecipeError(
            '= "async_with_pinned_mem" is not accepted on the CPU, which pins no memory; use "async".',
            key="checkpoint.async_mode",
        )


def data_problems(recipe: Recipe) -> Iterator[RecipeError]:
    """Errors for text and tokenizer files that this machine lacks."""
    data = recipe.data
    try:
        if data.source != "hf":
            _ = Documents(data).all
    except RecipeError as error:
        yield error
    try:
        if data.tokenizer == "hf":
            check_tokenizer_folder(data.tokenizer_path)
    except RecipeError as error:
        yield error
