"""train.py for a user: exit codes, one line for a mistake, and requested ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests import tiny
from tests.dist.harness import run_program

ROOT = Path(__file__).parents[3]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def start(launcher: Sequence[str], file: Path, *words: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [*launcher, "train.py", "--config", str(file), *words],
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=stdout,
        stderr=subprocess.STDOUT,
    )


def worker(launcher: subprocess.Popen[str], local_rank: int) -> int:
    """The process of a rank started by torchrun."""
    shown = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], text=True)
    return sorted(int(pid) for pid in shown.split())[local_rank]


def run_folder(folder: Path) -> Path:
    runs = folder / "runs" / "tiny"
    return runs / (runs / "latest").read_text().strip()


def stop_after_first_step(process: subprocess.Popen[str], kill: object) -> str:
    """Call `kill` after the first logged step; returns the later output."""
    assert process.stdout is not None
    before = ""
    for line in process.stdout:
        before += line
        if line.startswith("step ") and " 1/" in line:
            kill()  # type: ignore[operator]
            return process.communicate(timeout=120)[0]
    raise AssertionError(f"the run ended before its first step:\n{before}")


KEYS = ("training.steps", "lr_scheduler.total_steps", "validator.freq", "checkpoint.freq")
LONG = tuple(f"--{key}=5000" for key in KEYS)


def test_sigterm_stops_every_rank_at_the_same_step_with_a_complete_checkpoint(tmp_path: Path) -> None:
    """SIGTERM arrives at different times on the workers. The exit code is 0."""
    process = start(TORCHRUN, tiny.write_recipe(tmp_path), *LONG)

    shown = stop_after_first_step(process, lambda: os.kill(worker(process, 1), signal.SIGTERM))
    assert process.returncode == 0, shown
    assert "stopped after step" in shown
    assert "Traceback" not in shown
    steps = [path.name for path in (run_folder(tmp_path) / "checkpoint").iterdir()]
    assert len(steps) == 1
    last = f"stopped after step {steps[0].removeprefix('step-')} of 5000: saved; "
    assert shown.splitlines()[-1] == f"{last}the same command with --checkpoint.load latest continues"
    assert (run_folder(tmp_path) / "checkpoint" / steps[0] / ".metadata").is_file()


def test_ctrl_c_without_checkpoints_names_the_lost_work(tmp_path: Path) -> None:
    """Ctrl-C of one process without torchrun exits with 0."""
    process = start((sys.executable,), tiny.write_recipe(tmp_path), *LONG, "--checkpoint.enable=false")
    shown = stop_after_first_step(process, lambda: process.send_signal(signal.SIGINT))
    assert process.returncode == 0, shown
    assert "nothing is saved (checkpoint.enable = false)" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--training.stepz=3",), "training.steps"),
        (("--checkpoint.load=no/such/folder",), "no such folder"),
        (("--data.files=no/such/*.txt",), "error: command line: data.files"),
    ],
)
def test_a_mistake_prints_a_single_line_and_exits_with_2(words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    """For mistakes found while the recipe is read and while the run is built."""
    code, shown = run_program("train.py", "--config", str(tiny.write_recipe(tmp_path)), *words)
    assert code == 2, shown
    errors = [line for line in shown.splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert expected in errors[0]
    assert "Traceback" not in shown
    assert not [path for path in tmp_path.glob("runs/*") if path.is_dir()], "a run that never began leaves no folder"


def test_a_diverged_model_is_never_saved(tmp_path: Path) -> None:
    """Between two reports of the loss, the checkpoints of a run have finite weights alone."""
    often = ("--metrics.log_freq=9", "--checkpoint.enable=true", "--checkpoint.freq=1", "--training.steps=6")
    words = ("--adamw.lr=1e30", *often, "--validator.enable=false", "--lr_scheduler.warmup_steps=0")
    code, shown = run_program("train.py", "--config", str(tiny.write_recipe(tmp_path)), *words)
    assert code == 1, shown
    assert shown.count("error: ") == 1
    assert "Traceback" not in shown
    (reason,) = tiny.records(run_folder(tmp_path), "diverged").values()
    assert str(reason) in shown, "one record, and one error in the same words"
    assert "weights are not finite or larger than 1e+06" in shown
    assert "Lower the learning rates" in shown
    assert "documents of data.files with " in shown, "each start says what it reads"
    for checkpoint in (run_folder(tmp_path) / "checkpoint").glob("step-*"):
        metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        kinds = {key: value for key, value in metadata.items() if isinstance(value, TensorStorageMetadata)}
        loaded: dict[str, Any] = {
            key: torch.empty(value.size, dtype=value.properties.dtype) for key, value in kinds.items()
        }
        dcp.load(loaded, checkpoint_id=checkpoint, no_dist=True)
        assert all(bool(tensor.isfinite().all()) for tensor in loaded.values() if tensor.is_floating_point())


DIVERGES = ("--adamw.lr=1e30", "--lr_scheduler.warmup_steps=0", "--metrics.log_freq=9", "--validator.freq=1")


@pytest.mark.parametrize(
    ("words", "expected", "code"),
    [
        (("--training.seq_len=60000",), "training.seq_len = 60000 exceeds the 40960 positions", 2),
        (DIVERGES, "the norm of the gradients is nan", 1),
    ],
)
def test_the_end_of_two_ranks_is_printed_once(words: tuple[str, ...], expected: str, code: int, tmp_path: Path) -> None:
    """For a refusal and a divergence."""
    process = start(TORCHRUN, tiny.write_recipe(tmp_path), *words)
    shown = process.communicate(timeout=240)[0]
    assert process.returncode != 0
    assert shown.count("error: ") == 1, shown
    assert expected in shown
    assert f"exitcode  : {code} " in shown
    assert "RecipeError" not in shown
    runs = [path for path in (tmp_path / "runs" / "tiny").glob("2*") if path.is_dir()]
    assert len(runs) == (code == 1), "a refused run leaves no folder"
    if code == 1:
        assert next(iter(tiny.records(runs[0], "diverged").values())) in shown
