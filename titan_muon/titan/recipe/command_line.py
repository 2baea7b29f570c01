"""The command line of train.py: a recipe, overrides, and train or dry run."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import tyro

from titan_muon.command import shipped
from titan_muon.titan.recipe.files import load
from titan_muon.titan.recipe.flags import SOURCE, print_completion, print_help, read_flags
from titan_muon.titan.recipe.schema import build, keys, refuse, unknown
from titan_muon.titan.recipe.sections import Recipe
from titan_muon.titan.recipe.toml import RecipeError, nearest, read_file

HELP = {"-h", "--help"}
FOR_TRAINING = ("config", "dry_run", "quiet", "completion")
SEED, SEEDS = "training.seed", ("debug.seed", "data.seed")
"""`--compare training.seed=...` sets both seeds."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a recipe, or show its plan. Precedence: --section.key, the file, bases of the file, defaults.

    Hyphens and underscores are equal in a flag. A flag without a value means true. `--help muon` shows a table's keys.
    """

    config: str | None = None  # Recipe to run: a TOML file, or the name of a recipe of this package. Required.
    dry_run: bool = False  # Print the resolved recipe and the plan, and stop. Needs neither torchrun nor a GPU.
    full: bool = False  # With dry_run: list every parameter instead of one line for all layers.
    world_size: int | None = None  # With dry_run: number of ranks to plan for, GPUs unless `device` is set.

    device: Literal["cpu", "cuda"] | None = None
    """With dry_run: device to plan for. Absent: `cuda` with world_size, else this machine's device."""

    json: str | None = None  # With dry_run: JSON file for the plan.
    machine: str | None = None  # With dry_run: machine to plan for, short for `--machine.name`.
    verbose: bool = False  # With dry_run: print the recipe with all defaults first.

    compare: tuple[str, ...] = ()
    """With dry_run: keys with alternatives, as in `placement.muon=owned,shard0`; a table of all combinations."""

    quiet: bool = False  # Print errors, warnings and the summary at the end only.

    completion: Literal["bash", "zsh", "tcsh"] | None = None
    """Print a script that completes flags of `titan-muon` in this shell, and stop."""

    html: str | None = None  # With dry_run: file for a page with verdict, timeline, parameters and recipe.


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


def parse(argv: Sequence[str]) -> Command:
    """Parse `argv` (without the program's name). `--help` and `--help TABLE` print, and exit with status 0.

    Raises RecipeError for any mistake in the flags or the recipe.
    """
    wants_help = bool(HELP & set(argv))
    after = [word for before, word in pairwise(argv) if before in HELP and not word.startswith("-")]
    entries, overrides = read_flags(Options, Options(), [word for word in argv if word not in {*HELP, *after}])
    options = build(Options, entries)
    if options.config is not None:
        options = replace(options, config=_file(options.config))
    if options.completion is not None:
        print_completion(Command, Command(), options.completion, prog="titan-muon")
    _refuse_misspelt(overrides)
    if wants_help:
        # The help shows the recipe's values, so its errors come first.
        recipe = Recipe() if options.config is None else load(options.config, overrides)
        kinds = get_type_hints(Recipe)
        if asked := [_table(word) for word in after]:
            tables = [(name, kinds[name], field(default=getattr(recipe, name))) for name in asked]
            shown = make_dataclass("Tables", tables)
            print_help(shown, shown(), f"The keys of {', '.join(asked)}.", prog="train.py")
        print_help(Command, Command(recipe=recipe), inspect.getdoc(Options), prog="train.py")
    if options.config is None:
        example = next((word for word in overrides if word.endswith(".toml")), "configs/NAME.toml")
        raise RecipeError(f"command line: --config FILE is missing; name a recipe, as in --config {example}.")
    _check(options)
    if options.machine is not None:
        overrides = [*overrides, "--machine.name", options.machine]
    recipe = load(options.config, overrides, (lambda line: None) if options.quiet else _notice)
    if not read_file(Path(options.config)):
        raise RecipeError(f"{options.config}: the recipe has no key; write at least name and flavor under [model].")
    choices = alternatives(options.config, options.compare, overrides)
    return Command(recipe=recipe, alternatives=choices, **vars(options))


def alternatives(config: str, swept: Sequence[str], overrides: Sequence[str]) -> tuple[Alternative, ...]:
    """Every combination of the values in `swept`, the first word varying slowest.

    A word is `KEY=VALUE,VALUE` or, for keys with equal values, `KEY+KEY=VALUE,VALUE`. Raises RecipeError for an unknown
    key, an absent value, and a key that is set twice.
    """
    choices: list[list[tuple[str, str]]] = []
    known, fixed = list(keys(Recipe)), list(read_flags(Recipe, Recipe(), overrides)[0])
    for word in swept:
        names, _, listed = word.partition("=")
        values = listed.split(",")
        if not all(values):
            raise RecipeError(f"command line: {word}: write KEY=VALUE,VALUE, as in placement.muon=owned,shard0.")
        for key in _keys(names):
            if key not in known:
                raise unknown(SOURCE, key, listed, known)
            if key in fixed:
                raise RecipeError(f"command line: {key} is set twice; leave out {word}, or the other values.")
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


def _file(config: str) -> str:
    """The path of a recipe, also for the name of a recipe of this package."""
    packaged = shipped() / "configs" / f"{config.removesuffix('.toml')}.toml"
    return str(packaged) if packaged.exists() and not Path(config).exists() else config


def _table(word: str) -> str:
    """The table of a table's name or a key, for the help. Raises RecipeError for an unknown word."""
    known, (table, _, leaf) = list(keys(Recipe)), word.partition(".")
    if word not in known and (leaf or not any(key.startswith(f"{table}.") for key in known)):
        raise unknown(SOURCE, word, None, known)
    return table


def _notice(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _check(options: Options) -> None:
    if options.world_size is not None and options.world_size < 1:
        raise refuse(SOURCE, "world_size", options.world_size, "1 or more")
    for option in fields(Options) if not options.dry_run else ():
        if option.name not in FOR_TRAINING and getattr(options, option.name) != option.default:
            flag = option.name.replace("_", "-")
            raise RecipeError(f"command line: --{flag} is only for --dry-run; add --dry-run or leave it out.")
    if options.quiet and options.dry_run:
        raise RecipeError("command line: --quiet is for training; a dry run only prints. Leave one of them out.")


def _refuse_misspelt(overrides: Sequence[str]) -> None:
    """Raise RecipeError with the most similar flag of `Options`."""
    known = ["--" + option.name.replace("_", "-") for option in fields(Options)]
    # Such as --name.
    recipe_flags = {"--" + key.replace("_", "-") for key in keys(Recipe)}
    for word in overrides:
        flag = word.partition("=")[0].replace("_", "-")
        suggestion = nearest(flag, known) if flag.startswith("--") and "." not in flag else None
        if suggestion and flag not in recipe_flags:
            raise RecipeError(f"command line: unknown flag {word}. Did you mean {suggestion}?")
