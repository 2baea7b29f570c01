"""Ranks that are killed or hang: the job ends in time and says who it was, and a restart goes on with the run."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from tests import tiny
from tests.dist.test_train_py import TORCHRUN, run_folder, start

FEW = ("--training.steps=6", "--validator.enable=false", "--checkpoint.interval=2")


def worker(launcher: subprocess.Popen[str], local_rank: int) -> int:
    """The process of a rank that a torchrun has started."""
    shown = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], text=True)
    return sorted(int(pid) for pid in shown.split())[local_rank]


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What a process prints, up to the first line that matches."""
    assert process.stdout is not None
    before = ""
    for line in process.stdout:
        before += line
        if re.search(pattern, line):
            return before
    raise AssertionError(f"no line has {pattern!r}:\n{before}")


def test_restart_goes_on_with_the_run_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """After kill -9 of a rank, `torchrun --max-restarts=1` must end the run at its last step, in one folder."""
    process = start([*TORCHRUN, "--max-restarts=1"], tiny.write_recipe(tmp_path), *FEW)
    shown = read_until(process, r"^step +3/")
    os.kill(worker(process, 1), signal.SIGKILL)
    shown += process.communicate(timeout=300)[0]
    assert process.returncode == 0, shown
    assert "continuing after step 2" in shown, shown
    folder = run_folder(tmp_path)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]
    assert list(tiny.records(folder, "loss")) == list(range(1, 7))


def test_stopped_rank_ends_the_job_in_time_and_is_named(tmp_path: Path) -> None:
    """With a rank in SIGSTOP all processes, torchrun too, must end soon after the time-out, and one line name it."""
    words = ("--comm.train_timeout_seconds=5", "--training.steps=500", "--lr_scheduler.total_steps=500")
    process = start(TORCHRUN, tiny.write_recipe(tmp_path), "--validator.enable=false", *words)
    shown = read_until(process, r"^step +2/")
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
    # On an idle machine 6; more than 25 would be the half minute that torchrun gives a process after SIGTERM.
    assert seconds < 25, f"the job ended after {seconds:.1f} s:\n{shown}"
