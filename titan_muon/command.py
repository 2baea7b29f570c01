"""The command `titan-muon`: train, plan, compare, sweep, sample, evaluate, export and audit, installed or not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from . import __version__

USAGE = """usage: titan-muon train --config RECIPE [--key=value ...]
       titan-muon plan --config RECIPE [--world-size N] [--key=value ...]
       titan-muon plan CONFIG_JSON --world-size N [--machine M] [--replicas N] [--owned] [--dtype D] [--full]
       titan-muon compare RUN RUN ...
       titan-muon sweep RECIPE KEY=VALUE,VALUE ... [--key=value ...]
       titan-muon sample RUN [--prompt TEXT] [--tokens N] [--temperature T] [--top-k K] [--seed S] [--step N]
       titan-muon evaluate RUN [--step N] [--files PATTERN ...]
       titan-muon export RUN FOLDER [--step N] [--dtype D] [--drop-expert-bias]
       titan-muon audit [--steps N] [--json FILE] [--allow CODE] SCRIPT [ARGUMENT ...]
       titan-muon recipes

RECIPE is a TOML file, or the name of a recipe of this package. CONFIG_JSON is the config.json of a Hugging Face model,
or its folder. On several GPUs:
  torchrun --nproc-per-node 8 -m titan_muon.command train --config RECIPE
"""
COMMANDS = ("train", "plan", "compare", "sweep", "sample", "evaluate", "export")
NEEDED = ("torchtitan", "tyro")
"""Modules of the extra `titan`, required by every command, except for the plan of a config.json."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code, 2 for an invalid command line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = words.pop(0) if words else "--help"
    if verb in ("-h", "--help", "--version", "recipes"):
        names = "\n".join(sorted(path.stem for path in (shipped() / "configs").glob("*.toml")))
        print({"--version": __version__, "recipes": names}.get(verb, USAGE))
        return 0
    if verb == "audit":
        from .audit.__main__ import main as audit

        return audit(words)
    if verb not in COMMANDS:
        choices = ", ".join((*COMMANDS, "audit", "recipes"))
        print(f"titan-muon: {verb!r} is not a command; choose from {choices}", file=sys.stderr)
        return 2
    of_config = verb == "plan" and bool(words) and not words[0].startswith("-")
    drawing = ("matplotlib",) if verb in ("compare", "sweep") else ()
    needed, extra = (("transformers",), "transformers") if of_config else ((*NEEDED, *drawing), "'titan-muon[titan]'")
    if missing := [name for name in needed if find_spec(name) is None]:
        text = f"titan-muon {verb}: needs {', '.join(missing)}; install them by pip install {extra}"
        print(text, file=sys.stderr)
        return 2
    if of_config:
        from .forecast.config_file import main as plan

        return plan(words)
    # By name, because the library imports nothing of the trainer, which needs TorchTitan.
    start = import_module(f"{__package__}.trainer.commands").start
    code: int = start("train", [*words, "--dry-run"]) if verb == "plan" else start(verb, words)
    return code


def shipped() -> Path:
    """Folder of models and configs: within the package in a wheel, otherwise the checkout."""
    package = Path(__file__).parent
    return package / "shipped" if (package / "shipped").is_dir() else package.parent


if __name__ == "__main__":
    sys.exit(main())
