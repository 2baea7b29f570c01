"""Reports of a run: console, `metrics.jsonl`, TensorBoard, and W&B on request.

A record is a JSON object for each logged step (`loss`, `lr`, `tokens_per_second`, `time`, ...) and for each validation
(`val_loss`, `bits_per_byte`).
"""

import json
import math
import os
import textwrap
import time
import tomllib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from torchtitan.components.metrics import BaseLogger, MetricsProcessor, WandBLogger, _get_metrics_rank
from torchtitan.distributed import ParallelDims
from tqdm import tqdm

from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.run.console import is_quiet, show
from titan_muon.titan.storage.space import unusable

METRICS_FILE = "metrics.jsonl"
# TensorBoard groups tags by the first word; the file keeps the keys for scripts.
LOSS_TAGS = {"loss": "loss/train", "val_loss": "loss/validation"}
STEP_KEYS = ("grad_norm", "tokens_per_second", "mfu", "memory_gib")
TAGS = LOSS_TAGS | {"bits_per_byte": "loss/bits_per_byte"} | {key: f"step/{key}" for key in STEP_KEYS}
AXES = ("tokens", "seconds")
"""Places of losses beside the step. TensorBoard would draw them as straight lines; W&B offers them as axes."""
WANDB_ID_FILE = "wandb_id"
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Report of a logged step; `seconds`, `memory` and `qk` since the last report."""

    step: int
    loss: float  # mean cross entropy over all ranks, in nats
    grad_norm: float  # of all gradients, before clipping
    tokens: int  # of the run, over all ranks
    lr: Mapping[str, float]  # by group
    seconds: Mapping[str, float]  # by phase
    memory: int  # peak over all ranks, in bytes
    qk: Mapping[str, Any] | None = None  # largest logit of each layer, and counts of heads above the threshold


class Board(BaseLogger):
    """A place for metrics."""

    def describe(self, texts: Mapping[str, str], earlier: Iterable[Mapping[str, Any]]) -> None:
        """Show `texts` by tag, and records of the run before this process."""

    def conclude(self) -> None:
        """Mark the end of the run."""


class Boards(Board):
    """Boards that together end no run: a board that cannot write is named and left out."""

    def __init__(self, boards: Iterable[Board]) -> None:
        self._boards = list(boards)

    def _each(self, action: Callable[[Any], None]) -> None:
        for board in [*self._boards]:
            try:
                action(board)
            except OSError as error:
                self._boards.remove(board)
                show(f"warning: {type(board).__name__} gets no more metrics, and {METRICS_FILE} does: {error}")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._each(lambda board: board.log(metrics, step))

    def describe(self, texts: Mapping[str, str], earlier: Iterable[Mapping[str, Any]]) -> None:
        records = [*earlier]
        self._each(lambda board: board.describe(texts, records))

    def conclude(self) -> None:
        self._each(lambda board: board.conclude())

    def close(self) -> None:
        self._each(lambda board: board.close())


class JsonLines(Board):
    """Appends records to a file. Keeps records while the disk is full, and raises no OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[bytes] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        was_full = bool(self._unwritten)
        self._unwritten.append(json.dumps({"step": step, **metrics}).encode() + b"\n")
        if (error := self._write()) and not was_full:
            show(f"warning: step {step}: metrics are kept in memory until they can be written: {error}")

    def close(self) -> None:
        if self._unwritten and (error := self._write()):
            show(f"warning: {self.path} lacks the last {len(self._unwritten)} records: {error}")

    def _write(self) -> OSError | None:
        end = None
        try:
            # A crash must lose no record.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                end = file.tell()
                file.writelines(self._unwritten)
        except OSError as error:
            if end is not None:
                with suppress(OSError):
                    os.truncate(self.path, end)
            return error
        self._unwritten.clear()
        return None


class TensorBoard(Board):
    """Writes metrics as scalars, losses also by tokens and seconds, and the recipe as text and hyperparameters."""

    def __init__(self, folder: Path, first_step: int, recipe: str) -> None:
        # A continued run repeats the steps after the checkpoint.
        self.writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)
        self.first_step = first_step
        # `SummaryWriter.add_hparams` would write into another run, without losses.
        _, begin, self._end = hparams(dict(hyperparameters(recipe)), {})
        self.writer._get_file_writer().add_summary(begin, first_step - 1)
        self._add_text("recipe", recipe)

    def _add_text(self, tag: str, text: str) -> None:
        self.writer.add_text(tag, textwrap.indent(text, "    "), self.first_step - 1)

    def describe(self, texts: Mapping[str, str], earlier: Iterable[Mapping[str, Any]]) -> None:
        for tag, text in texts.items():
            self._add_text(tag, text)
        # The steps of these points are tokens and seconds, so `purge_step` has hidden them.
        for record in earlier:
            self._log_losses(record)
        self.writer.flush()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for tag, value in tagged(metrics):
            if tag not in AXES:
                self.writer.add_scalar(tag, value, step)
        self._log_losses(metrics)
        self.writer.flush()

    def _log_losses(self, metrics: Mapping[str, Any]) -> None:
        for axis in AXES:
            for key, tag in LOSS_TAGS.items():
                if key in metrics and axis in metrics:
                    self.writer.add_scalar(tag.replace("loss/", f"loss_by_{axis}/"), metrics[key], int(metrics[axis]))

    def conclude(self) -> None:
        self.writer._get_file_writer().add_summary(self._end)

    def close(self) -> None:
        self.writer.close()


class WandB(Board):
    """Sends metrics to Weights & Biases under TensorBoard's tags. A continued `folder` stays a single run.

    `recipe`: as TOML.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        id_file = folder / WANDB_ID_FILE
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        # TorchTitan's logger and wandb read these variables. The user's values win.
        os.environ.setdefault("WANDB_RUN_ID", id_file.read_text(encoding="utf-8").strip())
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_RUN_NAME", f"{folder.parent.name}/{folder.name}")
        try:
            import wandb
        except ImportError as error:
            raise RecipeError("metrics.enable_wandb = true: run pip install wandb, or set it to false") from error
        try:
            self.inner = WandBLogger(str(folder), config_dict=tomllib.loads(recipe))
        except wandb.Error as error:
            problem = str(error).splitlines()[0]
            remedy = "Or set the environment variable WANDB_MODE=offline, or metrics.enable_wandb = false"
            raise RecipeError(f"metrics.enable_wandb = true: {problem} {remedy}") from error

    def describe(self, texts: Mapping[str, str], earlier: Iterable[Mapping[str, Any]]) -> None:
        self.inner.wandb.run.summary.update(dict(texts))

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.inner.log(dict(tagged(metrics)), step)

    def close(self) -> None:
        self.inner.close()


def hyperparameters(recipe: str) -> Iterator[tuple[str, str | bool | float]]:
    """Values of a TOML recipe by dotted key, lists as text."""
    for key, value in tomllib.loads(recipe).items():
        for name, inner in value.items() if isinstance(value, dict) else [("", value)]:
            yield f"{key}.{name}".strip("."), inner if isinstance(inner, str | bool | int | float) else str(inner)


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested metrics by path, joined with slashes."""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif not isinstance(value, str):
            yield prefix + key, value


def tagged(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of nested metrics by the tags of TensorBoard and W&B."""
    return ((TAGS.get(key, key), value) for key, value in flatten(metrics))


NUMBERS = ("step", "loss", "grad_norm", "val_loss", "bits_per_byte", *AXES)


def read_until(path: Path, step: int, warn: Callable[[str], None] = lambda line: None) -> tuple[list[str], float]:
    """Lines of a metrics file up to `step`, and the run's seconds until then. `warn`: takes a line on damage."""
    lines: list[str] = []
    seconds = 0.0
    damaged: list[int] = []
    # A crash has torn the last line. The run repeats this step: a save comes after the line.
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    for number, line in enumerate(texts, start=1):
        record = _record(line)
        if record is None:
            damaged += [number] if line.strip() and number < len(texts) else []
        elif record.get("step", step) <= step:
            lines.append(line + "\n")
            seconds = record.get("seconds", seconds)
    if damaged:
        numbers = ", ".join(map(str, damaged[:5])) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        warn(f"warning: {path}: left out the damaged line{'s' if len(damaged) > 1 else ''} {numbers}")
    return lines, seconds


def _record(line: str) -> dict[str, Any] | None:
    """A line of a metrics file; None for a damaged line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "\ufffd" in line:
        return None
    # A bool is an int.
    return record if all(type(record.get(key, 0)) in (int, float) for key in NUMBERS) else None


class RunMetrics(MetricsProcessor):
    """Reports on the rank with the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        total_steps: int
        first_step: int = 1
        seconds_before: float = 0.0
        recipe: str = ""

    config: Config
    logger: Board
    ntokens_since_last_log: int
    time_last_log: float
    logged: tuple[float, float] | None = None
    """Loss and norm of a step that TorchTitan has logged and the trainer has not reported."""
    validated: tuple[float, Mapping[str, Any]] | None = None
    """Loss and other metrics of a validation that the trainer has not reported."""
    last_loss: float | None = None
    validation_loss: float | None = None
    """Loss of the last validation; under pipeline parallelism only on ranks of the last stage."""
    best_validation: tuple[float, int] | None = None

    def __init__(self, config: Config, *, parallel_dims: ParallelDims, **kwargs: Any) -> None:
        # super() calls `_build_metric_logger`. Under pipeline parallelism only the last stage has a loss.
        self.is_reporter = dist.get_rank() == _get_metrics_rank(
            parallel_dims=parallel_dims, pp_schedule=kwargs.get("pp_schedule", "")
        )
        super().__init__(config, parallel_dims=parallel_dims, **kwargs)
        self.batch_ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
        self._began = time.perf_counter() - config.seconds_before
        self._last_step = config.first_step - 1
        self._bar: tqdm[Any] | None = None
        self._paused: tuple[float, int] | None = None

    def _build_metric_logger(self, *, config: Config, dump_folder: str, **_: Any) -> Board:
        if not (self.is_reporter or config.save_for_all_ranks):
            return Board()
        rank = "" if self.is_reporter else f"rank-{dist.get_rank()}"
        boards: list[Board] = [JsonLines(Path(dump_folder, rank, METRICS_FILE))]
        try:
            if config.enable_tensorboard:
                folder = Path(dump_folder, config.save_tb_folder, rank)
                boards.append(TensorBoard(folder, config.first_step, config.recipe))
            if config.enable_wandb:
                boards.append(WandB(Path(dump_folder, rank), config.recipe))
        except OSError as error:
            raise unusable(dump_folder, error) from error
        return Boards(boards)

    def describe(self, texts: Mapping[str, str], folder: str) -> None:
        if isinstance(self.logger, Boards):
            lines, _ = read_until(Path(folder, METRICS_FILE), self.config.first_step - 1)
            self.logger.describe(texts, map(json.loads, lines))

    def should_log(self, step: int) -> bool:
        return step in (1, self.config.total_steps) or step % self.config.log_freq == 0

    def pause(self) -> None:
        """Exclude everything until `resume` from the training's tokens and time."""
        self._paused = time.perf_counter(), self.ntokens_since_last_log

    def resume(self) -> None:
        if self._paused is not None:
            began, self.ntokens_since_last_log = self._paused
            # The next report divides by the time since `time_last_log`.
            self.time_last_log += time.perf_counter() - began
            self._paused = None

    def peak_memory(self) -> torch.Tensor:
        """(), float64: peak of reserved bytes on this rank's device since the last report."""
        gib = self.device_memory_monitor.get_peak_stats().max_reserved_gib
        return torch.tensor(gib * GIB, dtype=torch.float64)

    def start(self, step: int) -> None:
        self._last_step = step
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.device_memory_monitor.reset_peak_stats()
        self.time_last_log = time.perf_counter()

    def advance(self, step: int) -> None:
        if not self.is_reporter:
            return
        if self._bar is None:
            # `disable=None`: no bar unless stderr is a terminal.
            self._bar = tqdm(
                total=self.config.total_steps,
                initial=step - 1,
                unit="step",
                leave=False,
                dynamic_ncols=True,
                mininterval=0.5,
                disable=True if is_quiet() else None,
            )
        if self.last_loss is not None:
            self._bar.set_postfix_str(f"loss {self.last_loss:.4f}", refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        super().close()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        # TorchTitan's other numbers are learning rates by class, and tokens of this process only.
        self.logged = global_avg_loss, grad_norm

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Keep the held-out loss in nats per token; called on every rank."""
        self.validated = loss, extra_metrics or {}

    def report_step(self, report: StepReport) -> None:
        steps = report.step - self._last_step
        seconds = time.perf_counter() - self.time_last_log
        # The step ends with an all-reduce, so one rank's clock represents all ranks.
        speed = self.ntokens_since_last_log * self.batch_ranks / seconds
        self.last_loss = report.loss
        record: dict[str, Any] = asdict(report)
        del record["step"], record["seconds"], record["memory"]
        if report.qk is None:
            del record["qk"]
        record["tokens_per_second"] = speed
        mfu = self.num_flops_per_token * speed / (self.gpu_peak_flops * self.parallel_dims.world_size)
        if mfu > 0 and not self.has_quantization:
            record["mfu"] = mfu
        phases = {phase: total / steps for phase, total in report.seconds.items()}
        record["time"] = {"step": seconds / steps, **phases}
        record["memory_gib"] = report.memory / GIB
        record["seconds"] = time.perf_counter() - self._began
        self.logger.log(record, report.step)
        if self.is_reporter and not is_quiet():
            show(self._step_line(report.step, record))
        self.start(report.step)

    def _step_line(self, step: int, record: Mapping[str, Any]) -> str:
        total = self.config.total_steps
        remaining = timedelta(seconds=round((total - step) * record["time"]["step"]))
        rates = " ".join(f"{tag} {rate:.2e}" for tag, rate in record["lr"].items())
        mfu = f"  mfu {100 * record['mfu']:.1f} %" if "mfu" in record else ""
        color = self.color
        return (
            f"{color.red}step {step:>{len(str(total))}}/{total}{color.reset}"
            f"  {color.green}loss {record['loss']:.4f}{color.reset}  grad {record['grad_norm']:.3f}  lr {rates}"
            f"  {1e3 * record['time']['step']:,.0f} ms"
            f"  {record['tokens_per_second']:,.0f} tok/s{mfu}  {record['memory_gib']:.2f} GiB  {remaining} left"
        )

    def say_end(self, step: int, folder: str) -> None:
        if not self.is_reporter or self.last_loss is None:
            return
        if self._bar is not None:
            self._bar.close()
        self.logger.conclude()
        took = timedelta(seconds=round(time.perf_counter() - self._began))
        held_out = "" if self.validation_loss is None else f", held out {self.validation_loss:.4f}"
        if self.best_validation is not None and self.best_validation[0] != self.validation_loss:
            best, best_step = self.best_validation
            held_out += f" (best {best:.4f} at step {best_step})"
        show(f"ended after step {step}: loss {self.last_loss:.4f}{held_out}, {took}; {folder}")

    def report_validation(
        self, step: int, loss: float, others: Mapping[str, Any], *, tokens: int, bytes_per_token: float | None
    ) -> None:
        """Report the held-out loss, on every rank. `bytes_per_token`: of the held-out text, if known."""
        self.validation_loss = loss
        if self.best_validation is None or loss < self.best_validation[0]:
            self.best_validation = (loss, step)
        record: dict[str, Any] = {"val_loss": loss, "tokens": tokens}
        line = f"{self.color.yellow}validation  step {step}{self.color.reset}  loss {loss:.4f}"
        if bytes_per_token is not None:
            record["bits_per_byte"] = loss / math.log(2) / bytes_per_token
            line += f"  {record['bits_per_byte']:.4f} bits per byte"
        record["seconds"] = time.perf_counter() - self._began
        self.logger.log({**record, **others}, step)
        if self.is_reporter and not is_quiet():
            show(line)
