"""The command line of a script on a saved run. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import tyro

from titan_muon.trainer.recipe import RecipeError


def run_command(act: Callable[..., None], arguments: Sequence[str] | None) -> int:
    """Call `act` with the arguments of the command line. Returns the exit code, 2 for a user error."""
    try:
        tyro.cli(act, args=arguments)
    except RecipeError as error:
        print(f"{act.__name__}: {error}", file=sys.stderr)
        return 2
    return 0
