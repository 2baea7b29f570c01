"""Checks parallel degrees, batch sizes and sequence length against the number of ranks."""

import importlib.metadata
import math
import re

from titan_muon.titan.recipe.sections import Parallelism, Recipe, Training
from titan_muon.titan.recipe.toml import RecipeError, plural

PIPELINE_TORCH = (2, 14)


def check_degrees(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError as `check_layout`, and for a `batch_problem`."""
    check_layout(recipe, world_size)
    if problem := batch_problem(recipe, world_size):
        raise RecipeError(problem)


def check_layout(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError unless the degrees and the sequence length fit `world_size` ranks."""
    parallelism, training = recipe.parallelism, recipe.training
    _check_pipeline(parallelism.pipeline_parallel_degree)
    shard = _shard_degree(parallelism, world_size)
    _check_experts(parallelism, shard, world_size)
    _check_sequence(training, parallelism)


def has_torch(*numbers: int) -> bool:
    """Whether torch has at least this version, as in `has_torch(2, 14)`, pre-releases included."""
    # From package metadata, because importing torch takes seconds.
    installed = re.findall(r"\d+", importlib.metadata.version("torch"))
    return tuple(int(number) for number in installed[: len(numbers)]) >= numbers


def _check_pipeline(degree: int) -> None:
    # Earlier schedules do not take torchtitan 0.3.0's lists of microbatches.
    if degree > 1 and not has_torch(*PIPELINE_TORCH):
        needed, installed = ".".join(map(str, PIPELINE_TORCH)), importlib.metadata.version("torch")
        raise RecipeError(
            f"parallelism.pipeline_parallel_degree = {degree} is not accepted; pipeline parallelism needs torch "
            f"{needed} or newer, and torch {installed} is installed."
        )


def _shard_degree(parallelism: Parallelism, world_size: int) -> int:
    """Ranks per replica, with -1 resolved."""
    others = {
        "data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "context_parallel_degree": parallelism.context_parallel_degree,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
    }
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


def _check_experts(parallelism: Parallelism, shard: int, world_size: int) -> None:
    context, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    ranks, degree = shard * context * tensor, parallelism.expert_parallel_degree
    if ranks % degree:
        problem = f"parallelism.expert_parallel_degree = {degree} is not accepted on {plural(world_size, 'rank')}"
        product = f"shard x context x tensor = {shard} x {context} x {tensor} = {ranks}"
        raise RecipeError(f"{problem}; it takes a divisor of {product}.")


def batch_problem(recipe: Recipe, world_size: int) -> str | None:
    """Reason why `world_size` ranks cannot share the global batch, or None."""
    training, ranks = recipe.training, data_ranks(recipe, world_size)
    whole, local = training.global_batch_size, local_batch_size(recipe, world_size)
    if whole != -1 and whole % (local * ranks):
        problem = f"training.global_batch_size = {whole} is not accepted on {plural(world_size, 'rank')}; it takes"
        if training.local_batch_size == -1:
            return f"{problem} a multiple of the {ranks} data-parallel ranks."
        keep = f" training.local_batch_size = {whole // ranks} (or -1) keeps it." if whole % ranks == 0 else ""
        product = f"training.local_batch_size x data-parallel ranks = {local} x {ranks} = {local * ranks}"
        return f"{problem} -1, or a multiple of {product}.{keep}"
    stages, size = recipe.parallelism.pipeline_parallel_degree, recipe.parallelism.pipeline_parallel_microbatch_size
    if stages > 1 and local % size:
        return (
            f"parallelism.pipeline_parallel_microbatch_size = {size} is not accepted; it takes a divisor of the "
            f"{local} sequences that a data-parallel rank has at a time."
        )
    return None


def local_batch_size(recipe: Recipe, world_size: int) -> int:
    """Sequences per data-parallel rank in a forward and backward, with -1 resolved."""
    training = recipe.training
    if training.local_batch_size != -1:
        return training.local_batch_size
    return max(1, training.global_batch_size // data_ranks(recipe, world_size))


def data_ranks(recipe: Recipe, world_size: int) -> int:
    """Number of data-parallel ranks."""
    return recipe.parallelism.data_parallel_replicate_degree * _shard_degree(recipe.parallelism, world_size)


def _check_sequence(training: Training, parallelism: Parallelism) -> None:
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    # The load balancer gives each context-parallel rank two chunks.
    divisor = (tensor if parallelism.enable_sequence_parallel else 1) * (2 * context if context > 1 else 1)
    if training.seq_len % divisor:
        degrees = [f"parallelism.tensor_parallel_degree = {tensor}"] if parallelism.enable_sequence_parallel else []
        degrees += [f"parallelism.context_parallel_degree = {context}"] if context > 1 else []
        raise RecipeError(
            f"{' and '.join(degrees)} cannot cut training.seq_len = {training.seq_len}, which is no multiple of "
            f"{divisor} (the tensor parallel degree under sequence parallel, times twice the context degree above 1). "
            "Change the degree or the length; the degree must also divide the model's attention heads."
        )
