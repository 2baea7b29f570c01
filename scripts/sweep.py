"""Train a grid of recipes, one run after the other, and compare the runs: a table, JSON and a picture.

    python scripts/sweep.py configs/qwen_moe_muon.toml muon.lr=1e-3,2e-3 placement.muon=owned,shard0 training.seed=0,1,2

Several recipes may precede the swept keys, and keys of all runs follow: --training.steps 100. Each run is a process of
train.py, or of torchrun, with an ordinary run folder. Runs are ordered by seed. A repeated command keeps finished runs,
also those that only sweep.json has, and continues an interrupted run from its checkpoint. The report is written after
each run.
"""

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from compare.run_folder import read_series
from compare.sweep_report import Header, Result, final_loss, finished_results, has_seed, write_report

import models  # noqa: F401 (registers the families)
from titan_muon.titan.recipe import Recipe, RecipeError, check_degrees, load
from titan_muon.titan.recipe.command_line import SEEDS, Alternative, alternatives
from titan_muon.titan.recipe.files import written_values
from titan_muon.titan.recipe.flags import HELP, print_flags, read_options
from titan_muon.titan.recipe.schema import values
from titan_muon.titan.run_folder import PLACE, RunFolder, runs_in

STEP = re.compile(r"step +(\d+)/(\d+) ")
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a sweep."""

    out: str = "runs/sweep"
    """Folder for sweep.json, sweep.md and sweep.png."""

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

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the recipe with another value than the default, except the place of the run."""
        defaults = written_values(Recipe())
        mine = {key: value for key, value in written_values(self.recipe).items() if key not in PLACE}
        return {key: value for key, value in mine.items() if value != defaults.get(key)} | {"processes": self.nproc}

    @property
    def folders(self) -> Path:
        """Folder with all runs of the recipe."""
        return Path(self.recipe.dump_folder, self.recipe.name)

    @property
    def log(self) -> Path:
        """Output of the process, removed after a finished run."""
        return self.folders / (re.sub(r"[^\w.=+,-]+", "_", self.name)[-200:] + ".log")

    def folder(self) -> Path | None:
        """Newest run folder of this recipe on as many processes, a finished one before others."""
        mine = (run.path for run in runs_in(self.folders) if self._is_mine(run))
        return max(mine, key=lambda path: (self.ended(path) == "finished", path.name[:15]), default=None)

    def _is_mine(self, run: RunFolder) -> bool:
        try:
            return run.world_size == self.nproc and not run.changes(self.recipe)
        except RecipeError:
            return False

    def ended(self, folder: Path | None) -> str | None:
        """`finished`, or the reason of a divergence; None for a run to train."""
        records = [] if folder is None else RunFolder(folder).records()
        last = {key for record in records if record["step"] == self.recipe.training.steps for key in record}
        if {"loss", "val_loss"} - last <= (set() if self.recipe.validator.enable else {"val_loss"}):
            return "finished"
        return next((str(record["diverged"]) for record in records if "diverged" in record), None)

    def command(self, folder: Path | None) -> list[str]:
        """Command line of the process, which continues the run in `folder` if a checkpoint has steps left."""
        words = [str(ROOT / "train.py"), "--config", self.choice.config, *self.choice.overrides]
        steps = [] if folder is None else RunFolder(folder).steps
        if max(steps, default=self.recipe.training.steps) < self.recipe.training.steps:
            words += ["--checkpoint.load", str(folder)]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.nproc}"]
        return [sys.executable, *(launcher if self.nproc > 1 else []), *words]

    def result(self, folder: Path | None, error: str | None) -> Result:
        """The result, with the curves of the run's folder."""
        swept = dict(part.split("=", 1) for part in self.choice.name.split(" ") if part)
        series = {} if folder is None or error is not None else read_series(RunFolder(folder))
        return Result(
            recipe=self.recipe.name,
            keys=self.keys,
            setting={key: value for key, value in swept.items() if not has_seed(key)},
            seed={key: value for key, value in swept.items() if has_seed(key)},
            error=error,
            tokens=int(max(series.get("tokens", {}).values(), default=0)),
            step_seconds=_median(series.get("time.step", {})),
            optimizer_seconds=_median(series.get("time.optimizer", {})),
            loss=series.get("loss", {}),
            val_loss=series.get("val_loss", {}),
        )


def _median(series: Mapping[float, float]) -> float | None:
    """Without the first record, of steps that allocate and compile."""
    return median(list(series.values())[1:]) if len(series) > 1 else None


def plan(configs: Sequence[str], swept: Sequence[str], overrides: Sequence[str], nproc: int) -> list[Run]:
    """All runs, seed by seed, so that an interrupted sweep has whole seeds. Raises RecipeError for any bad recipe."""
    runs: list[Run] = []
    known: dict[str, str] = {}
    notices: dict[str, None] = {}
    for config in configs:
        for choice in alternatives(config, swept, overrides) or (Alternative("", config, tuple(overrides)),):
            run = Run(choice, load(config, choice.overrides, lambda line: notices.setdefault(line)), nproc)
            check_degrees(run.recipe, nproc)
            # Equal values may be written differently, as 1e-3 and 0.001.
            content = repr({key: value for key, value in values(run.recipe).items() if key != "dump_folder"})
            if content in known:
                raise RecipeError(f"{run.name}: the same run as {known[content]}; leave out either.")
            known[content] = run.name
            runs.append(run)
    print("".join(f"{line}\n" for line in notices), end="")
    return sorted(runs, key=lambda run: [values(run.recipe)[key] for key in SEEDS])


class Progress:
    """Lines about runs, and on a terminal a live line with the time left."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.left = list(runs)
        self.total = len(runs)
        self.seconds: dict[str, list[float]] = {}

    def say(self, run: Run, text: str, end: str = "\n") -> None:
        """Print a line about the run, over the live line."""
        clear = "\r\033[K" if sys.stdout.isatty() else ""
        print(f"{clear}[{self.total - len(self.left) + 1}/{self.total}] {run.name}: {text}", end=end, flush=True)

    def watch(self, run: Run, line: str) -> None:
        """Show a line of output of train.py."""
        if sys.stdout.isatty() and (step := STEP.search(line)):
            self.say(run, f"step {step[1]}/{step[2]}{self.remaining(self.left)}", end="")

    def end(self, run: Run, outcome: str) -> None:
        """Print the outcome of the run, the first of the runs left."""
        self.say(run, outcome + self.remaining(self.left[1:]))
        self.left.remove(run)

    def remaining(self, runs: Sequence[Run]) -> str:
        """Time of `runs`, estimated from earlier runs of the same recipes; empty before the first one ended."""
        known = {name: mean(seconds) for name, seconds in self.seconds.items()}
        if not known or not runs:
            return ""
        seconds = sum(known.get(run.recipe.name, mean(known.values())) for run in runs)
        return f"; {timedelta(seconds=round(seconds))} left"


def train(run: Run, folder: Path | None, watch: Callable[[Run, str], None]) -> str | None:
    """Train a run in a process of its own. Returns the error, None for none; after Ctrl+C the process ends first."""
    run.folders.mkdir(parents=True, exist_ok=True)
    last = ""
    with run.log.open("a", encoding="utf-8") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"another process trains this run ({run.log}); repeat the sweep after its end"
        log.truncate(0)
        # In a session of its own: Ctrl+C reaches the sweep alone, and the process gets the time to save. The process
        # inherits the lock, because it may outlive a killed sweep.
        with subprocess.Popen(
            run.command(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            pass_fds=[log.fileno()],
        ) as process:
            assert process.stdout is not None, "stdout is a pipe"
            try:
                for line in process.stdout:
                    log.write(line)
                    watch(run, line)
                    last = line.strip() if line.startswith("error: ") or not last.startswith("error: ") else last
            except KeyboardInterrupt:
                print("\nstopping the run", flush=True)
                process.terminate()
                try:
                    process.communicate()
                except KeyboardInterrupt:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    if process.returncode == 0:
        run.log.unlink()
        return None
    return f"{last.removeprefix('error: ')} (exit code {process.returncode}; {run.log})"


def sweep(runs: Sequence[Run], report: Callable[[list[Result]], object], kept: Sequence[Result]) -> int:
    """Train the runs that `kept` lacks, and `report` the results after each. Returns the exit code: 1 if a run failed,
    130 after Ctrl+C.
    """
    progress, code = Progress(runs), 0
    by_run = {run.name: result for run in runs for result in kept if result.keys == run.keys}
    try:
        for run in runs:
            if run.name in by_run:
                progress.end(run, f"loss {final_loss(by_run[run.name]):.4f}, in the report before")
                continue
            folder = run.folder()
            begin, ended, error = time.monotonic(), run.ended(folder), None
            took = "finished before"
            if ended is None:
                if folder is not None:
                    resumed = "continues from its checkpoint" if "--checkpoint.load" in run.command(folder) else "anew"
                    progress.say(run, f"was interrupted in {folder.name}: {resumed}")
                error = train(run, folder, progress.watch)
                folder = run.folder()
                ended = run.ended(folder)
                took = f"{time.monotonic() - begin:.0f} s"
                progress.seconds.setdefault(run.recipe.name, []).append(time.monotonic() - begin)
            if ended != "finished":
                code, error = 1, error or ended or "ended before its last step"
            result = by_run[run.name] = run.result(folder, error)
            progress.end(run, f"failed: {error}" if error is not None else f"loss {final_loss(result):.4f}, {took}")
            report(_ordered(runs, by_run))
    except KeyboardInterrupt:
        code = INTERRUPTED
        # Runs of an earlier command may be finished out of order.
        folders = {run.name: run.folder() for run in progress.left if run.name not in by_run}
        by_run |= {
            run.name: run.result(folders[run.name], None)
            for run in progress.left
            if run.name in folders and run.ended(folders[run.name]) == "finished"
        }
    report(_ordered(runs, by_run))
    return code


def _ordered(runs: Sequence[Run], results: Mapping[str, Result]) -> list[Result]:
    return [results[run.name] for run in runs if run.name in results]


def main(arguments: Sequence[str]) -> int:
    """Command line. Returns the exit code, 2 for a user error."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    if HELP & set(arguments) or not words:
        print_flags(Options, Options(), "sweep.py CONFIG ... KEY=VALUE,VALUE ...", __doc__)
    try:
        options, overrides = read_options(Options, arguments[len(words) :])
        configs = list(takewhile(lambda word: "=" not in word, words))
        if not configs or options.nproc < 1:
            raise RecipeError("name a recipe first, as in configs/qwen_moe_muon.toml, and --nproc of 1 or more")
        runs = plan(configs, words[len(configs) :], overrides, options.nproc)
    except RecipeError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print("\n".join([*(run.name for run in runs), f"{len(runs)} runs of {options.nproc} process(es) each"]))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = shlex.join(["python", "scripts/sweep.py", *arguments])
    folder, header = Path(options.out), Header.now(command, len(runs), options.nproc)
    shown = ""

    def report(results: Sequence[Result]) -> None:
        nonlocal shown
        shown = write_report(folder, header, results)

    code = sweep(runs, report, finished_results(folder))
    print(shown)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
