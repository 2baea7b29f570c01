"""Runs parts on this machine's GPUs in order, and renews the results after each part: `make gpu`.

    python -m benchmarks.gpu.run --call 1                  # the first of three calls for one GPU, each within 7 minutes
    python -m benchmarks.gpu.run                           # all parts, without a limit for all together
    python -m benchmarks.gpu.run --parts links --again     # repeat one part

A part runs once per combination of GPUs, PyTorch and commit, until it passes. Without a GPU each part's rehearsal runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.environment import ROOT, Environment, ask, choose, variables
from benchmarks.gpu.parts import CALLS, PARTS, Part, chosen
from benchmarks.gpu.results import FILE, Outcome, Result, read, write
from benchmarks.processes import run_within

REHEARSED = "no GPU: rehearsed on the CPU and on fake tensors, nothing was measured"
LOG_CHARACTERS = 8000
LIMIT = 400
"""Seconds of a call. Ending a part may take 20 s more, so that a call ends within 7 minutes."""
LEAST_SECONDS = 5
"""Shortest rest of a call in which a part starts."""
WHEELS = ROOT / ".cache/wheels"
"""Packages that `make gpu-wheels` collected, for machines without a network."""
RATE = "2e-3"
"""Learning rate of the long training without a sweep."""


@dataclass(frozen=True)
class Place:
    """Where a run works.

    Attributes:
        folder: for the results, at most 8 files.
        work: for logs and figures, which the archive holds.
        packages: further folders to import from.
        end: `time.monotonic` at the end of the call; None without a limit.
    """

    folder: Path
    work: Path
    packages: tuple[Path, ...] = ()
    end: float | None = None

    def seconds(self, part: Part, environment: Environment) -> int:
        """Time-out of a part here: its own, or the rest of the call."""
        own = part.seconds if environment.gpus else part.rehearsal_seconds
        return own if self.end is None else min(own, int(self.end - time.monotonic()))


def obstacle(part: Part, environment: Environment) -> str:
    """Reason why a part cannot run here, or empty."""
    missing = [name for name in part.needs if name not in environment.packages]
    if missing:
        return f"needs the package {', '.join(missing)}"
    if environment.gpus and len(environment.gpus) < part.least_gpus:
        return f"needs {part.least_gpus} GPUs, and there is {len(environment.gpus)}"
    return ""


def command_of(part: Part, environment: Environment, place: Place) -> tuple[str, ...]:
    """Words of a part's command in this environment."""
    muon, adamw = best_rates(place.folder)
    values: Mapping[str, object] = {
        "python": environment.executable,
        "ranks": environment.ranks,
        "exchanging_ranks": environment.exchanging_ranks,
        # The part then ends by itself, with all of its figures.
        "seconds": max(1, place.seconds(part, environment) - part.ending_seconds),
        "json": place.work / f"{part.name}.figures",
        "folder": place.work / part.name,
        "muon": muon,
        "adamw": adamw,
    }
    words = part.command if environment.gpus else part.rehearsal
    return tuple(filled(word, values) for word in words)


def filled(word: str, values: Mapping[str, object]) -> str:
    """A word with its `{names}` replaced; other braces stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


def best_rates(folder: Path) -> tuple[str, str]:
    """Learning rates for a long training of Muon and AdamW: MUON and ADAMW, or the best of the sweep."""
    sweep = read(folder / FILE).get("sweep")
    best = report.best_rates(sweep.figures) if sweep is not None else {}
    return tuple(os.environ.get(name.upper()) or best.get(name, RATE) for name in ("muon", "adamw"))  # type: ignore[return-value]


def run_part(part: Part, environment: Environment, place: Place) -> Result:
    """Run a part with a time-out. Returns a result with figures and the end of the log for any outcome."""
    reason, most = obstacle(part, environment), place.seconds(part, environment)
    if not reason and place.end is not None and most < LEAST_SECONDS:
        reason = "no time left in this call"
    if reason:
        return Result(part.name, Outcome.NOT_RUN, reason, 0.0, (), environment)
    command = command_of(part, environment, place)
    figures, log = place.work / f"{part.name}.figures", place.work / f"{part.name}.log"
    begin = time.monotonic()
    code = run_within(most, command, log, ROOT, variables(place.packages))
    seconds = time.monotonic() - begin
    read, unreadable = report.read_json(figures)
    if code is None:
        outcome, reason = Outcome.OUT_OF_TIME, f"did not end in {most} s"
    elif code != 0:
        outcome, reason = Outcome.FAILED, f"exit code {code}, see {log.name} in {report.ARCHIVE}"
    elif unreadable:
        outcome, reason = Outcome.FAILED, unreadable
    else:
        outcome = Outcome.PASSED
    end = log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
    return Result(part.name, outcome, reason, seconds, command, environment, read, end)


def run_all(parts: Sequence[Part], environment: Environment, place: Place, *, again: bool) -> list[Result]:
    """Run the parts in order, also after failures, and save every result at once."""
    results, kept = [], read(place.folder / FILE)
    for number, part in enumerate(parts, 1):
        print(f"[{number}/{len(parts)}] {part.name}: {part.shows}", flush=True)
        old = kept.get(part.name)
        if old is not None and old.outcome is Outcome.PASSED and old.environment.same(environment) and not again:
            print(f"    passed before, in {old.seconds:.0f} s; --again runs it once more", flush=True)
            results.append(old)
            continue
        print(f"    at most {max(0, place.seconds(part, environment))} s", flush=True)
        result = run_part(part, environment, place)
        kept[part.name] = result
        write(kept.values(), place.folder)
        report.write_report(kept, environment, place.folder, place.work)
        print(f"    {outcome_text(result)}", flush=True)
        results.append(result)
    return results


def outcome_text(result: Result) -> str:
    """A result in a line, with the end of a failure's log."""
    line = result.outcome + (f": {result.reason}" if result.reason else f" in {result.seconds:.0f} s")
    return line + ("\n" + "\n".join(result.log.splitlines()[-12:]) if result.bad else "")


def open_folder(folder: Path) -> None:
    """Make the output folder. Raises ValueError if the folder is not writable."""
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be written to ({error.strerror}); name another folder") from error


def with_wheels(environment: Environment, target: Path, wheels: Path = WHEELS) -> tuple[Environment, tuple[Path, ...]]:
    """The environment with the collected wheels, and the folder to import them from. Needs no network.

    Without them if pip refuses one; parts then name the packages that they lack.
    """
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return environment, ()
    options = ("-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(target))
    command = [environment.executable, "-m", "pip", "install", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        problem = f"{wheels}: not used, because pip of {environment.executable} refuses: {done.stderr.strip()[-300:]}"
        print(f"{problem}\n    make gpu-wheels WHEEL_PYTHON={environment.python} collects fitting ones", flush=True)
        return environment, ()
    return ask(environment.executable, (target,)), (target,)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__.split("\n")[0])
    out = Path(os.environ.get("OUT") or ROOT / "build/gpu")
    parser.add_argument("--call", type=int, choices=CALLS, help="parts of a call for one GPU, and its limit")
    parser.add_argument("--limit", type=int, default=int(os.environ.get("LIMIT") or LIMIT), help="seconds of a call")
    parser.add_argument("--out", type=Path, default=out, help="folder for the results")
    parser.add_argument("--parts", nargs="*", default=[], help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--again", action="store_true", help="run parts that have passed here too")
    parser.add_argument("--python", default="", help="interpreter with PyTorch; by default the first with a GPU")
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="cpu: rehearse, although a GPU exists"
    )
    return parser.parse_args(words)


def main(words: Sequence[str], parts: tuple[Part, ...] = PARTS, environment: Environment | None = None) -> int:
    """Run the parts of the command line. Returns the exit code: 0 without failures, 2 for a user error."""
    begin, options = time.monotonic(), parse(words)
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="titan-muon-gpu-", ignore_cleanup_errors=True) as work:
        place = Place(options.out, Path(work), end=None if options.call is None else begin + options.limit)
        try:
            wanted = chosen(options.parts, options.call, parts)
            open_folder(options.out)
            if environment is None:
                environment, packages = with_wheels(choose(options.python), Path(work) / "packages")
                place = replace(place, packages=packages)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        gpus = ", ".join(environment.gpus) if environment.gpus else "no GPU, rehearsing at tiny size"
        print(f"torch {environment.torch} on {gpus}; results in {options.out}", flush=True)
        try:
            results = run_all(wanted, environment, place, again=options.again)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on with the part that was cut off", file=sys.stderr)
            return 130
    print(f"\n{summary(results)}\n\nreport: {options.out / report.PAGE}", flush=True)
    bad = any(result.bad for result in results)
    if not environment.gpus:
        print("no GPU, and the rehearsal failed" if bad else REHEARSED, flush=True)
    return int(bad)


def summary(results: Sequence[Result]) -> str:
    """A line for each part."""
    width = max(len(result.part) for result in results)
    return "\n".join(f"{result.part:{width}}  {outcome_text(result).splitlines()[0]}" for result in results)


def end_as_interrupted() -> None:
    """SIGTERM acts like Ctrl-C, because the part would otherwise keep running on the GPUs."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


if __name__ == "__main__":
    end_as_interrupted()
    sys.exit(main(sys.argv[1:]))
