"""Differences between the recipes of two runs, for a run's name and for a resume."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.recipe.files import written_values
from titan_muon.titan.recipe.toml import read_file, value_text

LONGEST = 80
"""In characters: TensorBoard's column is narrow."""
LONGEST_VALUE = 24

IGNORED = frozenset({"name", "dump_folder", "data.cache", "checkpoint.load", "checkpoint.load_step"})
SAME_EXPERIMENT = IGNORED | {
    *("training.steps", "training.enable_cpu_offload", "training.gc_freq", "training.gc_debug"),
    *("data.num_workers", "data.prefetch_factor", "data.persistent_workers", "data.pin_memory"),
    *("muon.exchange", "muon.owners", "muon.replicas", "muon.split_over", "muon.state", "muon.overlap"),
    *("muon.buffer_gib", "optimizer.offload", "optimizer.implementation", "loss.chunks"),
    *("activation_checkpoint", "checkpoint", "comm", "compile", "machine", "metrics", "monitor", "parallelism"),
    *("placement", "profiler", "validator"),
}
"""Keys and whole tables that may change within an experiment."""


def distinguishing_keys(recipe: Recipe, first: Path | None, overrides: Sequence[str]) -> str:
    """`key=value` pairs that distinguish a run: `overrides`, the keys of the command line, then the differences from
    `first`, the recipe of the first run of this name."""
    mine, keys = written_values(recipe), [*overrides]
    if first is not None:
        with suppress(RecipeError):
            keys += changes(recipe, first)
    pairs = [f"{_short(key, mine)}={_value(mine.get(key))}" for key in dict.fromkeys(keys) if key not in IGNORED]
    name = ""
    for number, pair in enumerate(pairs):
        longer = f"{name},{pair}" if name else pair
        if len(longer) > LONGEST:
            return f"{name},+{len(pairs) - number}"
        name = longer
    return name


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
    read = {key: entry.value for key, entry in read_file(file).items()}
    return {
        key: f"{key} = {_text(read.get(key, defaults.get(key)))}, here {_text(mine.get(key))}"
        for key in {**mine, **read}
        if mine.get(key) != read.get(key, defaults.get(key))
    }


def _text(value: object) -> str:
    return "absent" if value is None else value_text(value)


def _short(key: str, keys: Mapping[str, object]) -> str:
    """Last word of a key if unique; its table's name if the word is a table's name; else the full key."""
    table, _, leaf = key.rpartition(".")
    if any(other.partition(".")[0] == leaf for other in keys):
        return table
    unique = sum(other.rpartition(".")[2] == leaf for other in keys) == 1
    return leaf if unique else key


def _value(value: object) -> str:
    text = value if isinstance(value, str) else _text(value)
    # Without brackets and quotes, but with a minus: -1 is not 1.
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "-", re.sub(r"^[^A-Za-z0-9_.+-]+|[^A-Za-z0-9_.+-]+$", "", text))
    # A digest distinguishes long values with the same beginning.
    return plain if len(plain) <= LONGEST_VALUE else hashlib.sha256(text.encode()).hexdigest()[:6]
