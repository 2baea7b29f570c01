"""The four calls for one GPU, rehearsed on the CPU: their rows, their page, and an end at any time."""

import json
import random
import signal
import subprocess
import sys
import time
from glob import glob
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import gpu
from benchmarks.gpu import ROOT, Rows, peers, read_rows
from benchmarks.gpu.__main__ import main, parts_of
from benchmarks.one_gpu.one_rank import attributed
from titan_muon.engine.tensors.process_groups import forget_meshes

CPU = torch.device("cpu")
PARTS = {part.name: part for call in (1, 2, 3, 4) for part in parts_of(call, "cpu")}
LAUNCHES = {
    "empty add_",
    "bmm(out=) of 2 x 64 x 64",
    "foreach add_ of 100",
    "all-reduce, world 1",
    "pinned copy of 4 kB",
}
CONTENDERS = {"torch.optim.Muon", "ours", "ours, reference", "DistMuon", "AdamW, fused"}
CPU_ROWS: dict[str, tuple[tuple[str, ...], set[Any], tuple[str, ...]]] = {
    # By part: columns that name a row, rows that have no error on the CPU, and columns of each.
    "launches": (("measured", "launch"), {*(("launches", name) for name in LAUNCHES), ("rates", None)}, ()),
    "rank qwen3_8b": (
        ("step", "skippable", "gradients"),
        {
            ("model of h100x8", None, None), ("AdamW of the rest", None, None),
            *(("step", skippable, kind) for skippable in (False, True) for kind in ("new", "constant")),
            ("host, narrow", False, "new"), ("host, narrow", True, "new"),
        },
        ("device ms", "host ms"),
    ),
    "peers, 128 experts": (("measured", "contender"), {(kind, name) for name in CONTENDERS
                                                      for kind in ("error of one update", "memory", "step")}, ()),
}  # fmt: skip
SLOW_ROWS = {"parity": "row", "torch_muon, 2e-3": "val_loss"}


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    forget_meshes()
    return Rows(tmp_path / "rows.jsonl", {"call": 1, "part": "a", "source": "rehearsed"})


@pytest.mark.parametrize("name", CPU_ROWS)
def test_a_part_writes_its_rows_on_the_cpu(name: str, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, expected, columns = CPU_ROWS[name]
    # A compilation takes ten seconds.
    kept = {key: contender for key, contender in peers.CONTENDERS.items() if not contender.late}
    monkeypatch.setattr(peers, "CONTENDERS", kept)
    PARTS[name].run(rows, CPU)
    written = read_rows(rows.file)
    assert {tuple(row.get(key) for key in keys) for row in written if "error" not in row} == expected
    assert all(column in row for row in written if "error" not in row for column in columns)
    # Others are there, with the reason.
    assert all(row["error"] for row in written if "error" in row)
    assert not name.startswith("peers") or {row["contender"] for row in written} == set(kept)
    assert "| --- |" in gpu.page(written)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_ROWS)
def test_a_part_of_processes_writes_its_rows_on_the_cpu(name: str, rows: Rows) -> None:
    PARTS[name].run(rows, CPU)
    found = [row for row in read_rows(rows.file) if SLOW_ROWS[name] in row]
    assert found
    assert all(row.get("differences", "none") == "none" for row in found)


def test_a_killed_call_leaves_whole_rows_and_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--call", "1", "--device", "cpu", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    file, deadline = tmp_path / "rows.jsonl", time.monotonic() + 100
    while len(read_rows(file)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(random.uniform(0, 3))
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = file.read_text().splitlines()
    assert len(lines) >= 3
    assert all(json.loads(line)["call"] == 1 for line in lines)
    assert lines[-1:] == file.read_text().split("\n")[-2:-1], "the last line is whole"
    deadline = time.monotonic() + 20
    while any(str(tmp_path) in words for words in command_lines()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(str(tmp_path) in words for words in command_lines())


def command_lines() -> list[str]:
    """Command lines of this machine's processes."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_text())
        except OSError:
            continue
    return lines


def test_a_row_is_whole_and_a_torn_one_is_left_out(rows: Rows) -> None:
    rows.measure(Mock(side_effect=RuntimeError("what went wrong")), measured="a")
    rows.measure(lambda: {"device ms": float("nan")}, measured="b")
    with rows.file.open("a") as file:
        file.write('{"call": 1, "mea')
    assert [(row["measured"], row.get("error")) for row in read_rows(rows.file)] == [
        ("a", "RuntimeError: what went wrong"),
        ("b", None),
    ]


@pytest.mark.parametrize(("words", "says"), [
    ("--device cpu", "name a call: --call 1, 2, 3 or 4"),
    ("--call 1", "finds no GPU; take a PyTorch that fits the driver (PYTHON_GPU=), or rehearse with DEVICE=cpu"),
])  # fmt: skip
def test_a_wrong_command_line_names_the_remedy(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False), pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert says in " ".join(capsys.readouterr().err.split())


def event(name: str, kind: DeviceType, start: int, length: int, correlation: int = 0) -> SimpleNamespace:
    values = {"name": name, "device_type": kind, "start_ns": start, "duration_ns": length}
    values |= {"correlation_id": correlation, "start_thread_id": 0}
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


EVENTS = (
    event("Muon.advance bucket 0", DeviceType.CPU, 0, 100),
    event("Muon.apply bucket 0", DeviceType.CPU, 200, 100),
    event("cudaLaunchKernel", DeviceType.CPU, 10, 5, 1),
    # Triton launches without an operator of PyTorch, and the device's range of the stage is elsewhere.
    event("cuLaunchKernelEx", DeviceType.CPU, 250, 5, 2),
    event("cudaLaunchKernel", DeviceType.CPU, 400, 5, 3),
    event("Muon.advance bucket 0", DeviceType.CUDA, 1000, 2_000_000, 9),
    event("foreach", DeviceType.CUDA, 1000, 2_000_000, 1),
    event("update", DeviceType.CUDA, 900_000, 3_000_000, 2),
    event("norm", DeviceType.CUDA, 9_000_000, 1_000_000, 3),
)


def test_kernels_belong_to_the_stage_that_launched_them() -> None:
    trace = attributed(EVENTS, on_gpu=True)
    assert trace.stages == {"advance": 2.0, "apply": 3.0, "outside": 1.0}
    assert (trace.total, trace.launches) == (6.0, 3)
    lost = event("unknown", DeviceType.CUDA, 0, 1_000_000, 7)
    with pytest.raises(AssertionError, match=r"stages have 6.000 ms, and kernels 7.000 ms"):
        attributed((*EVENTS, lost), on_gpu=True)


def test_the_page_is_of_its_data_and_takes_measured_rows_alone(rows: Rows, tmp_path: Path) -> None:
    """`python -m benchmarks.gpu --page` writes it."""
    assert (gpu.DOCS / gpu.PAGE).read_text() == gpu.page(read_rows(gpu.DOCS / gpu.DATA))
    rows.write(measured="b", us=1.5)
    Rows(rows.file, {**rows.common, "source": "measured"}).write(measured="b", us=2.5)
    training = Rows(rows.file, {"call": 4, "part": "muon, 2e-3", "measured": "training", "source": "measured"})
    for step in (1, 2):
        training.write(step=step, tokens=step, seconds=step, time={"data": 0.5})
        training.write(step=step, tokens=step, seconds=step, val_loss=3.0 / step)
    gpu.publish([rows.file], tmp_path)
    text = (tmp_path / gpu.PAGE).read_text()
    assert "| 2.5 |" in text
    assert "| 1.5 |" not in text.replace("| 2 | 2 | 1.5 |", "")
    assert (tmp_path / gpu.PICTURE).exists()


def test_every_training_is_a_valid_recipe(tmp_path: Path) -> None:
    import models  # noqa: F401 (registers the families)
    from benchmarks.gpu.__main__ import CORPUS, TINY, WAYS, recipe_of
    from titan_muon.trainer.recipe import load

    assert glob(CORPUS, recursive=True)
    for way in WAYS:
        recipe = recipe_of(tmp_path, "1e-3", way)
        assert load(recipe, []).training.steps * 65_536 == pytest.approx(2e7, rel=0.01)
        assert load(recipe, TINY).training.steps == 4
