"""Train a grid of recipes, one run after the other, and compare the finished runs.

    titan-muon sweep configs/qwen_moe_muon.toml muon.lr=1e-3,2e-3 placement.muon=owned,shard0 training.seed=0,1,2

Several recipes may precede the swept keys, and keys of all runs follow: --training.steps 100. Each run is a process of
`titan-muon train`, or of torchrun, with an ordinary run folder. Runs are ordered by seed. A repeated command keeps
finished runs and continues others with --checkpoint.load latest. `titan-muon compare` prints the table and draws the
picture.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from titan_muon.trainer.commands import compare
from titan_muon.trainer.recipe import Recipe, RecipeError, check_degrees, load
from titan_muon.trainer.recipe.command_line import SEEDS, Alternative, alternatives
from titan_muon.trainer.recipe.flags import HELP, print_flags, read_options
from titan_muon.trainer.recipe.schema import values
from titan_muon.trainer.run_folder import RunFolder, runs_in


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a sweep."""

    nproc: int = 1
    """Processes of each run; more than 1 are started by torchrun."""

    dry_run: bool = False
    """Check every recipe, list the runs, and stop."""


@dataclass(frozen=True)
class Run:
    """A run of the sweep: its place in the grid, and its recipe."""

    choice: Alternative
    recipe: Recipe
    nproc: int

    @property
    def name(self) -> str:
        return f"{self.recipe.name} {self.choice.name}".strip()

    def finished(self) -> Path | None:
        """Folder of a run of this recipe that reached the last step on as many processes."""
        for run in runs_in(Path(self.recipe.dump_folder, self.recipe.name)):
            with suppress(RecipeError):
                if run.world_size == self.nproc and not run.changes(self.recipe) and self._is_finished(run):
                    return run.path
        return None

    def _is_finished(self, run: RunFolder) -> bool:
        last = {key for record in run.records() if record["step"] == self.recipe.training.steps for key in record}
        return {"loss", "val_loss"} - last <= (set() if self.recipe.validator.enable else {"val_loss"})

    @property
    def command(self) -> list[str]:
        """Command line of the process."""
        words = ["-m", "titan_muon.command", "train", "--config", self.choice.config, *self.choice.overrides]
        if self.recipe.checkpoint.enable and self.recipe.checkpoint.load == "none":
            words += ["--checkpoint.load", "latest"]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.nproc}"]
        return [sys.executable, *(launcher if self.nproc > 1 else []), *words]


def plan(configs: Sequence[str], swept: Sequence[str], overrides: Sequence[str], nproc: int) -> list[Run]:
    """All runs, seed by seed, so that an interrupted sweep has whole seeds. Raises RecipeError for any bad recipe."""
    runs: list[Run] = []
    known: dict[str, str] = {}
    for config in configs:
        for choice in alternatives(config, swept, overrides) or (Alternative("", config, tuple(overrides)),):
            run = Run(choice, load(config, choice.overrides), nproc)
            check_degrees(run.recipe, nproc)
            # Equal values may be written differently, as 1e-3 and 0.001.
            content = repr({key: value for key, value in values(run.recipe).items() if key != "dump_folder"})
            if content in known:
                raise RecipeError(f"{run.name}: the same run as {known[content]}; leave out either.")
            known[content] = run.name
            runs.append(run)
    return sorted(runs, key=lambda run: [values(run.recipe)[key] for key in SEEDS])


def sweep(runs: Sequence[Run]) -> int:
    """Train the runs that are not finished, and compare the finished ones. Returns the exit code: 1 if a run failed."""
    failed = []
    for number, run in enumerate(runs, start=1):
        place = f"[{number}/{len(runs)}] {run.name}"
        if (folder := run.finished()) is not None:
            print(f"{place}: finished before in {folder}", flush=True)
            continue
        print(f"{place}: {shlex.join(run.command)}", flush=True)
        # Ctrl-C reaches both: the trainer saves, and the sweep waits for it.
        code = subprocess.run(run.command, check=False).returncode
        if code != 0 or run.finished() is None:
            failed.append(f"{place}: " + (f"failed with exit code {code}" if code else "stopped; repeat it to go on"))
    folders = [folder for run in runs if (folder := run.finished()) is not None]
    for line in failed:
        print(line, file=sys.stderr)
    if len(folders) > 1:
        compare.compare(tuple(folders))
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Command line. Returns the exit code: 1 if a run failed."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    if HELP & set(arguments) or not words:
        print_flags(Options, Options(), "titan-muon sweep RECIPE ... KEY=VALUE,VALUE ...", __doc__)
    options, overrides = read_options(Options, arguments[len(words) :])
    configs = list(takewhile(lambda word: "=" not in word, words))
    if not configs or options.nproc < 1:
        raise RecipeError("name a recipe first, as in configs/qwen_moe_muon.toml, and --nproc of 1 or more")
    runs = plan(configs, words[len(configs) :], overrides, options.nproc)
    if options.dry_run:
        print("\n".join([*(run.name for run in runs), f"{len(runs)} runs of {options.nproc} process(es) each"]))
        return 0
    return sweep(runs)
