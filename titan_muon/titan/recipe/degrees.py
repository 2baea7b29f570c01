"""Whether a recipe's parallel degrees, batch sizes and sequence length fit a number of ranks."""

import importlib.metadata
import math
import re

from titan_muon.titan.recipe.sections import Parallelism, Recipe, Training
from titan_muon.titan.recipe.toml import RecipeError

PIPELINE_TORCH = (2, 14)


def check_degrees(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError unless the parallel degrees, batch sizes and sequence length fit `world_size` ranks."""
    parallelism, training = recipe.parallelism, recipe.training
    _check_pipeline(parallelism.pipeline_parallel_degree)
    # The shard degree first: the other checks need it with -1 resolved.
    shard = _shard_degree(parallelism, world_size)
    _check_experts(parallelism, shard, world_size)
    _check_batch(training, parallelism.data_parallel_replicate_degree * shard, world_size)
    _check_sequence(training, parallelism)


def _check_pipeline(degree: int) -> None:
    # Read from the installed package: importing torch takes seconds that a mistake in a recipe should not cost.
    version = importlib.metadata.version("torch")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if degree > 1 and numbers < PIPELINE_TORCH:
        raise RecipeError(
            f"parallelism.pipeline_parallel_degree = {degree} is not accepted; pipeline parallelism needs torch "
            f"{'.'.join(map(str, PIPELINE_TORCH))} or newer, and torch {version} is installed."
        )


def _shard_degree(parallelism: Parallelism, world_size: int) -> int:
    """Ranks that share one copy of the parameters, with -1 resolved for `world_size` ranks."""
    # Expert parallelism is not among them: its ranks are taken out of these, so it multiplies nothing.
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
    shown = " x ".join(f"{name} {degree}" for name, degree in others.items())
    left, relation = f"{shown} = {product}", "does not divide"
    if shard != -1:
        left, relation = f"{shown} x data_parallel_shard_degree {shard} = {product * shard}", "does not equal"
    fit = f"data_parallel_shard_degree {world_size // product} (or -1) fits"
    if world_size % product:
        fit = f"the degrees other than data_parallel_shard_degree multiply to {product}, which must divide {world_size}"
    raise RecipeError(f"parallelism: {left} {relation} the world size {world_size}; {fit}.")


def _check_experts(parallelism: Parallelism, shard: int, world_size: int) -> None:
    context, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    ranks, degree = shard * context * tensor, parallelism.expert_parallel_degree
    if ranks % degree:
        raise RecipeError(
            f"parallelism.expert_parallel_degree = {degree} is not accepted on {world_size} ranks; it takes a divisor "
            f"of shard x context x tensor = {shard} x {context} x {tensor} = {ranks}."
        )


def _check_batch(training: Training, data_ranks: int, world_size: int) -> None:
    batch = training.local_batch_size * data_ranks
    if training.global_batch_size != -1 and training.global_batch_size % batch:
        raise RecipeError(
            f"training.global_batch_size = {training.global_batch_size} is not accepted on {world_size} ranks; it "
            f"takes -1, or a multiple of training.local_batch_size x data-parallel ranks = {batch}."
        )


def _check_sequence(training: Training, parallelism: Parallelism) -> None:
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    # Twice the context degree: its load balancer gives each rank one chunk from the head and one from the tail.
    divisor = (tensor if parallelism.enable_sequence_parallel else 1) * (2 * context if context > 1 else 1)
    if training.seq_len % divisor:
        raise RecipeError(
            f"training.seq_len = {training.seq_len} is not accepted; it takes a multiple of {divisor}: the tensor "
            "parallel degree under sequence parallel, times twice the context parallel degree above 1."
        )
