"""Console output of a run: rank 0's lines, and the useful part of TorchTitan's log."""

import logging
import os
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

NOISE = (
    "[GC]",
    "Peak FLOPS",
    "CPU capacity",
    "CPU memory usage",
    "Building ",
    "Optimizer ",
    "TensorBoard logging enabled",
    "Trainer is initialized",
    "Checkpointing active",
    "Destroying the purge thread",
    "Loading the checkpoint",
    "Finished loading",
    "Finished saving",
    "Last step checkpoint completed",
    "Saving a full checkpoint at last step",
    "Synchronizing and adjusting timeout",
)
"""Beginnings of messages of TorchTitan (no warnings) that repeat a run's own lines or need no action."""

NOISY_WARNINGS = (
    # torchrun sets this variable and TorchTitan changes the value.
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",
    "Error running lspci",
    # Without an index the model is written as a single file, as recipes intend.
    "model.safetensors.index.json not found",
    # RunMetrics reports on the rank with the loss.
    "Pipeline Parallel loss is not visible",
)
"""Beginnings of warnings without a remedy. Listed in full, because any other warning may explain a bad run."""


def say(text: str) -> None:
    """Print a line at once, on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def say_error(error: Exception) -> None:
    """Print a user's error on stderr once: on the first rank that fails, not always rank 0.

    Removes the traceback that TorchTitan's trainer left for torchrun to print.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).unlink(missing_ok=True)
    try:
        first = dist.distributed_c10d._get_default_store().add("titan_muon/errors", 1) == 1
    except RuntimeError:
        # The process with the store has already ended, after printing the error.
        return
    if first:
        print(f"error: {error}", file=sys.stderr, flush=True)


class _Useful(logging.Filter):
    """Drops noise, and on ranks other than 0 everything but errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank != 0 and record.levelno < logging.ERROR:
            return False
        noise = NOISY_WARNINGS if record.levelno >= logging.WARNING else NOISE
        return not record.getMessage().startswith(noise)


class _Formatter(logging.Formatter):
    """The bare message, prefixed with the level from WARNING on."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


def set_up_logging() -> None:
    """Send the log to the console. TorchTitan logs to Python's root logger."""
    # MoE routers request float32 autocast. The CPU has none and needs none.
    warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)
    # On the CPU, models draw initial values without DTensor's generator (models/common.py).
    warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed).* on cpu", category=UserWarning)
    # TorchTitan's schedules query the rate in this way on loading, and get the right rate.
    warnings.filterwarnings("ignore", message="To get the last learning rate", category=UserWarning)
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(_Useful())
    handler.setFormatter(_Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
