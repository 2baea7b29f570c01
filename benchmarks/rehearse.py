"""Rehearses every full-size recipe on fake GPUs, and compares the records with the dry run.

    make rehearse                                           # all of them; needs a CUDA build of PyTorch and no GPU
    python -m benchmarks.rehearse --only llama3_8b --worlds 8 --ranks 2

For each recipe and world size, a rank takes two training steps at full size: TorchTitan's forward, loss, backward and
clipping, and the optimizers' step. Fails if the host waits for the device in the optimizer step, if memory differs from
the dry run, if buffers leak, if process groups are made after construction, or if two ranks see different collectives.
docs/rehearsal.md lists the limits of a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rehearsal.checks import Expected, collective_faults, faults
from benchmarks.rehearsal.seen import Seen

ROOT = Path(__file__).parents[1]
SECONDS = 1800
"""Time-out of a process, many times the time on an idle machine."""

LAYOUTS: dict[str, tuple[str, ...]] = {
    "FSDP": (),
    "FSDP, offload": ("--optimizer.offload", "state"),
    "owned": ("--placement.muon", "owned"),
    "TP 8": ("--parallelism.tensor_parallel_degree", "8"),
    "HSDP 8, one momentum": (
        *("--parallelism.data_parallel_replicate_degree", "8"),
        *("--muon.state", "owner"),
    ),
    "EP 8": ("--parallelism.expert_parallel_degree", "8"),
    "EP 8, owned": ("--parallelism.expert_parallel_degree", "8", "--placement.muon", "owned"),
    "EP 64": ("--parallelism.expert_parallel_degree", "64"),
    "TP 4, EP 8": ("--parallelism.tensor_parallel_degree", "4", "--parallelism.expert_parallel_degree", "8"),
    "HSDP 8, owned": (
        *("--parallelism.data_parallel_replicate_degree", "8"),
        *("--placement.muon", "owned", "--placement.replicas", "each"),
    ),
    "TP 8, owned": (
        *("--parallelism.tensor_parallel_degree", "8"),
        *("--placement.muon", "owned"),
    ),
    "PP 4": ("--parallelism.pipeline_parallel_degree", "4", "--training.local_batch_size", "4"),
}
PASSES = (
    *("--training.local_batch_size", "1", "--activation_checkpoint.mode", "selective"),
    *("--parallelism.fsdp_reshard_after_forward", "default", "--parallelism.expert_parallel_degree", "1"),
)
"""Equal passes of all recipes, whose layouts are for other numbers of ranks."""
WORLDS = (8, 64, 1024)
REHEARSED: dict[str, tuple[str, str, str]] = {
    "qwen3_0.6b": ("owned", "FSDP", "HSDP 8, one momentum"),
    "qwen3_8b": ("FSDP, offload", "HSDP 8, owned", "TP 8"),
    "llama3_8b": ("TP 8", "TP 8, owned", "owned"),
    "llama3_70b": ("PP 4", "TP 8, owned", "TP 8"),
    "qwen3_30b_a3b": ("EP 8", "EP 8, owned", "TP 4, EP 8"),
    "gpt_oss_20b": ("EP 8", "EP 8", "EP 8"),
    "moonlight": ("EP 8, owned", "EP 8", "EP 64"),
    "deepseek_v3": ("EP 8", "EP 64", "EP 64"),
    "kimi_k2": ("EP 8", "EP 64", "EP 64"),
    "deepseek_v4_style": ("EP 8", "EP 64", "EP 64"),
}
"""Layout of each recipe at each world size; together they cover all layouts."""
NOT_REHEARSED = (("qwen3_5_35b_a3b", "its linear attention needs a GPU and flash-linear-attention"),)
"""Further recipes of full size, each with the reason."""


@dataclass(frozen=True)
class Case:
    """A recipe of configs/ on `world` ranks, in one of LAYOUTS."""

    recipe: str
    world: int
    layout: str

    def arguments(self) -> list[str]:
        """Command-line words of the recipe and layout."""
        return ["--config", str(ROOT / "configs" / f"{self.recipe}_muon.toml"), *PASSES, *LAYOUTS[self.layout]]

    def __str__(self) -> str:
        return f"{self.recipe} @ {self.world}, {self.layout}"


@dataclass(frozen=True)
class Outcome:
    """Records of a case by rehearsed rank, and the faults."""

    case: Case
    expected: Expected | None
    seen: tuple[Seen, ...]
    faults: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if any case has a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=REHEARSED, default=list(REHEARSED), metavar="RECIPE")
    parser.add_argument("--worlds", nargs="+", type=int, choices=WORLDS, default=WORLDS)
    parser.add_argument("--ranks", type=int, default=1, help="ranks to rehearse of each case, whose collectives agree")
    parser.add_argument("--jobs", type=int, default=2, help="processes at one time")
    parser.add_argument("--markdown", type=Path, help="file for the table, renewed after each case")
    options = parser.parse_args(argv)
    cases = [
        Case(name, world, layout)
        for name in options.only
        for world, layout in zip(WORLDS, REHEARSED[name], strict=True)
        if world in options.worlds
    ]
    for name, reason in NOT_REHEARSED:
        print(f"{name}: not rehearsed, because {reason}")
    started, outcomes = time.monotonic(), []
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, outcome in enumerate(pool.map(lambda case: rehearsed(case, options.ranks), cases), 1):
            verdict = "; ".join(outcome.faults) if outcome.faults else "as the dry run says, no wait, no new group"
            print(f"[{number}/{len(cases)}, {time.monotonic() - started:.0f} s] {outcome.case}: {verdict}", flush=True)
            outcomes.append(outcome)
            table = "\n".join(markdown(outcomes))
            # After each case: all cases take an hour or more, and may be interrupted.
            if options.markdown is not None:
                options.markdown.write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}")
    return int(any(outcome.faults for outcome in outcomes))


def rehearsed(case: Case, ranks: int) -> Outcome:
    """Rehearse a case in separate processes: meshes and TorchTitan's settings are per process."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        problem = _run(
            ["train.py", *case.arguments(), "--dry-run", "--world-size", str(case.world), "--json", str(plan)]
        )
        if problem:
            return Outcome(case, None, (), (f"the dry run failed: {problem}",))
        expected = Expected.of(json.loads(plan.read_text(encoding="utf-8")))
        seen: list[Seen] = []
        for rank in _ranks(expected.fullest, case.world, ranks):
            file = Path(folder, f"{rank}.json")
            where = ["--world-size", str(case.world), "--rank", str(rank), "--json", str(file)]
            problem = _run(["-m", "benchmarks.rehearsal", *case.arguments(), *where])
            if problem:
                return Outcome(case, expected, tuple(seen), (f"rank {rank} failed: {problem}",))
            seen.append(Seen.read(file))
        memory = [fault for record in seen for fault in faults(record, expected)]
        return Outcome(case, expected, tuple(seen), (*memory, *collective_faults(seen)))


def _ranks(first: int, world: int, number: int) -> list[int]:
    # Two ranks at half a world's distance are in the same FSDP group and have the same place in all inner groups.
    return [(first + index * world // number) % world for index in range(number)]


def _run(arguments: Sequence[str]) -> str:
    """Last line of a failed Python process, or an empty string."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS} s"
    lines = [line for line in result.stderr.splitlines() if line.strip()] or ["nothing was said"]
    return "" if result.returncode == 0 else lines[-1]


def markdown(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Table of the first rank of each case."""
    sizes = "parameters | states | buffers | peak of training | peak of the step"
    yield f"| recipe | ranks | layout | {sizes} | launches | calls: training, step | faults |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for outcome in outcomes:
        case, fault = outcome.case, "; ".join(outcome.faults) or "none"
        if not outcome.seen:
            yield f"| {case.recipe} | {case.world} | {case.layout} |" + " |" * 7 + f" {fault} |"
            continue
        seen = outcome.seen[0]
        held = (seen.step_peak.parameters, seen.step_peak.optimizer_states, seen.step_peak.exchange_buffers)
        gib = " | ".join(f"{size / 2**30:.2f}" for size in (*held, seen.training_peak.total, seen.step_peak.total))
        calls = f"{len(seen.training)}, {len(seen.step)}"
        launches = sum(seen.operations.values())
        yield f"| {case.recipe} | {case.world} | {case.layout} | {gib} | {launches} | {calls} | {fault} |"


if __name__ == "__main__":
    sys.exit(main())
