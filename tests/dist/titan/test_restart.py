"""A killed or hanging rank ends the job in time with a report of the rank, and a restart continues the run."""

import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import pytest

from tests import tiny
from tests.dist.titan.test_train_py import TORCHRUN, run_folder, start, worker

# Bfloat16 products are slow on many CPUs.
FEW = ("--training.steps=6", "--validator.enable=false", "--checkpoint.freq=2", "--muon.expert.ns_dtype=float32")


def start_nodes(file: Path, *words: str) -> tuple[list[subprocess.Popen[str]], TextIO]:
    """Two nodes with a rank on each, and the output of both."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"--rdzv-endpoint=localhost:{free.getsockname()[1]}"
    node = (*TORCHRUN[:3], "--nproc_per_node=1", "--nnodes=2", "--rdzv-backend=c10d", meeting, "--rdzv-id=job")
    reader, writer = os.pipe()
    started = [start([*node, "--max-restarts=1"], file, *words, stdout=writer) for _ in range(2)]
    os.close(writer)
    return started, os.fdopen(reader)


def read_until(lines: Iterable[str], pattern: str) -> str:
    """Output up to the first matching line."""
    before = ""
    for line in lines:
        before += line
        if re.search(pattern, line):
            return before
    raise AssertionError(f"no line has {pattern!r}:\n{before}")


@pytest.mark.slow
def test_a_restart_continues_the_run_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """A rank is killed with kill -9; `torchrun --max-restarts=1` ends the run at the last step, in one folder.

    On two nodes; the next test kills ranks on one node.
    """
    launchers, output = start_nodes(tiny.write_recipe(tmp_path), *FEW)
    try:
        shown = read_until(output, r"^step +3/")
        os.kill(worker(launchers[-1], -1), signal.SIGKILL)
        shown += output.read()
        codes = [launcher.wait(timeout=300) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert codes == [0, 0], shown
    assert "continuing after step 2" in shown, shown
    folder = run_folder(tmp_path)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]
    assert list(tiny.records(folder, "loss")) == list(range(1, 7))


@pytest.mark.slow
def test_a_run_with_kills_at_random_moments_has_the_digits_of_an_undisturbed_run(tmp_path: Path) -> None:
    """A random rank is killed once, and once more for each 250 steps. `make soak` trains 2,000 steps.

    A dense model, because the expert counts of a batch change its losses in the last digits.
    """
    steps, draw = int(os.environ.get("TITAN_MUON_SOAK_STEPS", "6")), random.Random(0)
    kills = sorted(draw.sample(range(2, steps - 1), max(1, steps // 250)))
    recipe = tiny.write_recipe(tmp_path)
    words = (*FEW, "--model.name=llama3", "--model.flavor=tiny", f"--training.steps={steps}")
    losses = []
    for due in ([], kills):
        launcher = (*TORCHRUN, f"--max-restarts={len(due)}")
        process = start(launcher, recipe, *words, f"--lr_scheduler.total_steps={steps}", f"--name=kills{len(due)}")
        assert process.stdout is not None
        shown = "".join(read_until(process.stdout, rf"^step +{step}/") + kill_a_rank(process, draw) for step in due)
        shown += process.stdout.read()
        assert process.wait(timeout=300) == 0, shown
        (folder,) = (path.parent for path in tmp_path.glob(f"runs/kills{len(due)}/*/metrics.jsonl"))
        losses.append(tiny.records(folder, "loss"))
    assert list(losses[0]) == list(range(1, steps + 1))
    assert losses[0] == losses[1]


def kill_a_rank(launcher: subprocess.Popen[str], draw: random.Random) -> str:
    """Kill one of two ranks. Returns a line about it."""
    rank = draw.randrange(2)
    os.kill(worker(launcher, rank), signal.SIGKILL)
    return f"killed rank {rank}\n"


TORCHRUN_SECONDS = 30
"""From SIGTERM to SIGKILL."""
BUSY_SECONDS = 15
"""Slack for a busy machine, mostly for torchrun's exit."""
TIMEOUT_SECONDS = 5


@pytest.mark.slow
def test_stopped_rank_ends_the_job_in_time_and_is_named(tmp_path: Path) -> None:
    """With a rank in SIGSTOP torchrun ends the job: it waits 30 s for the stopped process. One line names the rank."""
    words = ("--validator.enable=false", f"--comm.train_timeout_seconds={TIMEOUT_SECONDS}", "--training.steps=500")
    words += ("--lr_scheduler.total_steps=500", "--muon.expert.ns_dtype=float32")
    process = start(TORCHRUN, tiny.write_recipe(tmp_path), *words)
    assert process.stdout is not None
    shown = read_until(process.stdout, r"^step +2/")
    stopped = worker(process, 1)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    try:
        shown += process.communicate(timeout=300)[0]
    finally:
        process.kill()
    seconds = time.monotonic() - began
    assert process.returncode != 0
    lines = [line for line in shown.splitlines() if "gives no sign of life" in line]
    assert len(lines) == 1, shown
    assert f"rank 1 (process {stopped} on " in lines[0]
    limit = TIMEOUT_SECONDS + TORCHRUN_SECONDS + BUSY_SECONDS
    assert seconds < limit, f"the job ended after {seconds:.1f} s:\n{shown}"
