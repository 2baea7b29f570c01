"""Records of an attempt for the next attempt and torchrun's summary."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import run_program
from titan_muon.titan.launch.endings import earlier_end, is_first, record_end

ROOT = Path(__file__).parents[4]


def attempt(folder: Path, number: int, local_rank: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process local rank `local_rank` of attempt `number` of a job of torchrun."""
    file = folder / f"attempt_{number}" / str(local_rank) / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def test_a_later_attempt_ends_with_the_earlier_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(tmp_path, 0, 1, monkeypatch)
    assert earlier_end() is None
    record_end("diverged", 1, first=True)
    # torchrun ended local rank 0 before it could write.
    file = attempt(tmp_path, 1, 0, monkeypatch)
    assert earlier_end() == 1
    assert json.loads(file.read_text())["message"]["message"] == "diverged"


def test_a_restart_after_a_crash_has_no_earlier_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash with TorchTitan's traceback, or with a torn file, a restart trains."""
    attempt(tmp_path, 0, 0, monkeypatch).write_text('{"message": {"message": "CUDA error"}}')
    attempt(tmp_path, 0, 1, monkeypatch).write_text("{")
    attempt(tmp_path, 1, 0, monkeypatch)
    assert earlier_end() is None


def test_a_later_attempt_ends_without_loading_torch() -> None:
    code = "import sys, titan_muon.titan.launch.endings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_first_ending_rank_prints_a_mistake_of_any_rank_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun ends the remaining ranks at the first end, perhaps before rank 0 has printed."""
    shown = {}
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        attempt(tmp_path, 0, rank, monkeypatch)
        command = [sys.executable, "train.py", "--config", "configs/qwen_moe_muon.toml", "--muon.lr=-1"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 2
        shown[rank] = run.stderr
    assert "muon.lr" in shown[1]
    assert shown[0] == ""
    assert is_first("a mistake of rank 0 alone")
    assert not is_first("a mistake of rank 0 alone")


def test_an_unexpected_error_ends_the_process_with_exit_code_1() -> None:
    """Even if the exit would wait for a peer, here for a thread."""
    code, shown = run_program(
        "-c",
        """
import threading
from titan_muon.titan.recipe import Recipe
from titan_muon.titan.run import job

def fail(*_):
    threading.Thread(target=threading.Event().wait).start()
    raise ZeroDivisionError

job._init_distributed, job.train, job.keys_of_the_command_line = lambda recipe: None, fail, lambda *_: ()
job.SECONDS_TO_EXIT = 1
job.run(Recipe(), "x.toml")
""",
    )
    assert code == 1
    assert "ZeroDivisionError" in shown
