"""Keys that tell a run from its recipe's file and from earlier runs: for its name, and for whether to continue one."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_muon.titan.recipe import Recipe, RecipeError
from titan_muon.titan.recipe.files import written_values
from titan_muon.titan.recipe.toml import read_file, value_text

LONGEST = 80
"""Longest list of differences, in characters: folder names end at 255 bytes, and TensorBoard's column is narrow."""

LONGEST_VALUE = 24
COMPARED = 20
"""Number of earlier runs to compare with."""

# Keys without influence on the computation: name, folders and the checkpoint to load.
IGNORED = frozenset({"name", "dump_folder", "data.cache", "checkpoint.load", "checkpoint.load_step"})
OVERRIDES_FILE = "overrides.txt"
"""File of a run's folder with the keys that the command line changed, one a line."""

SAME_EXPERIMENT = frozenset(
    {
        *IGNORED,
        *("training.steps", "training.enable_cpu_offload", "training.gc_freq", "training.gc_debug"),
        *("data.num_workers", "data.prefetch_factor", "data.persistent_workers", "data.pin_memory"),
        *("muon.exchange", "muon.owners", "muon.replicas", "muon.split_over", "muon.state", "muon.overlap"),
        *("muon.buffer_gib", "optimizer.offload", "optimizer.implementation", "loss.chunks"),
    }
)
"""Keys that may change within an experiment, besides the tables below: how far, on what, and how fast a run trains."""

SAME_EXPERIMENT_TABLES = frozenset(
    {"activation_checkpoint", "checkpoint", "comm", "compile", "machine", "metrics", "monitor", "parallelism"}
    | {"placement", "profiler", "validator"}
)


def distinguishing_keys(recipe: Recipe, earlier: Sequence[Path], overrides: Sequence[str]) -> str:
    """`key=value` for the keys that tell a recipe from its file and from earlier runs; empty without any.

    First come `overrides`, the keys that the command line changed. Then come changes of the file, the newest first:
    keys with another value in an earlier run, unless the command line of one of the two runs set the key.

    Args:
        recipe: recipe of the new run.
        earlier: recipe files in the folders of earlier runs, the newest first.
        overrides: dotted keys.
    """
    mine, defaults = written_values(recipe), written_values(Recipe())
    keys = [*overrides]
    for file in earlier[:COMPARED]:
        if (other := _values_of(file)) is not None:
            keys += [key for key in _differing(mine, other, defaults) if key not in _overrides_of(file)]
    pairs = [f"{_short(key, mine)}={_value(mine.get(key))}" for key in dict.fromkeys(keys) if key not in IGNORED]
    name = ""
    for number, pair in enumerate(pairs):
        longer = f"{name},{pair}" if name else pair
        if len(longer) > LONGEST:
            return f"{name},+{len(pairs) - number}"
        name = longer
    return name


def other_experiment(recipe: Recipe, file: Path) -> list[str]:
    """Differences that make an earlier run another experiment, as `muon.lr = 0.001, here 0.02`; empty for the same one.

    Args:
        recipe: recipe of the run that may continue the earlier run.
        file: recipe file in the folder of the earlier run. Without a readable file there is no difference.
    """
    mine, defaults, other = written_values(recipe), written_values(Recipe()), _values_of(file)
    if other is None:
        return []
    may_change = set(SAME_EXPERIMENT)
    keys = _differing(mine, other, defaults)
    if "training.steps" in keys:
        # A schedule follows the number of steps.
        may_change |= {"lr_scheduler.total_steps", "lr_scheduler.warmup_steps"}
    if recipe.training.global_batch_size != -1:
        # Sequences at once of a step whose size is fixed.
        may_change.add("training.local_batch_size")
    return [
        f"{key} = {_text(other.get(key, defaults.get(key)))}, here {_text(mine.get(key))}"
        for key in keys
        if key not in may_change and key.partition(".")[0] not in SAME_EXPERIMENT_TABLES
    ]


def is_same_run(recipe: Recipe, file: Path) -> bool:
    """Whether a run with the recipe file `file` computes and logs the same as a run of `recipe`."""
    other = _values_of(file)
    return other is not None and IGNORED.issuperset(_differing(written_values(recipe), other, written_values(Recipe())))


def _text(value: object) -> str:
    return "absent" if value is None else value_text(value)


def _values_of(file: Path) -> Mapping[str, object] | None:
    """The values of a resolved recipe by dotted key; None for a run that ended before it wrote one."""
    try:
        return {key: entry.value for key, entry in read_file(file).items()}
    except RecipeError:
        return None


def _overrides_of(file: Path) -> frozenset[str]:
    """The keys that the command line changed in the run with the recipe `file`."""
    try:
        return frozenset(file.with_name(OVERRIDES_FILE).read_text(encoding="utf-8").split())
    except OSError:
        return frozenset()


def _differing(mine: Mapping[str, object], other: Mapping[str, object], defaults: Mapping[str, object]) -> list[str]:
    # A recipe of an older version lacks new keys: compare with their defaults.
    return [key for key in {**mine, **other} if mine.get(key) != other.get(key, defaults.get(key))]


def _short(key: str, keys: Mapping[str, object]) -> str:
    """Last word of a key if unique; the table's name for the main key of a table; else the full key."""
    table, _, leaf = key.rpartition(".")
    if any(other.partition(".")[0] == leaf for other in keys):
        return table
    unique = sum(other.rpartition(".")[2] == leaf for other in keys) == 1
    return leaf if unique else key


def _value(value: object) -> str:
    text = value if isinstance(value, str) else _text(value)
    # Brackets and quotes at the ends go. A minus stays: -1 is not 1.
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "-", re.sub(r"^[^A-Za-z0-9_.+-]+|[^A-Za-z0-9_.+-]+$", "", text))
    # A digest distinguishes long values with the same beginning.
    return plain if len(plain) <= LONGEST_VALUE else hashlib.sha256(text.encode()).hexdigest()[:6]
