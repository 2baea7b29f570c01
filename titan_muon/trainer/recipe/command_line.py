"""The command line of train.py: a recipe, overrides, and train or dry run."""

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from titan_muon.ranges import COUNT
from titan_muon.trainer.recipe.files import load, load_with_sources
from titan_muon.trainer.recipe.flags import HELP, SOURCE, print_flags, read_flags, read_options
from titan_muon.trainer.recipe.schema import keys, unknown, values
from titan_muon.trainer.recipe.sections import Recipe
from titan_muon.trainer.recipe.toml import RecipeError, recipe_file, value_text

FOR_TRAINING = ("config", "dry_run", "quiet")
SEED, SEEDS = "training.seed", ("debug.seed", "data.seed")
"""`--compare training.seed=...` sets both seeds."""

MOST_USED = """
model name flavor
data source files tokenizer tokenizer_path
training steps seq_len global_batch_size local_batch_size max_norm mixed_precision_param
parallelism data_parallel_shard_degree data_parallel_replicate_degree tensor_parallel_degree
parallelism expert_parallel_degree context_parallel_degree pipeline_parallel_degree
placement muon
muon lr momentum nesterov weight_decay ns_steps ns_coefficients adjust_lr_fn algorithm
muon beta2 momentum_start momentum_warmup_steps cautious overlap state state_dtype
adamw lr betas weight_decay
optimizer offload
lr_scheduler warmup_steps decay_ratio min_lr_factor
activation_checkpoint mode
validator freq
checkpoint enable freq load
metrics log_freq enable_tensorboard enable_wandb
debug seed
"""
"""Tables with keys: at most 60, so that they and SHORT_HELP fit a screen of 80 lines."""

SHORT_HELP = """train.py --config RECIPE [--TABLE.KEY VALUE ...]

  --config FILE         a TOML file, or the name of a recipe of this package
  --dry-run             print the recipe's plan and stop; needs neither torchrun nor a GPU
  --world-size N        with --dry-run: ranks to plan for
  --compare KEY=A,B     with --dry-run: a table of alternatives
  --quiet               print errors, warnings and the summary at the end only
  --help TABLE          every key of a table, with its meaning
  --help all            all {count} keys and all flags, with their meanings

A list is written `1,2` or `1 2`. The most used keys, with {values}:
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a recipe, or show its plan. Precedence: --section.key, the file, bases of the file, defaults.

    Hyphens and underscores are equal in a flag. A flag without a value means true. `--help muon` shows a
    table's keys, `--help all` every key.
    """

    config: str | None = None  # Recipe to run: a TOML file, or the name of a recipe of this package. Required.
    dry_run: bool = False  # Print the resolved recipe and the plan, and stop. Needs neither torchrun nor a GPU.
    full: bool = False  # With dry_run: list every parameter instead of one line for all layers.

    world_size: Annotated[int, COUNT] | None = None
    """With dry_run: number of ranks to plan for, GPUs unless `device` is set."""

    device: Literal["cpu", "cuda"] | None = None
    """With dry_run: device to plan for. Absent: `cuda` with world_size, else this machine's device."""

    json: str | None = None  # With dry_run: JSON file for the plan.
    machine: str | None = None  # With dry_run: machine to plan for, short for `--machine.name`.
    verbose: bool = False  # With dry_run: print the recipe with all defaults first.

    compare: tuple[str, ...] = ()
    """With dry_run: keys with alternatives, as in `placement.muon=owned,shard0`; a table of all combinations."""

    quiet: bool = False  # Print errors, warnings and the summary at the end only.


@dataclass(frozen=True)
class Alternative:
    """A recipe of a comparison, named after its overrides."""

    name: str
    config: str
    overrides: tuple[str, ...]

    def load(self) -> Recipe:
        return load(self.config, self.overrides)


@dataclass(frozen=True, kw_only=True)
class Command(Options):
    """Parsed command line."""

    # Flags are --muon.lr, not --recipe.muon.lr.
    recipe: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)

    alternatives: Annotated[tuple[Alternative, ...], tyro.conf.Suppress] = ()
    typed: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """Keys of the command line."""
    sources: Annotated[Mapping[str, str], tyro.conf.Suppress] = field(default_factory=dict)
    """The file or command line with each given key."""


def parse(argv: Sequence[str]) -> Command:
    """Parse `argv` (without the program's name). `--help`, `--help TABLE` and `--help all` print and exit with 0.

    Raises RecipeError for any mistake in the flags or the recipe.
    """
    asked = [word for before, word in pairwise(argv) if before in HELP and not word.startswith("-")]
    options, overrides = read_options(Options, [word for word in argv if word not in {*HELP, *asked}])
    if options.config is not None:
        options = replace(options, config=str(recipe_file(options.config, Path())))
    known = [*keys(Options), *keys(Recipe)]
    for key, entry in read_flags(overrides).items():
        if key not in known:
            raise unknown(SOURCE, key, entry.value, known)
    if HELP & set(argv):
        # The help shows the recipe's values, so its errors come first.
        given = options.config is not None
        _print_help(asked, load(options.config, overrides) if options.config else Recipe(), given=given)
    if options.config is None:
        raise RecipeError("--config FILE is missing; name a recipe, as in --config configs/NAME.toml.", source=SOURCE)
    _check(options)
    if options.machine is not None:
        overrides = [*overrides, "--machine.name", options.machine]
    notice = (lambda line: None) if options.quiet else _notice
    recipe, sources = load_with_sources(options.config, overrides, notice)
    if all(source == SOURCE for source in sources.values()):
        raise RecipeError("the recipe has no key; write at least name and flavor under [model].", source=options.config)
    choices = alternatives(options.config, options.compare, overrides)
    typed = tuple(read_flags(overrides))
    return Command(recipe=recipe, alternatives=choices, typed=typed, sources=sources, **vars(options))


def _print_help(asked: Sequence[str], recipe: Recipe, *, given: bool) -> None:
    """Print the flags of the asked tables, of the tables of asked keys, of `all`, or the short help, and exit.

    `given`: whether the recipe is the user's.
    """
    kinds, known = get_type_hints(Recipe), list(keys(Recipe))
    if not asked:
        print(short_help(recipe, "their values in this recipe" if given else "their defaults"))
        sys.exit()
    tables: dict[str, Any] = {}
    for word in asked if [*asked] != ["all"] else ():
        table = word.partition(".")[0]
        if word not in known and not any(key.startswith(f"{word}.") for key in known):
            raise unknown(SOURCE, word, (), known)
        tables[table] = getattr(recipe, table)
    if tables:
        shown = make_dataclass("Tables", [(name, kinds[name], field(default=tables[name])) for name in tables])
        print_flags(shown, shown(), "train.py", f"The keys of {', '.join(tables)}.")
    print_flags(Command, Command(recipe=recipe), "train.py", inspect.getdoc(Options))


def short_help(recipe: Recipe, values_of: str) -> str:
    """SHORT_HELP, and a line for each of MOST_USED with the value of `recipe`. `values_of`: says whose values."""
    current = values(recipe)
    rows = [line.split() for line in MOST_USED.strip().splitlines()]
    names = [f"{table}.{key}" for table, *chosen in rows for key in chosen]
    width = max(map(len, names))
    lines = [
        f"  --{name:<{width}}  {'not given' if current[name] is None else value_text(current[name])}" for name in names
    ]
    return SHORT_HELP.format(count=len(keys(Recipe)), values=values_of) + "\n".join(lines)


def alternatives(config: str, swept: Sequence[str], overrides: Sequence[str]) -> tuple[Alternative, ...]:
    """Every combination of the values in `swept`, the first word varying slowest.

    A word is `KEY=VALUE,VALUE` or, for keys with equal values, `KEY+KEY=VALUE,VALUE`. Raises RecipeError for an unknown
    key, an absent value, and a key that is set twice.
    """
    choices: list[list[tuple[str, str]]] = []
    known, fixed = list(keys(Recipe)), list(read_flags(overrides))
    for word in swept:
        names, _, listed = word.partition("=")
        values = listed.split(",")
        if not all(values):
            raise RecipeError(f"{word}: write KEY=VALUE,VALUE, as in placement.muon=owned,shard0.", source=SOURCE)
        for key in _keys(names):
            if key not in known:
                raise unknown(SOURCE, key, listed, known)
            if key in fixed:
                raise RecipeError(f"{key} is set twice; leave out {word}, or the other values.", source=SOURCE)
            fixed.append(key)
        choices.append([(names, value) for value in values])
    return tuple(
        Alternative(
            " ".join(f"{names}={value}" for names, value in chosen),
            config,
            (*overrides, *(word for names, value in chosen for key in _keys(names) for word in (f"--{key}", value))),
        )
        for chosen in product(*choices)
        if chosen
    )


def _keys(names: str) -> list[str]:
    return [key for name in names.split("+") for key in (SEEDS if name == SEED else (name,))]


def _notice(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _check(options: Options) -> None:
    for option in fields(Options) if not options.dry_run else ():
        if option.name not in FOR_TRAINING and getattr(options, option.name) != option.default:
            flag = option.name.replace("_", "-")
            raise RecipeError(f"--{flag} is only for --dry-run; add --dry-run or leave it out.", source=SOURCE)
    printed = ("json", "full", "verbose")
    given = [name for name in printed if getattr(options, name) not in (None, False)]
    if options.compare and given:
        raise RecipeError(f"--compare prints a table only; leave out --{given[0]}.", source=SOURCE)
    if options.quiet and options.dry_run:
        raise RecipeError("--quiet is for training; a dry run only prints. Leave one of them out.", source=SOURCE)
