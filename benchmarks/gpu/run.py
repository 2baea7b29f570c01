"""Runs every part on this machine's GPUs in order, and writes the report: `make gpu`.

    python -m benchmarks.gpu.run                           # all parts that have not passed here yet
    python -m benchmarks.gpu.run --parts links --again     # repeat one part

A part runs once per combination of GPUs, PyTorch and commit, until it passes. Without a GPU each part's rehearsal runs.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.environment import ROOT, Environment, ask
from benchmarks.gpu.parts import PARTS, REHEARSAL_SECONDS, Part, chosen
from benchmarks.gpu.results import Outcome, Result, read, write
from benchmarks.processes import run_within

REHEARSED = "no GPU: rehearsed on fake tensors only"
LOG_CHARACTERS = 8000


def obstacle(part: Part, environment: Environment) -> str:
    """Reason why a part cannot run here, or empty."""
    missing = [name for name in part.needs if name not in environment.packages]
    if missing:
        return f"needs the package {', '.join(missing)}"
    if not environment.gpus:
        return "" if part.rehearsal else f"no rehearsal ({part.unrehearsed})"
    if len(environment.gpus) < part.least_gpus:
        return f"needs {part.least_gpus} GPUs, and there is {len(environment.gpus)}"
    return ""


def limit(part: Part, environment: Environment) -> int:
    """Time-out of a part here, in seconds."""
    return part.seconds if environment.gpus else REHEARSAL_SECONDS


def command_of(part: Part, environment: Environment, folder: Path) -> tuple[str, ...]:
    """Words of a part's command in this environment."""
    values: Mapping[str, object] = {
        "python": sys.executable,
        "ranks": environment.ranks,
        "json": folder / f"{part.name}.figures",
        "folder": folder / part.name,
        "out": folder,
    }
    words = part.command if environment.gpus else part.rehearsal
    return tuple(filled(word, values) for word in words)


def filled(word: str, values: Mapping[str, object]) -> str:
    """A word with its `{names}` replaced; other braces stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


def run_part(part: Part, environment: Environment, folder: Path) -> Result:
    """Run a part with a time-out. Returns a result with figures and the end of the log for any outcome."""
    reason, most = obstacle(part, environment), limit(part, environment)
    if reason:
        return Result(part.name, Outcome.NOT_RUN, reason, 0.0, (), environment)
    command = command_of(part, environment, folder)
    figures, log = folder / f"{part.name}.figures", folder / f"{part.name}.log"
    # An earlier run's figures must not count for this run.
    figures.unlink(missing_ok=True)
    begin = time.monotonic()
    code = run_within(most, command, log, ROOT, environ())
    seconds = time.monotonic() - begin
    read, unreadable = report.read_json(figures)
    if code is None:
        outcome, reason = Outcome.OUT_OF_TIME, f"did not end in {most} s"
    elif code != 0:
        outcome, reason = Outcome.FAILED, f"exit code {code}, see {log}"
    elif unreadable:
        outcome, reason = Outcome.FAILED, unreadable
    else:
        outcome = Outcome.PASSED
    end = log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
    return Result(part.name, outcome, reason, seconds, command, environment, read, end)


def environ() -> dict[str, str]:
    """Environment variables of a part."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_all(parts: Sequence[Part], environment: Environment, folder: Path, *, again: bool) -> list[Result]:
    """Run the parts in order, also after failures, and save every result at once."""
    results = []
    for number, part in enumerate(parts, 1):
        left = math.ceil(sum(limit(part, environment) for part in parts[number - 1 :]) / 60)
        print(f"[{number}/{len(parts)}] {part.name}: {part.shows}", flush=True)
        old = read(part.name, folder)
        if old is not None and old.outcome is Outcome.PASSED and old.environment.same(environment) and not again:
            print(f"    passed before, in {old.seconds:.0f} s; --again runs it once more", flush=True)
            results.append(old)
            continue
        print(f"    at most {limit(part, environment)} s; at most {left} min for this and the rest", flush=True)
        result = run_part(part, environment, folder)
        write(result, folder)
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


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu", help="folder for results and the report")
    parser.add_argument("--parts", nargs="*", default=[], help=f"of {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--again", action="store_true", help="run parts that have passed here too")
    return parser.parse_args(words)


def main(words: Sequence[str], parts: tuple[Part, ...] = PARTS, environment: Environment | None = None) -> int:
    """Run the parts of the command line. Returns the exit code: 0 without failures, 2 for a user error."""
    options = parse(words)
    try:
        wanted = chosen(options.parts, parts)
        open_folder(options.out)
        environment = ask() if environment is None else environment
        if environment.unused:
            raise ValueError(f"{environment.unused}. Name one that fits: make gpu PYTHON_GPU=/path/to/python")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gpus = ", ".join(environment.gpus) if environment.gpus else "no GPU, rehearsing at tiny size"
    print(f"torch {environment.torch} on {gpus}; results in {options.out}", flush=True)
    try:
        results = run_all(wanted, environment, options.out, again=options.again)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the part that was cut off", file=sys.stderr)
        report.write_report(parts, environment, options.out)
        return 130
    page = report.write_report(parts, environment, options.out)
    print(f"\n{summary(results)}\n\nreport: {page}", flush=True)
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
