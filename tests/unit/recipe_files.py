"""Shared by the recipe tests: files to load, short names of keys, and the message of a failed load."""

from collections.abc import Callable
from pathlib import Path

import pytest

from titan_muon.trainer.recipe import RecipeError

RULE = "[[optimizer.rule]]\nmatch = '*'\noptimizer = "
"""Start of a rule for every parameter; the optimizer's name in quotes follows."""

KEYS = {
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "hsdp": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "microbatch": "parallelism.pipeline_parallel_microbatch_size",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "parts": "parallelism.module_fqns_per_model_part",
    "sequence_parallel": "parallelism.enable_sequence_parallel",
    "muon": "placement.muon",
    "local": "training.local_batch_size",
    "batch": "training.global_batch_size",
    "length": "training.seq_len",
    "steps": "training.steps",
    "cpu_offload": "training.enable_cpu_offload",
    "ac": "activation_checkpoint.mode",
}
"""Short names of keys, for tables."""


def write(folder: Path, text: str, name: str = "run.toml") -> str:
    """The path of a new TOML file in `folder`."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(call: Callable[[], object]) -> str:
    """The message of the expected RecipeError of `call`."""
    with pytest.raises(RecipeError) as caught:
        call()
    return str(caught.value)
