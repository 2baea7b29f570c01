"""Checks parallel degrees, batch sizes and sequence length against the number of ranks and PyTorch's version."""

import importlib.metadata
import math
import re
from operator import attrgetter
from typing import NamedTuple

from titan_muon.options import plural
from titan_muon.trainer.recipe.sections import Recipe
from titan_muon.trainer.recipe.toml import RecipeError, value_text
from titan_muon.trainer.recipe.torchtitan_sections import DEGREES, Parallelism


class TorchNeed(NamedTuple):
    """The oldest torch for the values of a key besides `older`, and the cause."""

    key: str
    torch: tuple[int, int]
    older: tuple[object, ...]
    cause: str


MASK_BLOCK = 128
NO_LISTS = "earlier schedules do not take torchtitan's lists of microbatches"
ONE_MESH = "earlier FSDP2 has a single mesh for all parameters of a module"
NO_PLAIN_TENSORS = "earlier FSDP2 cannot shard plain tensors on its mesh"
TORCH_NEEDS = (
    TorchNeed("parallelism.pipeline_parallel_degree", (2, 14), (1,), NO_LISTS),
    TorchNeed("parallelism.expert_parallel_degree", (2, 12), (1,), ONE_MESH),
    TorchNeed("parallelism.spmd_backend", (2, 14), ("auto", "partial_dtensor"), NO_PLAIN_TENSORS),
    TorchNeed("loss.chunks", (2, 13), ("auto", 1), "earlier FSDP2 cannot reduce the head's gradients by chunk"),
)


def check_degrees(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError as `check_layout`, and unless the ranks can share the global batch."""
    check_layout(recipe, world_size)
    training, ranks = recipe.training, data_ranks(recipe, world_size)
    whole, local = training.global_batch_size, local_batch_size(recipe, world_size)
    if whole != -1 and whole % (local * ranks):
        product = f"training.local_batch_size x data-parallel ranks = {local} x {ranks} = {local * ranks}"
        accepted = f"-1, or a multiple of {product}."
        if whole % ranks == 0:
            accepted += f" training.local_batch_size = {whole // ranks} (or -1) keeps it."
        if training.local_batch_size == -1:
            accepted = f"a multiple of the {ranks} data-parallel ranks."
        where = f"is not accepted on {plural(world_size, 'rank')}"
        raise RecipeError(f"= {whole} {where}; it takes {accepted}", key="training.global_batch_size")
    stages, size = recipe.parallelism.pipeline_parallel_degree, recipe.parallelism.pipeline_parallel_microbatch_size
    if stages > 1 and local % size:
        raise RecipeError(
            f"= {size} is not accepted; it takes a divisor of the "
            f"{local} sequences that a data-parallel rank has at a time.",
            key="parallelism.pipeline_parallel_microbatch_size",
        )


def check_layout(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError unless torch and `world_size` ranks fit the degrees and the sequence length."""
    _check_torch(recipe)
    parallelism, length = recipe.parallelism, recipe.training.seq_len
    shard, expert = _shard_degree(parallelism, world_size), parallelism.expert_parallel_degree
    context, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    if (ranks := shard * context * tensor) % expert:
        product = f"shard x context x tensor = {shard} x {context} x {tensor} = {ranks}"
        raise RecipeError(
            f"= {expert} is not accepted on {plural(world_size, 'rank')}; it takes a divisor of {product}.",
            key="parallelism.expert_parallel_degree",
        )
    sequence = tensor if parallelism.enable_sequence_parallel else 1
    # Each context-parallel rank gets two chunks, and torch cuts the document mask in whole blocks.
    divisor = math.lcm(2 * context * sequence, MASK_BLOCK * context) if context > 1 else sequence
    if length % divisor:
        raise RecipeError(
            f"= {length} is not a multiple of {divisor}, which parallelism.tensor_parallel_degree = {tensor} and "
            f"context_parallel_degree = {context} need; change the length or the degrees",
            key="training.seq_len",
        )


def has_torch(*numbers: int) -> bool:
    """Whether torch has at least this version, as in `has_torch(2, 14)`, pre-releases included."""
    # From package metadata, because importing torch takes seconds.
    installed = re.findall(r"\d+", importlib.metadata.version("torch"))
    return tuple(int(number) for number in installed[: len(numbers)]) >= numbers


def has_torch_for(key: str) -> bool:
    """Whether torch is new enough for all values of a recipe key."""
    return all(has_torch(*need.torch) for need in TORCH_NEEDS if need.key == key)


def _check_torch(recipe: Recipe) -> None:
    """Raise RecipeError for a value that needs a newer torch."""
    for need in TORCH_NEEDS:
        value = attrgetter(need.key)(recipe)
        if value not in need.older and not has_torch(*need.torch):
            needed, installed = ".".join(map(str, need.torch)), importlib.metadata.version("torch")
            raise RecipeError(
                f"= {value_text(value)} is not accepted; it needs torch {needed} or newer, and torch {installed} is "
                f"installed: {need.cause}. Install a newer torch, or set it to {value_text(need.older[0])}.",
                key=need.key,
            )


def _shard_degree(parallelism: Parallelism, world_size: int) -> int:
    """Ranks per replica, with -1 resolved."""
    others = {key: getattr(parallelism, key) for name, key in DEGREES.items() if name not in ("fsdp", "ep")}
    product = math.prod(others.values())
    shard = parallelism.data_parallel_shard_degree
    if world_size % product == 0 and shard in (-1, world_size // product):
        return world_size // product
    named = {name: degree for name, degree in others.items() if degree > 1}
    named |= {} if shard == -1 else {"data_parallel_shard_degree": shard}
    shown, needed = " x ".join(f"{name} {degree}" for name, degree in named.items()), math.prod(named.values())
    fit = f", or set data_parallel_shard_degree = {world_size // product} (or -1)" if world_size % product == 0 else ""
    raise RecipeError(
        f"parallelism: {shown} takes {'a multiple of ' if shard == -1 else ''}{plural(needed, 'process')}, and this is "
        f"{plural(world_size, 'process')}. Start {needed} by `torchrun --nproc-per-node={needed} train.py ...`, plan "
        f"them by --dry-run --world-size {needed}{fit}; or change the degrees."
    )


def degrees_in_use(recipe: Recipe) -> dict[str, int]:
    """Degrees above 1 by their usual names, besides FSDP's, which are the remaining ranks."""
    degrees = {name: getattr(recipe.parallelism, key) for name, key in DEGREES.items() if name != "fsdp"}
    return {name: degree for name, degree in degrees.items() if degree > 1}


def local_batch_size(recipe: Recipe, world_size: int) -> int:
    """Sequences per data-parallel rank in a forward and backward, with -1 resolved."""
    training = recipe.training
    if training.local_batch_size != -1:
        return training.local_batch_size
    return max(1, training.global_batch_size // data_ranks(recipe, world_size))


def data_ranks(recipe: Recipe, world_size: int) -> int:
    """Number of data-parallel ranks."""
    return recipe.parallelism.data_parallel_replicate_degree * _shard_degree(recipe.parallelism, world_size)
