"""Differences between the recipes of two runs: the name of a run, and whether a run may be continued."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from titan_muon.titan.recipe import Recipe
from titan_muon.titan.recipe.files import written_values
from titan_muon.titan.recipe.schema import moved
from titan_muon.titan.recipe.toml import read_file, value_text
from titan_muon.titan.recipe.torchtitan_sections import DEGREES

LONGEST = 40
"""In characters: TensorBoard's column is narrow."""
SHORT = MappingProxyType(
    {
        **{f"parallelism.{key}": name for name, key in DEGREES.items()},
        "training.global_batch_size": "batch",
        "placement.muon": "placement",
    }
)
"""Keys in the names of runs. Other keys are without their table, but for those of an optimizer."""

IGNORED = frozenset({"name", "dump_folder", "data.cache", "checkpoint.load", "checkpoint.load_step"})
SAME_EXPERIMENT = IGNORED | {
    *("training.steps", "training.enable_cpu_offload", "training.gc_freq", "training.gc_debug"),
    *("data.num_workers", "data.prefetch_factor", "data.persistent_workers", "data.pin_memory"),
    *("muon.expert.exchange", "muon.expert.replicas", "muon.state", "muon.overlap"),
    *("muon.expert.buffer_gib", "optimizer.offload", "optimizer.implementation", "loss.chunks"),
    *("activation_checkpoint", "checkpoint", "comm", "compile", "machine", "metrics", "monitor", "parallelism"),
    *("placement", "profiler", "validator"),
}
"""Keys and whole tables that may change within an experiment."""


def overrides_text(recipe: Recipe, keys: Sequence[str], beside: Sequence[str] = ()) -> str:
    """`key=value` pairs of a run's name, in plain characters.

    `keys`: of the command line. `beside`: names of other runs. A pair that all of them have is left out of a long name.
    """
    mine, pairs = written_values(recipe), list[str]()
    for key in keys:
        if key not in IGNORED:
            value = mine.get(key)
            text = f"{_short(key)}={value if isinstance(value, str) else _text(value)}"
            pairs.append(re.sub(r"[^A-Za-z0-9_.=+-]+", "-", text))
    others = [set(name.partition("_")[2].split(",")) for name in beside]
    if len(",".join(pairs)) > LONGEST and others:
        pairs = [pair for pair in pairs if pair not in set.intersection(*others)] or pairs
    while len(pairs) > 1 and len(",".join(pairs)) > LONGEST:
        pairs.pop()
    return ",".join(pairs)[:LONGEST]


def _short(key: str) -> str:
    table, _, leaf = key.rpartition(".")
    return SHORT.get(key, key if table in ("muon", "adamw") else leaf)


def other_experiment(recipe: Recipe, file: Path) -> list[str]:
    """`changes` from another experiment; empty within an experiment. Raises as `changes`."""
    keys, may_change = changes(recipe, file), set(SAME_EXPERIMENT)
    if "training.steps" in keys:
        # The schedule depends on the number of steps.
        may_change |= {"lr_scheduler.total_steps", "lr_scheduler.warmup_steps"}
    if recipe.training.global_batch_size != -1:
        # The global batch fixes the size of a step.
        may_change.add("training.local_batch_size")
    return [line for key, line in keys.items() if may_change.isdisjoint({key, key.partition(".")[0]})]


def changes(recipe: Recipe, file: Path) -> dict[str, str]:
    """Differences from the recipe `file` by key, as `muon.lr = 0.001, here 0.02`.

    Raises RecipeError for a file that cannot be read.
    """
    # A recipe of an older version lacks new keys: compare with their defaults.
    mine, defaults = written_values(recipe), written_values(Recipe())
    read = {key: entry.value for key, entry in moved(read_file(file)).items()}
    return {
        key: f"{key} = {_text(read.get(key, defaults.get(key)))}, here {_text(mine.get(key))}"
        for key in {**mine, **read}
        if mine.get(key) != read.get(key, defaults.get(key))
    }


def _text(value: object) -> str:
    return "absent" if value is None else value_text(value)
