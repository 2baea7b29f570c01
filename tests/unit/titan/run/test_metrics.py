"""Records, the metrics file after a crash, and the lines on the console. No processes."""

import io
import json
import logging
import os
import re
import resource
import signal
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_muon.titan import compat

compat.install()

from tests import tiny  # noqa: E402
from titan_muon.titan.recipe import Recipe, RecipeError, to_toml  # noqa: E402
from titan_muon.titan.run import console, metrics  # noqa: E402
from titan_muon.titan.run.console import _Useful, set_up_logging  # noqa: E402
from titan_muon.titan.run.metrics import JsonLines, RunMetrics, StepReport, read_until, tagged  # noqa: E402
from titan_muon.titan.run.signals import SAME_PRESS_SECONDS, StopSignals  # noqa: E402
from titan_muon.titan.run.step_timer import StepTimer  # noqa: E402

REPORT = StepReport(
    step=10,
    loss=2.5,
    grad_norm=1.25,
    tokens=5120,
    lr={"muon": 2e-3, "adamw": 1e-3},
    seconds={"data": 0.1, "forward_backward": 5.0, "clip": 0.4, "optimizer": 2.0},
    memory=3 * 2**30,
)


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunMetrics:
    """Metrics of a run of 20 steps on 4 ranks, with 2 data-parallel ranks, on the first rank."""
    monkeypatch.setattr(metrics.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(metrics, "_get_metrics_rank", lambda **_: 0)
    config = RunMetrics.Config(log_freq=10, enable_tensorboard=False, disable_color_printing=True, total_steps=20)
    dims = SimpleNamespace(dp_replicate=1, dp_shard=2, world_size=4)
    built = config.build(parallel_dims=dims, dump_folder=str(tmp_path), pp_schedule="1F1B", config_dict={})
    built.num_flops_per_token = 100
    built.start(5)
    built.time_last_log -= 10.0
    built.ntokens_since_last_log = 1280
    return built


def record(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def test_step_is_recorded_and_shown(reporter: RunMetrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Averages must be over the steps since the last report, tokens over all data-parallel ranks."""
    reporter.report_step(REPORT)
    entry = record(tmp_path)
    assert (entry["step"], entry["loss"], entry["grad_norm"], entry["tokens"]) == (10, 2.5, 1.25, 5120)
    assert entry["lr"] == {"muon": 2e-3, "adamw": 1e-3}
    assert entry["tokens_per_second"] == pytest.approx(256, rel=0.02)
    assert entry["time"]["step"] == pytest.approx(2.0, rel=0.02)
    assert entry["time"]["optimizer"] == 0.4
    assert entry["memory_gib"] == 3
    assert "mfu" not in entry, "there is no peak to compare a CPU with"
    line = capsys.readouterr().out
    assert line.startswith("step 10/20  loss 2.5000  grad 1.250  lr muon 2.00e-03 adamw 1.00e-03")
    assert "3.00 GiB" in line
    assert "0:00:20 left" in line
    assert "qk" not in entry


def test_mfu_on_gpus_attention_logits_and_divergence_are_recorded(
    reporter: RunMetrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MFU: FLOPs over the possible FLOPs of all ranks."""
    reporter.gpu_peak_flops = 12_800.0
    logits = {"max_logit": {"layers.0": 12.5, "layers.1": 130.0}, "heads_above_threshold": 3}
    reporter.report_step(replace(REPORT, qk=logits))
    assert record(tmp_path)["mfu"] == pytest.approx(256 * 100 / (4 * 12_800), rel=0.02)
    assert re.search(r"  mfu (49\.[5-9]|50\.\d) %  ", capsys.readouterr().out), "a busy machine counts more time"
    assert record(tmp_path)["qk"] == logits
    tags = dict(tagged({"qk": logits}))
    assert tags == {"qk/max_logit/layers.0": 12.5, "qk/max_logit/layers.1": 130.0, "qk/heads_above_threshold": 3}
    reporter.logger.log({"diverged": "step 7: the loss is nan"}, 7)
    assert record(tmp_path) == {"step": 7, "diverged": "step 7: the loss is nan"}
    assert dict(tagged(record(tmp_path))) == {"step": 7}, "TensorBoard has no curve of texts"


def test_the_end_of_a_run_is_a_single_line(reporter: RunMetrics, capsys: pytest.CaptureFixture[str]) -> None:
    """The user needs the folder and the last losses; both may be hundreds of lines above."""
    reporter.say_end(0, "runs/x")
    assert capsys.readouterr().out == "", "nothing was trained"
    reporter.report_step(REPORT)
    reporter.report_validation(10, 2.25, {}, tokens=1, bytes_per_token=None)
    capsys.readouterr()
    reporter.say_end(10, "runs/x")
    shown = capsys.readouterr().out
    assert re.fullmatch(r"ended after step 10: loss 2\.5000, held out 2\.2500, \d+:\d\d:\d\d; runs/x\n", shown)
    reporter.report_validation(20, 2.75, {}, tokens=1, bytes_per_token=None)
    capsys.readouterr()
    reporter.say_end(20, "runs/x")
    assert "held out 2.7500 (best 2.2500 at step 10), " in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logging_kept() -> Iterator[None]:
    """Handlers and levels as before the test."""
    root, ours = logging.getLogger(), logging.getLogger("titan_muon")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_has_a_progress_bar(
    reporter: RunMetrics, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    reporter.advance(6)
    reporter.report_step(replace(REPORT, step=7))
    reporter.advance(7)
    reporter.close()
    assert capsys.readouterr().out.startswith("step  7/20  loss 2.5000")
    assert (" 6/20 " in stream.getvalue()) == terminal
    assert terminal or stream.getvalue() == ""


def test_quiet_prints_only_warnings_errors_and_the_end(
    reporter: RunMetrics, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logging_kept: None
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    set_up_logging(quiet=True)
    console.say("run runs/x")
    console.say("warning: nothing is exported")
    logging.info("Tokenizing")
    logging.warning("hardly text")
    reporter.report_step(REPORT)
    reporter.report_validation(10, 1.0, {}, tokens=1, bytes_per_token=None)
    reporter.advance(10)
    reporter.say_end(10, "runs/x")
    warned, library, end = capsys.readouterr().out.splitlines()
    assert (warned, library) == ("warning: nothing is exported", "warning: hardly text")
    assert end.startswith("ended after step 10: loss 2.5000, held out 1.0000")
    assert sys.stderr.getvalue() == "", "no bar either"  # type: ignore[attr-defined]


def test_validation_is_recorded_in_bits_per_byte(
    reporter: RunMetrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nats per token become bits per byte; where bytes are not counted the number must be absent, not wrong."""
    reporter.report_validation(10, 1.0, {}, tokens=4096, bytes_per_token=None)
    assert "bits_per_byte" not in record(tmp_path)
    reporter.report_validation(10, 1.0, {}, tokens=4096, bytes_per_token=2.0)
    assert record(tmp_path)["bits_per_byte"] == pytest.approx(0.7213475)
    assert record(tmp_path)["tokens"] == 4096, "runs of different batches are compared by tokens"
    assert "0.7213 bits per byte" in capsys.readouterr().out


def test_tensorboard_has_sections_of_several_curves_with_the_losses_first(reporter: RunMetrics, tmp_path: Path) -> None:
    """A curve over itself is a straight line, and bits per byte are the loss in another unit."""
    reporter.report_step(REPORT)
    reporter.report_validation(10, 2.0, {}, tokens=5120, bytes_per_token=1.5)
    board = metrics.TensorBoard(tmp_path / "tb", 1, "[muon]\nlr = 0.5\n")
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        step = values.pop("step")
        board.log(values | {"mfu": 0.4}, step)
    board.close()
    sections: dict[str, list[str]] = {}
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert text_of(events, "recipe") == "    [muon]\n    lr = 0.5\n"
    for tag in sorted(events.Tags()["scalars"]):
        sections.setdefault(tag.partition("/")[0], []).append(tag.partition("/")[2])
    assert list(sections)[:3] == ["loss", "loss_by_seconds", "loss_by_tokens"]
    assert sections["loss"] == ["bits_per_byte", "train", "validation"]
    assert sections["loss_by_seconds"] == sections["loss_by_tokens"] == ["train", "validation"]
    assert sections["step"] == ["grad_norm", "memory_gib", "mfu", "tokens_per_second"]
    assert set(sections) == {"loss", "loss_by_seconds", "loss_by_tokens", "lr", "step", "time"}


def text_of(events: EventAccumulator, tag: str) -> str:
    return events.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()


def points(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_has_losses_over_tokens_and_seconds_after_a_resume(tmp_path: Path) -> None:
    """TensorBoard hides points from the first step of a continued run on, and tokens are larger than any step."""
    records = [{"step": n, "loss": 5.0 - n, "tokens": 100 * n, "seconds": 10.0 * n} for n in (1, 2, 3)]
    board = metrics.TensorBoard(tmp_path, 1, "")
    for record in records:
        board.log(record, record["step"])
    board.close()
    again = metrics.TensorBoard(tmp_path, 3, "")
    again.describe({"plan": "8 matrices"}, records[:2])
    again.log({"loss": 1.5, "val_loss": 1.75, "tokens": 300, "seconds": 31.0}, 3)
    again.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert points(events, "loss/train") == [(1, 4.0), (2, 3.0), (3, 1.5)]
    assert points(events, "loss_by_tokens/train") == [(100, 4.0), (200, 3.0), (300, 1.5)]
    assert points(events, "loss_by_seconds/train") == [(10, 4.0), (20, 3.0), (31, 1.5)]
    assert points(events, "loss_by_tokens/validation") == [(300, 1.75)]
    assert text_of(events, "plan") == "    8 matrices"


def test_tensorboard_compares_hyperparameters_and_ended_runs(tmp_path: Path) -> None:
    """The tab HPARAMS has a line for each run: all keys, and whether the run ended."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for name in ("ended", "killed"):
        board = metrics.TensorBoard(tmp_path / name, 1, "name = 'x'\n[muon]\nlr = 0.25\nnesterov = true\n")
        if name == "ended":
            board.conclude()
        board.close()
        sent = EventAccumulator(str(tmp_path / name)).Reload().PluginTagToContent("hparams")
        data = {tag.rpartition("/")[2]: HParamsPluginData.FromString(content) for tag, content in sent.items()}
        keys = data["session_start_info"].session_start_info.hparams
        assert (keys["muon.lr"].number_value, keys["muon.nesterov"].number_value) == (0.25, 1)
        assert keys["name"].string_value == "x"
        assert ("session_end_info" in data) == (name == "ended")


def test_the_speed_excludes_pauses(reporter: RunMetrics) -> None:
    """Time and tokens of a validation must not count as training."""
    before = reporter.time_last_log
    reporter.pause()
    reporter.ntokens_since_last_log += 999
    time.sleep(0.05)
    reporter.resume()
    reporter.resume()
    assert reporter.ntokens_since_last_log == 1280
    assert reporter.time_last_log - before >= 0.05
    assert [step for step in range(1, 21) if reporter.should_log(step)] == [1, 10, 20], "both ends are shown"


@pytest.mark.parametrize("fault", ["full disk", "dead link"])
def test_a_record_that_cannot_be_written_is_kept_and_ends_no_run(
    reporter: RunMetrics, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    file = tmp_path / "metrics.jsonl"
    if fault == "full disk":
        file.symlink_to("/dev/full")
    else:
        tmp_path.rmdir()
        tmp_path.symlink_to("/no/where")
    for step in (10, 11):
        reporter.report_step(replace(REPORT, step=step))
    reason = "No space left on device" if fault == "full disk" else "File exists"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: step 10: metrics are kept in memory until they can be written: [Errno ")
    assert reason in line
    reporter.close()
    assert f"warning: {file} lacks the last 2 records: " in capsys.readouterr().out
    (file if fault == "full disk" else tmp_path).unlink()
    reporter.report_step(replace(REPORT, step=12))
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [10, 11, 12]
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
    boards = metrics.Boards([board, JsonLines(tmp_path / "metrics.jsonl")])
    monkeypatch.setattr(board.writer, "flush", lambda: (tmp_path / "tb" / "gone").open())
    for step in (1, 2):
        boards.log({"loss": 1.0}, step)
    boards.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: TensorBoard gets no more metrics, and metrics.jsonl does: [Errno 2]")
    assert list(tiny.records(tmp_path, "loss")) == [1, 2]


def test_lines_until_a_step(tmp_path: Path) -> None:
    """Later records and a torn last line must be left out; the seconds of the last record are where time goes on."""
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "loss": 2.0, "seconds": 1.5}, {"step": 2, "val_loss": 3.0}, {"step": 3, "seconds": 9.0}]
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "l')
    assert read_until(file, 2) == ([json.dumps(line) + "\n" for line in lines[:2]], 1.5)
    assert read_until(tmp_path / "absent", 2) == ([], 0.0)
    # A record of another tool, without a step, must not end a resume.
    others = ['{"step": 1, "seconds": 2.0}', '{"event": "preempted"}', "[1, 2]", '{"step": 2}']
    file.write_text("\n".join(others) + "\n")
    assert read_until(file, 1) == ([line + "\n" for line in others[:2]], 2.0)


def test_the_timer_sums_every_phase_and_resets_on_drain() -> None:
    timer = StepTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.phase("clip"):
            time.sleep(0.01)
        with timer.phase("data"):
            pass
    seconds = timer.drain()
    assert seconds["clip"] >= 0.02
    assert seconds["data"] < seconds["clip"]
    assert timer.drain() == {}


class StubWandb(types.ModuleType):
    """wandb for TorchTitan's logger; records the arguments of a run's start."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict] = []
        self.run = types.SimpleNamespace(summary={})
        self.Error: type[Exception] = OSError

    def init(self, **arguments: object) -> None:
        self.begun.append(arguments | {"resume": os.environ.get("WANDB_RESUME")})


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StubWandb:
    stub = StubWandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setattr(os, "environ", {})
    return stub


def test_wandb_gets_the_recipe_and_continues_the_run(tmp_path: Path, wandb: StubWandb) -> None:
    """The resolved recipe is the run's config, a continued folder is the same run, and a new folder a new run."""
    for name in ("first", "first", "second"):
        os.environ.clear()
        (tmp_path / name).mkdir(exist_ok=True)
        metrics.WandB(tmp_path / name, to_toml(Recipe(name="tiny")))
    os.environ |= {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}
    metrics.WandB(tmp_path, "").describe({"plan": "8 matrices", "changes": "muon.lr"}, [])
    first, again, second, mine = wandb.begun
    assert (first["config"]["name"], first["config"]["muon"]["momentum"]) == ("tiny", Recipe().muon.momentum)
    assert first["id"] == again["id"] != second["id"]
    assert (first["resume"], second["name"]) == ("allow", f"{tmp_path.name}/second")
    assert (mine["id"], mine["resume"]) == ("mine", "must"), "the user's values win"
    assert wandb.run.summary == {"plan": "8 matrices", "changes": "muon.lr"}


def test_a_refusal_of_wandb_is_an_error_with_the_key(
    tmp_path: Path, wandb: StubWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**arguments: object) -> None:
        raise wandb.Error("No API key configured.\nmore")

    monkeypatch.setattr(wandb, "init", init)
    remedies = {"No API key configured. Or set .* WANDB_MODE=offline": wandb, "run pip install wandb": None}
    for problem, module in remedies.items():
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(RecipeError, match=f"^metrics.enable_wandb = true: {problem}"):
            metrics.WandB(tmp_path, "")


def test_the_filter_hides_only_listed_lines_and_warnings() -> None:
    for level, text, shown in (
        (logging.INFO, "Building a model", False),
        (logging.WARNING, "Building failed", True),
        (logging.WARNING, "ENV[TORCH_FR_BUFFER_SIZE] = 5000 will be overridden to 9 based on job config", True),
        (logging.WARNING, "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING] = 1 will be overridden to 3", False),
    ):
        assert _Useful().filter(logging.LogRecord("torchtitan", level, "", 0, text, None, None)) == shown, text


def test_a_warning_of_a_rank_is_printed_once_with_the_rank() -> None:
    """For example memory errors of a GPU or a slow link, on a single rank."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    try:
        records = [
            logging.LogRecord("torchtitan", level, "", 0, "ECC %s", ("error",), None) for level in (30, 30, 20, 40)
        ]
        assert [_Useful().filter(record) for record in records] == [True, False, False, True]
        assert records[0].getMessage() == "rank 1: ECC error"
    finally:
        dist.destroy_process_group()


def test_a_job_may_open_a_socket_to_1024_ranks() -> None:
    from titan_muon.titan.run.job import _raise_file_limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        _raise_file_limit()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == min(65536, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_signal_stops_after_the_step_and_handlers_come_back() -> None:
    """A signal inside the context is only recorded; afterwards Python's handling is back."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(None, announce=False) as stop:
        stop.begin_step()
        assert not stop.stop_after_step()
        signal.raise_signal(signal.SIGTERM)
        assert stop.stop_after_step()
        assert stop.name == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_ends_at_once_and_an_echo_does_not() -> None:
    """A Ctrl-C forwarded by torchrun does not kill; a later Ctrl-C does."""
    with StopSignals(None, announce=False) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        stop._first -= SAME_PRESS_SECONDS
        killed: list[int] = []
        stop._end_now = killed.append  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGINT)
    assert killed == [signal.SIGINT]
