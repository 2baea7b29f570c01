"""Trains the main recipe in several ways through train.py and compares the losses with the first way's.

python -m benchmarks.gpu.training --runs fsdp tp ep --nproc 8 --steps 6 --folder runs/x --json training.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "configs/qwen_moe_muon.toml"
TOLERANCE = 0.05
"""Largest difference of a loss of about 5 at the start. Layouts and kernels sum in different orders, in bfloat16."""

TINY = ("--training.seq_len", "64", "--training.global_batch_size", "4")
"""Sizes for a CPU in seconds."""


@dataclass(frozen=True)
class Way:
    """A way to train the recipe: overrides, and a divisor of the number of ranks."""

    overrides: tuple[str, ...] = ()
    multiple: int = 1
    torch: tuple[int, int] = (2, 11)


WAYS: Mapping[str, Way] = {
    "shard0": Way(("--placement.muon", "shard0")),
    "owned": Way(("--placement.muon", "owned")),
    "fsdp": Way(),
    "hsdp": Way(("--parallelism.data_parallel_replicate_degree", "2"), 4),
    "tp": Way(("--parallelism.tensor_parallel_degree", "2"), 2),
    "ep": Way(("--parallelism.expert_parallel_degree", "2"), 2, (2, 12)),
    "pp": Way(("--parallelism.pipeline_parallel_degree", "2"), 2, (2, 14)),
    "dense": Way(("--model.attention", "dense")),
    "flex": Way(("--model.attention", "flex")),
    # For a rehearsal: without a C++ compiler, and FlexAttention has no backward on the CPU.
    "traced": Way(("--model.attention", "dense", "--compile.enable", "true", "--compile.backend", "aot_eager")),
    "compiled": Way(("--model.attention", "flex", "--compile.enable", "true")),
}


@dataclass(frozen=True)
class Run:
    """Run of a way: losses by step, tokens per second of the last reported step, and the fault."""

    losses: Mapping[int, float]
    tokens_per_second: float
    seconds: float
    fault: str = ""
    skipped: str = ""


def train(name: str, nproc: int, steps: int, folder: Path, *, tiny: bool = False) -> Run:
    """Train a way in separate processes."""
    way, version = WAYS[name], torch_version()
    if nproc % way.multiple:
        return Run({}, 0.0, 0.0, skipped=f"needs a multiple of {way.multiple} ranks")
    if version < way.torch:
        return Run({}, 0.0, 0.0, skipped=f"needs torch {'.'.join(map(str, way.torch))}")
    runs = folder / f"{name}-{time.strftime('%H%M%S')}"
    begin = time.monotonic()
    code = subprocess.call(command(way, nproc, steps, runs, tiny=tiny), cwd=ROOT)
    elapsed = time.monotonic() - begin
    files = sorted(runs.glob("*/*/metrics.jsonl"))
    if code != 0 or not files:
        return Run({}, 0.0, elapsed, fault=f"train.py ended with {code}, and left {len(files)} metrics.jsonl")
    records = [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    speeds = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    return Run(losses, speeds[-1] if speeds else 0.0, elapsed)


def command(way: Way, nproc: int, steps: int, runs: Path, *, tiny: bool = False) -> list[str]:
    """Command of the processes; every step is logged, and there are no checkpoints or validations."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", "train.py"]
    quiet = ("--validator.enable", "false", "--checkpoint.enable", "false", "--metrics.enable_tensorboard", "false")
    # The recipe's schedule with a shorter warm-up.
    schedule = ("--lr_scheduler.total_steps", "300", "--lr_scheduler.warmup_steps", "2")
    options = ("--training.steps", str(steps), "--metrics.log_freq", "1", *schedule, *(TINY if tiny else ()))
    return [*launch, "--config", RECIPE, "--dump_folder", str(runs), *options, *quiet, *way.overrides]


def torch_version() -> tuple[int, int]:
    """Major and minor version of PyTorch, without importing torch."""
    from importlib.metadata import version

    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def faults_of(runs: Mapping[str, Run], steps: int, fall: float) -> list[str]:
    """Faults: failed runs, no decrease of the loss, or a difference from the first way."""
    faults = [f"{name}: {run.fault}" for name, run in runs.items() if run.fault]
    done = {name: run.losses for name, run in runs.items() if not run.fault and not run.skipped}
    for name, losses in done.items():
        if set(losses) != set(range(1, steps + 1)):
            faults.append(f"{name}: logged the losses of steps {sorted(losses)}, not of 1 to {steps}")
        # `not >=`, because a NaN fails every comparison.
        elif not losses[1] - losses[steps] >= fall:
            faults.append(
                f"{name}: the loss went from {losses[1]:.3f} to {losses[steps]:.3f}, and had to fall by {fall}"
            )
    first = next(iter(runs))
    for name, losses in done.items():
        # Long runs diverge from each other; the last losses are of different weights.
        common = [step for step in losses if step in done.get(first, {}) and step <= 6]
        far = [step for step in common if not abs(losses[step] - done[first][step]) <= TOLERANCE]
        faults += [f"{name}: step {s}: loss {losses[s]:.3f}, and {first}'s is {done[first][s]:.3f}" for s in far]
    return faults


def main(words: Sequence[str]) -> int:
    """Train all ways in order, and compare the losses. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", nargs="+", choices=WAYS, required=True)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--fall", type=float, default=-1.0, help="what the loss must fall by")
    parser.add_argument("--tiny", action="store_true", help="short sequences and small batches, for a rehearsal")
    parser.add_argument("--folder", type=Path, required=True, help="for the runs")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(words)
    runs = {name: train(name, options.nproc, options.steps, options.folder, tiny=options.tiny) for name in options.runs}
    faults = faults_of(runs, options.steps, options.fall)
    document = {"ranks": options.nproc, "runs": {name: vars(run) for name, run in runs.items()}, "faults": faults}
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, run in runs.items():
        print(f"{name}: {run.skipped or run.fault or ', '.join(f'{loss:.3f}' for loss in run.losses.values())}")
    print("\n".join(faults) if faults else "all follow the first")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
