"""Trains a recipe, or shows the plan: `python train.py --config configs/qwen_moe_muon.toml [--dry-run]`."""

import sys

import models  # noqa: F401 (registers the families)
from titan_muon.titan.launch.endings import earlier_end, is_first, record_end
from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.recipe.command_line import Command, parse
from titan_muon.titan.recipe.files import import_modules, with_source


def main(command: Command) -> int:
    """Train or print the plan. Returns the exit code."""
    assert command.config is not None, "a command without a recipe is refused"
    # Imported here so that --help and errors in the recipe do not wait for PyTorch.
    from titan_muon.titan.torchtitan import compat

    compat.check_version()
    compat.install()
    import_modules(command.recipe)
    if command.dry_run:
        from titan_muon.titan.dry_run.compare import compare
        from titan_muon.titan.dry_run.report import report

        if command.alternatives:
            print("\n".join(compare(command.alternatives, command.world_size, command.device)))
            return 0
        try:
            report(command)
        except RecipeError as error:
            raise with_source(error, command.config, command.recipe) from error
        return 0
    from titan_muon.titan.run import job

    return job.run(command.recipe, command.config, typed=command.typed, quiet=command.quiet)


if __name__ == "__main__":
    try:
        # torchrun's restarts would only repeat a refusal or a divergence.
        ended = earlier_end()
        code = main(parse(sys.argv[1:])) if ended is None else ended
    except RecipeError as error:
        code = 2
        # Most mistakes are those of every rank, and torchrun ends the others at the first end.
        first = is_first(str(error))
        record_end(str(error), code, first=first)
        if first:
            print(f"error: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
