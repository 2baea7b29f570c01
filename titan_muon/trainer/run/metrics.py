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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import BaseLogger, MetricsProcessor, WandBLogger, _get_metrics_rank
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
WANDB_ID_FILE = "wandb_id"


class Boards(BaseLogger):
    """Places for metrics that together end no run: a board that cannot write is named and left out."""

    def __init__(self, boards: Iterable[BaseLogger]) -> None:
        self._boards = list(boards)

    def _each(self, action: Callable[[BaseLogger], None]) -> None:
        for board in [*self._boards]:
            try:
                action(board)
            except OSError as error:
                self._boards.remove(board)
                show(f"warning: {type(board).__name__} gets no more metrics, and {METRICS} does: {error}")

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._each(lambda board: board.log(metrics, step))

    def close(self) -> None:
        self._each(lambda board: board.close())


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


class TensorBoard(BaseLogger):
    """Writes metrics as scalars, and the recipe as text."""

    def __init__(self, folder: Path, first_step: int, recipe: str) -> None:
        # A continued run repeats the steps after the checkpoint.
        self.writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)
        self.writer.add_text("recipe", textwrap.indent(recipe, "    "), first_step - 1)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for tag, value in tagged(metrics):
            self.writer.add_scalar(tag, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB(WandBLogger):
    """Sends metrics to Weights & Biases under TensorBoard's tags. A continued `folder` stays a single run.

    `recipe`: as TOML. Raises RecipeError without wandb, or for a refusal by wandb.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        id_file = folder / WANDB_ID_FILE
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        # TorchTitan's logger and wandb read these variables. The user's values win.
        os.environ.setdefault("WANDB_RUN_ID", id_file.read_text(encoding="utf-8").strip())
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_RUN_NAME", f"{folder.parent.name}/{folder.name}")
        config = tomllib.loads(recipe)
        os.environ.setdefault("WANDB_PROJECT", config["metrics"]["wandb_project"])
        if config["metrics"]["wandb_offline"]:
            os.environ.setdefault("WANDB_MODE", "offline")
        try:
            import wandb
        except ImportError as error:
            raise RecipeError(
                "= true: run pip install wandb, or set it to false", key="metrics.enable_wandb"
            ) from error
        try:
            super().__init__(str(folder), config_dict=config)
        except wandb.Error as error:
            problem = str(error).splitlines()[0]
            remedy = "Or set metrics.wandb_offline = true, or metrics.enable_wandb = false"
            raise RecipeError(f"= true: {problem} {remedy}", key="metrics.enable_wandb") from error

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
    """Reports on the rank with the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        total_steps: int
        first_step: int = 1
        seconds_before: float = 0.0
        recipe: str = ""

    config: Config
    ntokens_since_last_log: int
    time_last_log: float

    def __init__(self, config: Config, *, parallel_dims: ParallelDims, **kwargs: Any) -> None:
        # super() calls `_build_metric_logger`. Under pipeline parallelism only the last stage has a loss.
        self.is_reporter = dist.get_rank() == _get_metrics_rank(
            parallel_dims=parallel_dims, pp_schedule=kwargs.get("pp_schedule", "")
        )
        super().__init__(config, parallel_dims=parallel_dims, **kwargs)
        self.batch_ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
        self.last_loss: float | None = None
        self.validation_loss: float | None = None
        """Loss of the last validation; under pipeline parallelism only on ranks of the last stage."""
        self._best = math.inf, 0
        self.begin_step()
        self._began = time.perf_counter() - config.seconds_before
        self._last_step = config.first_step - 1
        self._bar: tqdm[Any] | None = None
        self._paused: tuple[float, int] | None = None

    def _build_metric_logger(self, *, config: Config, dump_folder: str, **_: Any) -> BaseLogger:
        if not (self.is_reporter or config.save_for_all_ranks):
            return Boards([])
        rank = "" if self.is_reporter else f"rank-{dist.get_rank()}"
        boards: list[BaseLogger] = [JsonLines(Path(dump_folder, rank, METRICS))]
        try:
            if config.enable_tensorboard:
                folder = Path(dump_folder, config.save_tb_folder, rank)
                boards.append(TensorBoard(folder, config.first_step, config.recipe))
            if config.enable_wandb:
                boards.append(WandB(Path(dump_folder, rank), config.recipe))
        except OSError as error:
            raise unusable(dump_folder, error) from error
        return Boards(boards)

    def begin_step(self) -> None:
        self.logged: tuple[float, float] | None = None
        """Loss and gradient norm, if TorchTitan logs the step."""
        self.validated: tuple[float, Mapping[str, Any]] | None = None
        """Loss and other metrics of a validation after the step."""

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

    def peak_memory(self) -> float:
        """Peak of reserved GiB on this rank's device since the last report."""
        return float(self.device_memory_monitor.get_peak_stats().max_reserved_gib)

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
        """Keep loss and norm in `logged`."""
        # TorchTitan's other numbers are learning rates by class, and tokens of this process only.
        self.logged = global_avg_loss, grad_norm

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """Keep the held-out loss in nats per token in `validated`; called on every rank."""
        self.validated = loss, extra_metrics or {}

    def report_step(self, step: int, record: dict[str, Any], *, phases: Mapping[str, float], memory: float) -> None:
        """Report a step; `record` has `loss`, `grad_norm`, `tokens` of the run and `lr` by group.

        Since the last report: seconds of the `phases`, and the peak `memory` in GiB over all ranks.
        """
        steps = step - self._last_step
        seconds = time.perf_counter() - self.time_last_log
        # The step ends with an all-reduce, so one rank's clock represents all ranks.
        speed = self.ntokens_since_last_log * self.batch_ranks / seconds
        self.last_loss = record["loss"]
        mfu = self.num_flops_per_token * speed / (self.gpu_peak_flops * self.parallel_dims.world_size)
        record = {
            **record,
            "tokens_per_second": speed,
            **({"mfu": mfu} if mfu > 0 and not self.has_quantization else {}),
            "time": {"step": seconds / steps, **{phase: total / steps for phase, total in phases.items()}},
            "memory_gib": memory,
            "seconds": time.perf_counter() - self._began,
        }
        self.logger.log(record, step)
        if self.is_reporter and not is_quiet():
            show(self._step_line(step, record))
        self.start(step)

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

    def show_end(self, step: int, folder: str) -> None:
        if not self.is_reporter or self.last_loss is None:
            return
        took = timedelta(seconds=round(time.perf_counter() - self._began))
        held_out = "" if self.validation_loss is None else f", held out {self.validation_loss:.4f}"
        if self.validation_loss is not None and self._best[0] < self.validation_loss:
            held_out += f" (best {self._best[0]:.4f} at step {self._best[1]})"
        show(f"ended after step {step}: loss {self.last_loss:.4f}{held_out}, {took}; {folder}")

    def report_validation(
        self, step: int, loss: float, others: Mapping[str, Any], *, tokens: int, bytes_per_token: float | None
    ) -> None:
        """Report the held-out loss, on every rank. `bytes_per_token`: of the held-out text, if known."""
        self.validation_loss = loss
        self._best = min(self._best, (loss, step))
        record: dict[str, Any] = {"val_loss": loss, "tokens": tokens}
        line = f"{self.color.yellow}validation  step {step}{self.color.reset}  loss {loss:.4f}"
        if bytes_per_token is not None:
            record["bits_per_byte"] = loss / math.log(2) / bytes_per_token
            line += f"  {record['bits_per_byte']:.4f} bits per byte"
        record["seconds"] = time.perf_counter() - self._began
        self.logger.log({**record, **others}, step)
        if self.is_reporter and not is_quiet():
            show(line)
