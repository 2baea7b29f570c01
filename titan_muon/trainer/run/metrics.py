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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
    WandBLogger,
    _get_metrics_rank,
)
from torchtitan.distributed import ParallelDims
from tqdm import tqdm

from titan_muon.trainer.fault import unusable
from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.run.console import is_quiet, show
from titan_muon.trainer.run_folder import METRICS

TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/validation",
    "bits_per_byte": "loss/bits_per_byte",
    **{key: f"step/{key}" for key in ("grad_norm", "tokens_per_second", "mfu", "memory_gib")},
}
"""TensorBoard groups tags by the first word; the file keeps the keys for scripts."""


class Boards(LoggerContainer):
    """Places for metrics that together end no run: a board that cannot write is named and left out."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._each(lambda board: board.log(metrics, step))

    def close(self) -> None:
        self._each(lambda board: board.close())

    def _each(self, action: Callable[[BaseLogger], None]) -> None:
        for board in [*self._loggers]:
            try:
                action(board)
            except OSError as error:
                self._loggers.remove(board)
                show(f"warning: {type(board).__name__} gets no more metrics, and {METRICS} does: {error}")


class JsonLines(BaseLogger):
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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                end = file.tell()
                file.writelines(self._unwritten)
        except OSError as error:
            # A disk that is full in the middle of a record must leave no torn line.
            if end is not None:
                with suppress(OSError):
                    os.truncate(self.path, end)
            return error
        self._unwritten.clear()
        return None


class TensorBoard(TensorBoardLogger):
    """Writes metrics as scalars at once, and the recipe as text."""

    def __init__(self, folder: Path, first_step: int, recipe: str) -> None:
        # TorchTitan's has no purge: a continued run repeats the steps after the checkpoint.
        self.tag = None
        self.writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)
        self.writer.add_text("recipe", textwrap.indent(recipe, "    "), first_step - 1)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        super().log(dict(tagged(metrics)), step)
        self.writer.flush()


class WandB(WandBLogger):
    """Sends metrics to Weights & Biases under TensorBoard's tags. A continued run, by its id, stays a single run.

    `recipe`: as TOML. Raises RecipeError without wandb, or for a refusal by wandb.
    """

    def __init__(self, folder: Path, run: str, recipe: str) -> None:
        name = f"{folder.parent.name}/{folder.name}"
        # TorchTitan's logger and wandb read these variables. The user's values win.
        for key, value in {"RUN_ID": run, "RESUME": "allow", "RUN_NAME": name, "PROJECT": "titan-muon"}.items():
            os.environ.setdefault(f"WANDB_{key}", value)
        try:
            super().__init__(str(folder), config_dict=tomllib.loads(recipe))
        # The classes of wandb's errors are in wandb.
        except Exception as error:
            remedy = "pip install wandb, log in, set WANDB_MODE=offline, or set it to false"
            raise RecipeError(f"= true: {str(error).splitlines()[0]}; {remedy}", key="metrics.enable_wandb") from error

    def log(self, metrics: dict[str, Any], step: int) -> None:
        super().log(dict(tagged(metrics)), step)


def tagged(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested metrics by the tags of TensorBoard and W&B: paths, joined with slashes."""
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from tagged(value, f"{prefix}{key}/")
        elif not isinstance(value, str):
            yield TAGS.get(prefix + key, prefix + key), value


class RunMetrics(MetricsProcessor):
    """TorchTitan's metrics with a run's records, on the rank with the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """`trainer`: returns the trainer, for its `measure`, `tokens` and `bytes_per_token`."""

        total_steps: int
        first_step: int = 1
        seconds_before: float = 0.0
        recipe: str = ""
        run: str = ""  # id
        trainer: Callable[[], Any] | None = None

    config: Config
    ntokens_since_last_log: int
    time_last_log: float

    def __init__(self, config: Config, *, parallel_dims: ParallelDims, **kwargs: Any) -> None:
        assert config.trainer is not None, "MuonTrainer builds its metrics"
        self._trainer = config.trainer
        # super() calls `_build_metric_logger`. Under pipeline parallelism only the last stage has a loss.
        self.is_reporter = dist.get_rank() == _get_metrics_rank(
            parallel_dims=parallel_dims, pp_schedule=kwargs.get("pp_schedule", "")
        )
        super().__init__(config, parallel_dims=parallel_dims, **kwargs)
        self.losses: tuple[float, float] | None = None
        """Loss and gradient norm of the last logged step."""
        self.validation: tuple[float, int] | None = None
        """Loss and step of the last validation; under pipeline parallelism the loss only on ranks of the last stage."""
        self._best = math.inf, 0
        self._began = time.perf_counter() - config.seconds_before
        self._last_step = config.first_step - 1
        self._bar: tqdm[Any] | None = None
        self._paused: tuple[float, int] | None = None

    def _build_metric_logger(self, *, config: Config, dump_folder: str, **_: Any) -> BaseLogger:
        boards = Boards()
        if not self.is_reporter:
            return boards
        boards.add_logger(JsonLines(Path(dump_folder, METRICS)))
        try:
            if config.enable_tensorboard:
                folder = Path(dump_folder, config.save_tb_folder)
                boards.add_logger(TensorBoard(folder, config.first_step, config.recipe))
            if config.enable_wandb:
                boards.add_logger(WandB(Path(dump_folder), config.run, config.recipe))
        except OSError as error:
            raise unusable(dump_folder, error) from error
        return boards

    def should_log(self, step: int) -> bool:
        return step == self.config.total_steps or super().should_log(step)

    def pause(self) -> None:
        """Exclude everything until `resume` from the training's tokens and time."""
        self._paused = time.perf_counter(), self.ntokens_since_last_log

    def resume(self) -> None:
        if self._paused is not None:
            began, self.ntokens_since_last_log = self._paused
            # The next report divides by the time since `time_last_log`.
            self.time_last_log += time.perf_counter() - began
            self._paused = None

    def start(self, step: int) -> None:
        """Measure from the end of `step` on."""
        self._last_step = step
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.device_memory_monitor.reset_peak_stats()
        self.time_last_log = time.perf_counter()

    def advance(self, step: int) -> None:
        """Move the progress bar of a terminal."""
        if self._bar is None:
            hidden = True if is_quiet() or not self.is_reporter else None
            self._bar = tqdm(total=self.config.total_steps, initial=step - 1, unit="step", leave=False, disable=hidden)
        if self.losses is not None:
            self._bar.set_postfix_str(f"loss {self.losses[0]:.4f}", refresh=False)
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
        """Report a step; called on every rank. TorchTitan's `extra_metrics` are of this process or by class only."""
        self.losses = global_avg_loss, grad_norm
        measured = self._trainer().measure()
        steps = step - self._last_step
        seconds = time.perf_counter() - self.time_last_log
        # The step ends with an all-reduce, so one rank's clock represents all ranks.
        dims = self.parallel_dims
        speed = self.ntokens_since_last_log * dims.dp_replicate * dims.dp_shard / seconds
        mfu = self.num_flops_per_token * speed / (self.gpu_peak_flops * dims.world_size)
        phases = {phase: total / steps for phase, total in measured.pop("phases").items()}
        record = {
            "loss": global_avg_loss,
            "grad_norm": grad_norm,
            "tokens": self._trainer().tokens,
            **measured,
            "tokens_per_second": speed,
            **({"mfu": mfu} if mfu > 0 and not self.has_quantization else {}),
            "time": {"step": seconds / steps, **phases},
            "seconds": time.perf_counter() - self._began,
        }
        self._report(step, record, self._step_line(step, record))
        self.start(step)

    def _report(self, step: int, record: dict[str, Any], line: str) -> None:
        self.logger.log(record, step)
        if self.is_reporter and not is_quiet():
            show(line)

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

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Report the held-out loss in nats per token; called on every rank."""
        self.validation = loss, step
        self._best = min(self._best, self.validation)
        record: dict[str, Any] = {"val_loss": loss, "tokens": self._trainer().tokens}
        line = f"{self.color.yellow}validation  step {step}{self.color.reset}  loss {loss:.4f}"
        if (bytes_per_token := self._trainer().bytes_per_token) is not None:
            record["bits_per_byte"] = loss / math.log(2) / bytes_per_token
            line += f"  {record['bits_per_byte']:.4f} bits per byte"
        record["seconds"] = time.perf_counter() - self._began
        self._report(step, {**record, **(extra_metrics or {})}, line)

    def show_end(self, step: int, folder: str) -> None:
        if not self.is_reporter or self.losses is None:
            return
        took = timedelta(seconds=round(time.perf_counter() - self._began))
        held_out = "" if self.validation is None else f", held out {self.validation[0]:.4f}"
        if self.validation is not None and self._best[0] < self.validation[0]:
            held_out += f" (best {self._best[0]:.4f} at step {self._best[1]})"
        show(f"ended after step {step}: loss {self.losses[0]:.4f}{held_out}, {took}; {folder}")
