"""Trains a recipe, or shows the plan."""

import os
import sys
import time
from collections.abc import Sequence

from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.recipe.command_line import Command, parse
from titan_muon.trainer.recipe.files import import_modules, with_source

SECONDS_TO_PRINT = 2
"""Time for the first rank of a node to print."""


def main(arguments: Sequence[str]) -> int:
    """Command line. Returns the exit code, 2 for a user error."""
    try:
        return train(parse(arguments))
    except RecipeError as error:
        # Mistakes are those of every rank, and torchrun ends the others at the first end.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(SECONDS_TO_PRINT)
    return 2


def train(command: Command) -> int:
    """Train or print the plan. Returns the exit code."""
    assert command.config is not None, "a command without a recipe is refused"
    # Imported here so that --help and errors in the recipe do not wait for PyTorch.
    from titan_muon.trainer.torchtitan import compat

    compat.check_version()
    compat.install()
    import_modules(command.recipe)
    if command.dry_run:
        from titan_muon.trainer.dry_run.report import compare, report

        if command.alternatives:
            print("\n".join(compare(command.alternatives, command.world_size, command.device)))
            return 0
        try:
            report(command)
        except RecipeError as error:
            raise with_source(error, command.sources) from error
        return 0
    from titan_muon.trainer.run import job

    return job.run(command.recipe, command.sources, typed=command.typed, quiet=command.quiet)
