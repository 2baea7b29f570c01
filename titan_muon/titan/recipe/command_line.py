"""The command line of train.py: which recipe, its overrides, and whether to train it or only to show its plan."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

import tyro

from titan_muon.titan.recipe.files import load
from titan_muon.titan.recipe.flags import SOURCE, print_help, read_flags
from titan_muon.titan.recipe.schema import build, keys, refuse
from titan_muon.titan.recipe.sections import Recipe
from titan_muon.titan.recipe.toml import RecipeError, nearest

HELP = {"-h", "--help"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a recipe, or show its plan. A value is taken from --section.key, else the file, its bases, the default.

    Hyphens and underscores are the same in a flag, and a lone flag means true.
    """

    config: str | None = None
    """Recipe to run: a TOML file. Required."""

    dry_run: bool = False
    """Print the resolved recipe and its plan and stop. Needs neither torchrun nor a GPU."""

    full: bool = False
    """With dry_run: list every parameter instead of one line for all layers."""

    world_size: int | None = None
    """With dry_run: number of ranks to plan for, GPUs unless `device` says otherwise."""

    device: Literal["cpu", "cuda"] | None = None
    """With dry_run: kind of device to plan for. Absent, `cuda` with world_size, else what this machine trains on."""

    json: str | None = None
    """With dry_run: file to write the plan to as JSON."""


@dataclass(frozen=True, kw_only=True)
class Command(Options):
    """What the user asked for: train `recipe`, or with `dry_run` show what training it would do."""

    # Nameless, or tyro would call its flags --recipe.muon.lr.
    recipe: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)


def parse(argv: Sequence[str]) -> Command:
    """The command that `argv` (without the program's name) asks for. `--help` prints and exits with status 0.

    Raises RecipeError, with one message, for any mistake in the flags or in the recipe.
    """
    wants_help = bool(HELP & set(argv))
    entries, overrides = read_flags(Options, Options(), [word for word in argv if word not in HELP])
    options = build(Options, entries)
    _refuse_misspelt(overrides)
    if wants_help:
        # A recipe's help shows the recipe's values, so its mistakes must be said first.
        recipe = Recipe() if options.config is None else load(options.config, overrides)
        print_help(Command, Command(recipe=recipe), inspect.getdoc(Options), prog="train.py")
    if options.config is None:
        raise RecipeError("command line: --config FILE is missing; name a recipe, as in --config configs/NAME.toml.")
    _check(options)
    return Command(recipe=load(options.config, overrides, _notice), **vars(options))


def _notice(line: str) -> None:
    # Every rank reads the same recipe.
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


def _check(options: Options) -> None:
    if options.world_size is not None and options.world_size < 1:
        raise refuse(SOURCE, "world_size", options.world_size, "1 or more")
    needs_dry_run = {
        "--full": options.full,
        "--world-size": options.world_size is not None,
        "--device": options.device is not None,
        "--json": options.json is not None,
    }
    stray = [flag for flag, given in needs_dry_run.items() if given]
    if stray and not options.dry_run:
        raise RecipeError(f"command line: {stray[0]} is only for --dry-run; add --dry-run or leave it out.")


def _refuse_misspelt(overrides: Sequence[str]) -> None:
    """A near miss of one of our own flags is named here, because a recipe's keys would suggest something else."""
    known = ["--" + option.name.replace("_", "-") for option in fields(Options)]
    # --name is a near miss of nothing: it is a key of the recipe.
    recipe_flags = {"--" + key.replace("_", "-") for key in keys(Recipe)}
    for word in overrides:
        flag = word.partition("=")[0].replace("_", "-")
        near = nearest(flag, known) if flag.startswith("--") and "." not in flag else None
        if near and flag not in recipe_flags:
            raise RecipeError(f"command line: unknown flag {word}. Did you mean {near}?")
