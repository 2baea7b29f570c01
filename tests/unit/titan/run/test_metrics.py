"""Records, the metrics file on a full disk, the lines on the console, and signals. No processes."""

import io
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import tiny
from titan_muon.trainer.recipe import Recipe, RecipeError, to_toml
from titan_muon.trainer.run import console, metrics
from titan_muon.trainer.run.console import _Useful, set_up_logging
from titan_muon.trainer.run.metrics import JsonLines, RunMetrics, tagged
from titan_muon.trainer.run.signals import SAME_PRESS_SECONDS, StopSignals


@pytest.fixture
def measured() -> SimpleNamespace:
    phases = {"data": 0.1, "forward_backward": 5.0, "clip": 0.4, "optimizer": 2.0}
    values = {"lr": {"muon": 2e-3, "adamw": 1e-3}, "memory_gib": 3.0, "phases": phases}
    return SimpleNamespace(values=values, measure=lambda: dict(values), tokens=5120, bytes_per_token=None)


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: SimpleNamespace) -> RunMetrics:
    """Metrics of a run of 20 steps on 4 ranks, with 2 data-parallel ranks, on the first rank."""
    monkeypatch.setattr(metrics.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(metrics, "_get_metrics_rank", lambda **_: 0)
    config = RunMetrics.Config(
        log_freq=10, enable_tensorboard=False, disable_color_printing=True, total_steps=20, trainer=lambda: measured
    )
    dims = SimpleNamespace(dp_replicate=1, dp_shard=2, world_size=4)
    built = config.build(parallel_dims=dims, dump_folder=str(tmp_path), pp_schedule="1F1B", config_dict={})
    built.num_flops_per_token = 100
    built.start(5)
    built.time_last_log -= 10.0
    built.ntokens_since_last_log = 1280
    return built


def report(reporter: RunMetrics, step: int = 10) -> None:
    reporter.log(step, 2.5, 2.75, 1.25)


def record(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_step_is_recorded_and_shown(
    reporter: RunMetrics, measured: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Averages must be over the steps since the last report, tokens over data-parallel ranks, MFU over all ranks."""
    reporter.gpu_peak_flops = 12_800.0
    logits = {"max_logit": {"layers.0": 12.5, "layers.1": 130.0}, "heads_above_threshold": 3}
    measured.values["qk"] = logits
    report(reporter)
    entry = record(tmp_path)
    assert (entry["step"], entry["loss"], entry["grad_norm"], entry["tokens"]) == (10, 2.5, 1.25, 5120)
    assert entry["lr"] == {"muon": 2e-3, "adamw": 1e-3}
    assert entry["tokens_per_second"] == pytest.approx(256, rel=0.02)
    assert entry["mfu"] == pytest.approx(256 * 100 / (4 * 12_800), rel=0.02)
    assert entry["time"]["step"] == pytest.approx(2.0, rel=0.02)
    assert entry["time"]["optimizer"] == 0.4
    assert entry["memory_gib"] == 3
    assert entry["qk"] == logits
    line = capsys.readouterr().out
    assert line.startswith("step 10/20  loss 2.5000  grad 1.250  lr muon 2.00e-03 adamw 1.00e-03")
    assert re.search(r"  mfu (49\.[5-9]|50\.\d) %  3\.00 GiB  0:00:20 left", line), "a busy machine counts more time"
    tags = dict(tagged({"qk": logits, "mfu": 0.5, "diverged": "TensorBoard has no curve of texts"}))
    of_layers = {"qk/max_logit/layers.0": 12.5, "qk/max_logit/layers.1": 130.0}
    assert tags == {**of_layers, "qk/heads_above_threshold": 3, "step/mfu": 0.5}


def test_a_validation_is_recorded_by_tokens_and_bytes(
    reporter: RunMetrics, measured: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter.log_validation(1.0, 10, {"extra": 2})
    assert "bits_per_byte" not in record(tmp_path)
    measured.bytes_per_token = 2.0
    reporter.log_validation(1.0, 10)
    assert record(tmp_path)["bits_per_byte"] == pytest.approx(0.7213475)
    assert record(tmp_path)["tokens"] == 5120, "runs of different batches are compared by tokens"
    assert "0.7213 bits per byte" in capsys.readouterr().out


@pytest.fixture
def logging_kept() -> Iterator[None]:
    """Handlers and levels as before the test."""
    root, ours = logging.getLogger(), logging.getLogger("titan_muon")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.usefixtures("logging_kept")
def test_quiet_prints_only_warnings_errors_and_the_end(
    reporter: RunMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end has the folder and the last losses, which may be hundreds of lines above."""
    set_up_logging(quiet=True)
    reporter.show_end(0, "runs/x")
    console.print_on_rank0("run runs/x")
    console.print_on_rank0("warning: nothing is exported")
    logging.getLogger("titan_muon.trainer.data").info("Tokenizing")
    logging.warning("hardly text")
    report(reporter)
    reporter.log_validation(1.0, 10)
    reporter.show_end(10, "runs/x")
    reporter.close()
    *lines, end = capsys.readouterr().out.splitlines()
    assert lines == ["warning: nothing is exported", "warning: hardly text"], "nothing was trained at the first end"
    assert re.fullmatch(r"ended after step 10: loss 2\.5000, held out 1\.0000, \d+:\d\d:\d\d; runs/x", end)


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_has_a_progress_bar(
    reporter: RunMetrics, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    reporter.advance(6)
    report(reporter, 7)
    reporter.close()
    assert (" 6/20 " in stream.getvalue()) == terminal


def test_tensorboard_has_the_recipe_and_hides_repeated_steps(tmp_path: Path) -> None:
    board = metrics.TensorBoard(tmp_path, 1, "[muon]\nlr = 0.5\n")
    for step in (1, 2, 3):
        board.log({"loss": 5.0 - step, "lr": {"muon": 0.5}}, step)
    board.close()
    again = metrics.TensorBoard(tmp_path, 3, "")
    again.log({"loss": 1.5, "val_loss": 1.75}, 3)
    again.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    losses = {"loss/train": [(1, 4.0), (2, 3.0), (3, 1.5)], "loss/validation": [(3, 1.75)]}
    assert points == {**losses, "lr/muon": [(1, 0.5), (2, 0.5)]}
    text = events.Tensors("recipe/text_summary")[0]
    assert text.tensor_proto.string_val[0].decode() == "    [muon]\n    lr = 0.5\n"


def test_the_speed_excludes_pauses(reporter: RunMetrics) -> None:
    before = reporter.time_last_log
    reporter.pause()
    reporter.ntokens_since_last_log += 999
    time.sleep(0.05)
    reporter.resume()
    reporter.resume()
    assert reporter.ntokens_since_last_log == 1280
    assert reporter.time_last_log - before >= 0.05
    assert [step for step in range(1, 21) if reporter.should_log(step)] == [1, 10, 20], "both ends are shown"


def test_a_record_that_cannot_be_written_is_kept_and_ends_no_run(
    reporter: RunMetrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.symlink_to("/dev/full")
    for step in (10, 11):
        report(reporter, step)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: step 10: metrics are kept in memory until they can be written: [Errno ")
    reporter.close()
    assert f"warning: {file} lacks the last 2 records: " in capsys.readouterr().out
    file.unlink()
    report(reporter, 12)
    assert list(tiny.records(tmp_path, "loss")) == [10, 11, 12]
    assert "warning" not in capsys.readouterr().out


def test_a_disk_that_is_full_in_the_middle_of_a_record_leaves_no_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.log({"loss": 1.0}, 1)
    opened = Path.open

    class Full(io.BufferedWriter):
        def writelines(self, lines: list[bytes]) -> None:  # type: ignore[override]
            self.write(lines[0][:5])
            self.flush()
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: Full(opened(path, mode, buffering=0)))
        lines.log({"loss": 2.0}, 2)
    lines.log({"loss": 3.0}, 3)
    assert list(tiny.records(tmp_path, "loss")) == [1, 2, 3]


def test_a_board_that_cannot_write_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = metrics.TensorBoard(tmp_path / "tb", 1, "")
    boards = metrics.Boards()
    boards.add_logger(board)
    boards.add_logger(JsonLines(tmp_path / "metrics.jsonl"))
    monkeypatch.setattr(board.writer, "flush", lambda: (tmp_path / "tb" / "gone").open())
    for step in (1, 2):
        boards.log({"loss": 1.0}, step)
    boards.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: TensorBoard gets no more metrics, and metrics.jsonl does: [Errno 2]")
    assert list(tiny.records(tmp_path, "loss")) == [1, 2]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """wandb for TorchTitan's logger, and no environment."""
    stub = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setattr(os, "environ", {})
    return stub


def test_wandb_gets_the_recipe_and_continues_the_run(tmp_path: Path, wandb: mock.Mock) -> None:
    """The resolved recipe is the run's config, and the run's id is W&B's, unless the user has set another."""
    for run in ("first", "first", "mine"):
        os.environ.clear()
        os.environ |= {"WANDB_RUN_ID": "theirs", "WANDB_RESUME": "must"} if run == "mine" else {}
        metrics.WandB(tmp_path, run, to_toml(Recipe(name="tiny"))).log({"loss": 1.0}, 3)
        assert os.environ["WANDB_RESUME"] == ("must" if run == "mine" else "allow")
    calls = [call.kwargs for call in wandb.init.call_args_list]
    assert [call["id"] for call in calls] == ["first", "first", "theirs"]
    assert (calls[0]["config"]["name"], calls[0]["project"]) == ("tiny", "titan-muon")
    assert calls[0]["name"] == f"{tmp_path.parent.name}/{tmp_path.name}"
    wandb.log.assert_called_with({"loss/train": 1.0}, step=3)


def test_a_refusal_of_wandb_is_an_error_with_the_key(
    tmp_path: Path, wandb: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.init.side_effect = ValueError("No API key configured.\nmore")
    for problem, module in (("No API key configured.", wandb), ("import of wandb halted", None)):
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(RecipeError, match=f"^metrics.enable_wandb = true: {problem}.*; pip install wandb, log in"):
            metrics.WandB(tmp_path, "id", to_toml(Recipe()))


@pytest.mark.usefixtures("logging_kept")
def test_the_console_has_our_lines_and_warnings_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging()
    logging.info("Building a model")
    logging.warning("Building failed")
    logging.getLogger("titan_muon.trainer.data").info("Tokenizing")
    logging.warning("ENV[TORCH_FR_BUFFER_SIZE] = 5000 will be overridden to 9 based on job config")
    logging.warning("ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING] = 1 will be overridden to 3")
    failed, ours, buffers = capsys.readouterr().out.splitlines()
    assert (failed, ours) == ("warning: Building failed", "Tokenizing")
    assert buffers.startswith("warning: ENV[TORCH_FR_BUFFER_SIZE]")


def test_a_warning_of_a_rank_is_printed_once_with_the_rank() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    try:
        levels = (30, 30, 20, 40)
        records = [logging.LogRecord("torchtitan", level, "", 0, "ECC %s", ("error",), None) for level in levels]
        assert [_Useful().filter(record) for record in records] == [True, False, False, True]
        assert records[0].getMessage() == "rank 1: ECC error"
    finally:
        dist.destroy_process_group()


def test_a_signal_stops_after_the_step_and_a_later_one_at_once() -> None:
    """A Ctrl-C forwarded by torchrun does not kill; a later Ctrl-C does. Afterwards Python's handling is back."""
    before = signal.getsignal(signal.SIGTERM)
    killed: list[int] = []
    with StopSignals() as stop:
        stop._end_now = killed.append  # type: ignore[method-assign]
        stop.begin_step()
        stop.end_step()
        assert not stop.stopping
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        stop.end_step()
        assert stop.stopping
        assert killed == []
        stop._first -= SAME_PRESS_SECONDS
        signal.raise_signal(signal.SIGINT)
    assert killed == [signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before
