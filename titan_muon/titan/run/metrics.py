"""What a run reports: a line on the console, a record in `metrics.jsonl`, and TensorBoard (and W&B if asked).

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor, WandBLogger, _get_metrics_rank
from torchtitan.distributed import ParallelDims

METRICS_FILE = "metrics.jsonl"
# TensorBoard draws what has the same first word side by side; the file keeps the keys that scripts read.
TAGS = {"loss": "loss/train", "val_loss": "loss/validation", "bits_per_byte": "loss/bits_per_byte"}
WANDB_ID_FILE = "wandb_id"
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a logged step is reported with.

    Attributes:
        step: the step, counted from 1.
        loss: mean cross entropy of the step's tokens over all ranks, in nats.
        grad_norm: norm of all gradients before clipping.
        tokens: tokens trained on since the run began, over all ranks.
        lr: learning rate of each group during this step.
        seconds: in each phase, over all steps since the last report.
        memory: peak of all ranks since the last report, in bytes.
        qk: largest attention logit of each layer, and how often a head was above the threshold, since the last report;
            None where logits are not observed.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    lr: Mapping[str, float]
    seconds: Mapping[str, float]
    memory: int
    qk: Mapping[str, Any] | None = None


class JsonLines(BaseLogger):
    """Appends records to a file, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: dict[str, Any], step: int) -> None:
        # Opened for each record, so that a run that dies has lost none and another process can read along.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


class TensorBoard(BaseLogger):
    """Writes metrics as scalars and the recipe as text; what an earlier run wrote after `first_step` is hidden."""

    def __init__(self, folder: Path, first_step: int, recipe: str) -> None:
        # A continued run writes the steps after its checkpoint again; without `purge_step` both curves would be shown.
        self.writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)
        # Markdown: indented by four spaces it is shown as it was written.
        self.writer.add_text("recipe", textwrap.indent(recipe, "    "), first_step - 1)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for tag, value in tagged(metrics):
            self.writer.add_scalar(tag, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB(BaseLogger):
    """Sends nested metrics to Weights & Biases under the tags that TensorBoard has.

    Args:
        folder: the run's folder; one run there is one run here, however often it is continued.
        recipe: the resolved recipe as TOML.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        id_file = folder / WANDB_ID_FILE
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        # TorchTitan's logger takes the id from the environment, and wandb itself whether the run goes on. A user who
        # has set one of them has decided.
        os.environ.setdefault("WANDB_RUN_ID", id_file.read_text(encoding="utf-8").strip())
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_RUN_NAME", f"{folder.parent.name}/{folder.name}")
        self.inner = WandBLogger(str(folder), config_dict=tomllib.loads(recipe))

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.inner.log(dict(tagged(metrics)), step)

    def close(self) -> None:
        self.inner.close()


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested metrics by their path, joined with slashes. Text is left out."""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif not isinstance(value, str):
            yield prefix + key, value


def tagged(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of nested metrics by the tags that TensorBoard and W&B show them under."""
    return ((TAGS.get(key, key), value) for key, value in flatten(metrics))


def read_until(path: Path, step: int) -> tuple[list[str], float]:
    """The lines of a metrics file up to `step`, and the seconds that the run had taken; nothing if there is no file."""
    lines: list[str] = []
    seconds = 0.0
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            # A crash has torn the last line. A step is logged before it is saved, so this one is done again.
            continue
        # A line without a step is of another tool.
        if isinstance(record, dict) and record.get("step", step) <= step:
            lines.append(line + "\n")
            seconds = record.get("seconds", seconds)
    return lines, seconds


class RunMetrics(MetricsProcessor):
    """Reports a run from the one rank that knows its loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        total_steps: int
        """Steps of the run, for the estimate of its end."""

        first_step: int = 1
        """Step that this process begins with."""

        seconds_before: float = 0.0
        """Seconds that the run had taken before this process."""

        recipe: str = ""
        """The resolved recipe as TOML, for TensorBoard's text tab and W&B."""

    config: Config
    ntokens_since_last_log: int
    time_last_log: float
    report_step: Callable[[float, float], None]
    """Reports the step by its loss and gradient norm; set by the trainer, which knows what else there is to report."""
    bytes_per_token: float | None = None
    """Bytes of held-out text that a predicted token stands for; None where they are not counted."""

    validation_loss = 0.0
    """The last validation's loss; under pipeline parallelism only ranks of the last stage have a loss."""

    tokens: int | None = None
    """Tokens trained on until the validation that comes next; None where they are not counted."""

    def __init__(self, config: Config, *, parallel_dims: ParallelDims, **kwargs: Any) -> None:
        # Before super(), which calls `_build_metric_logger`. With pipeline parallelism only the last stage has a loss,
        # so the reporter need not be rank 0.
        self.is_reporter = dist.get_rank() == _get_metrics_rank(
            parallel_dims=parallel_dims, pp_schedule=kwargs.get("pp_schedule", "")
        )
        super().__init__(config, parallel_dims=parallel_dims, **kwargs)
        self.batch_ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
        self._began = time.perf_counter() - config.seconds_before
        self._last_step = config.first_step - 1

    def _build_metric_logger(self, *, config: Config, dump_folder: str, **_: Any) -> BaseLogger:
        if not (self.is_reporter or config.save_for_all_ranks):
            return BaseLogger()
        rank = "" if self.is_reporter else f"rank-{dist.get_rank()}"
        loggers = LoggerContainer()
        loggers.add_logger(JsonLines(Path(dump_folder, rank, METRICS_FILE)))
        if config.enable_tensorboard:
            folder = Path(dump_folder, config.save_tb_folder, rank)
            loggers.add_logger(TensorBoard(folder, config.first_step, config.recipe))
        if config.enable_wandb:
            loggers.add_logger(WandB(Path(dump_folder, rank), config.recipe))
        return loggers

    def should_log(self, step: int) -> bool:
        """Whether `step` is reported: the first of the run, every `log_freq`-th, and the last."""
        return step in (1, self.config.total_steps) or step % self.config.log_freq == 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what runs inside out of the training's tokens and time."""
        # The start of the interval moves on by the pause: the next report then divides by the time of training alone.
        start, tokens = time.perf_counter(), self.ntokens_since_last_log
        yield
        self.time_last_log += time.perf_counter() - start
        self.ntokens_since_last_log = tokens

    def peak_memory(self) -> torch.Tensor:
        """Bytes that this rank's device had reserved at most since the last report, a float64 scalar."""
        # float64: float32 holds bytes exactly only up to 16 MiB.
        gib = self.device_memory_monitor.get_peak_stats().max_reserved_gib
        return torch.tensor(gib * GIB, dtype=torch.float64)

    def start(self, step: int) -> None:
        """Begin to count tokens and time anew after `step`; the first report counts from here."""
        self._last_step = step
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.device_memory_monitor.reset_peak_stats()
        self.time_last_log = time.perf_counter()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """What TorchTitan's step calls to report, on every rank."""
        # Its other numbers are left: learning rates by class instead of group, and tokens of this process's part alone.
        self.report_step(global_avg_loss, grad_norm)

    def log_step(self, report: StepReport) -> None:
        """Report a training step; called on every rank."""
        steps = report.step - self._last_step
        seconds = time.perf_counter() - self.time_last_log
        # The step ends with a reduction over all ranks, so one rank's clock and tokens stand for those of every rank.
        speed = self.ntokens_since_last_log * self.batch_ranks / seconds
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
        if self.is_reporter:
            print(self._step_line(report.step, record), flush=True)
        self.start(report.step)

    def _step_line(self, step: int, record: Mapping[str, Any]) -> str:
        total = self.config.total_steps
        left = timedelta(seconds=round((total - step) * record["time"]["step"]))
        rates = " ".join(f"{tag} {rate:.2e}" for tag, rate in record["lr"].items())
        mfu = f"  mfu {100 * record['mfu']:.1f} %" if "mfu" in record else ""
        color = self.color
        return (
            f"{color.red}step {step:>{len(str(total))}}/{total}{color.reset}"
            f"  {color.green}loss {record['loss']:.4f}{color.reset}  grad {record['grad_norm']:.3f}  lr {rates}"
            f"  {record['tokens_per_second']:,.0f} tok/s{mfu}  {record['memory_gib']:.2f} GiB  {left} left"
        )

    def log_divergence(self, step: int, reason: str) -> None:
        """Record that training ended at `step` because numbers were not finite; called on every rank."""
        self.logger.log({"diverged": reason}, step)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Report the loss on the held-out text, in nats per token; called on every rank."""
        self.validation_loss = loss
        record: dict[str, Any] = {"val_loss": loss}
        if self.tokens is not None:
            record["tokens"] = self.tokens
        line = f"{self.color.yellow}validation  step {step}{self.color.reset}  loss {loss:.4f}"
        if self.bytes_per_token is not None:
            record["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
            line += f"  {record['bits_per_byte']:.4f} bits per byte"
        record["seconds"] = time.perf_counter() - self._began
        self.logger.log(record if extra_metrics is None else record | extra_metrics, step)
        if self.is_reporter:
            print(line, flush=True)
