"""Commands: compare, sample, evaluate and export, functions with flags; train and sweep, which read recipe keys."""

import sys
from collections.abc import Sequence
from importlib import import_module

import tyro

from titan_muon.trainer.recipe import RecipeError

INTERRUPTED = 130


def start(name: str, arguments: Sequence[str]) -> int:
    """Run the command `name`. Returns the exit code: 2 for a user's mistake, which is one line, and 130 for Ctrl-C."""
    command = import_module(f"{__name__}.{name}")
    try:
        if name in ("train", "sweep"):
            code: int = command.main(arguments)
            return code
        tyro.cli(getattr(command, name), args=arguments, prog=f"titan-muon {name}")
    except RecipeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
