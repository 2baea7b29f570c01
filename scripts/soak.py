"""Soak test: a long run with random kills must log the digits of a run without.

`python scripts/soak.py [--steps 2000] [--minutes 60] [--kills 8] [-- KEYS OF THE RECIPE]`, or `make soak`.

Trains a recipe twice on 2 ranks: once undisturbed, once under `torchrun --max-restarts` while a random rank is killed
(SIGKILL) now and then. Exits with 1 if a loss differs in any digit, or a run fails. After `--minutes` the test ends and
checks the steps so far.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEP_LINE = re.compile(r"^\S*step +(\d+)/")


@dataclass
class Soak:
    """A run under observation.

    Attributes:
        losses: loss by step, as logged.
        kills: processes killed.
        seconds: duration.
        code: exit code of torchrun; None if the time was over.
    """

    losses: Mapping[int, float] = field(default_factory=dict)
    kills: int = 0
    seconds: float = 0.0
    code: int | None = None


def workers(launcher: int) -> list[int]:
    """Child processes of a launcher, in the order of their ids."""
    shown = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True, check=False)
    return sorted(int(pid) for pid in shown.stdout.split())


def train(name: str, options: argparse.Namespace, kills: int, seconds: float) -> Soak:
    """Train the recipe once, and kill a random rank `kills` times, evenly over the steps but for chance."""
    draw, soak, began = random.Random(options.seed), Soak(), time.monotonic()
    folder = Path(options.folder).resolve() / name
    due = (
        sorted(draw.sample(range(2, max(options.steps - 1, 3)), min(kills, max(options.steps - 3, 1)))) if kills else []
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *(f"--max-restarts={kills + 1}", "train.py", "--config", options.config, f"--dump_folder={folder}"),
        *(f"--training.steps={options.steps}", "--metrics.log_freq=1", "--validator.enable=false"),
        *options.keys,
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if options.verbose:
                print(line, end="", flush=True)
            if time.monotonic() - began > seconds:
                process.send_signal(signal.SIGTERM)
                break
            if (match := STEP_LINE.match(line)) is None:
                continue
            step, pids = int(match[1]), workers(process.pid)
            if due and step >= due[0] and pids:
                due.pop(0)
                soak.kills += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(pids), signal.SIGKILL)
        else:
            soak.code = process.wait()
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=120)
        process.kill()
    soak.losses = losses_below(folder)
    soak.seconds = time.monotonic() - began
    return soak


def losses_below(folder: Path) -> dict[int, float]:
    """The loss of each step in the metrics files below a folder."""
    records = (
        json.loads(line)
        for file in sorted(folder.rglob("metrics.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    )
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def problems(plain: Soak, killed: Soak) -> list[str]:
    """Problems of the two runs, a line for each."""
    lines = []
    for name, soak in (("undisturbed", plain), ("killed", killed)):
        if soak.code not in (0, None):
            lines.append(f"the {name} run ended with exit code {soak.code}")
    common = sorted(plain.losses.keys() & killed.losses.keys())
    if not common:
        lines.append("the runs have no step in common")
    different = [step for step in common if plain.losses[step] != killed.losses[step]]
    if different:
        step = different[0]
        lines.append(
            f"{len(different)} of {len(common)} losses differ, the first in step {step}: {plain.losses[step]} without "
            f"kills, {killed.losses[step]} with"
        )
    return lines


def main(arguments: Sequence[str]) -> int:
    """Run the soak test. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/qwen_moe_muon.toml", help="recipe")
    parser.add_argument("--steps", type=int, default=2000, help="training steps of each run")
    parser.add_argument("--minutes", type=float, default=60, help="most minutes of both runs together")
    parser.add_argument("--kills", type=int, default=8, help="ranks to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the steps and ranks that are killed")
    parser.add_argument("--folder", default="runs/soak", help="folder of the two runs")
    parser.add_argument("--verbose", action="store_true", help="print what the runs print")
    parser.add_argument("keys", nargs="*", help="keys of the recipe, behind --")
    options = parser.parse_args(arguments)
    half = 60 * options.minutes / 2
    stamp = time.strftime("%Y%m%d-%H%M%S")
    plain = train(f"{stamp}/undisturbed", options, 0, half)
    killed = train(f"{stamp}/killed", options, options.kills, 60 * options.minutes - plain.seconds)
    lines = problems(plain, killed)
    print(
        f"{len(plain.losses)} steps undisturbed in {plain.seconds:.0f} s, {len(killed.losses)} steps with "
        f"{killed.kills} kills in {killed.seconds:.0f} s"
    )
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
