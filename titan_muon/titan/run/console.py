"""What a run says on the console: rank 0's own words, and of TorchTitan's log what helps a user."""

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
"""Beginnings of TorchTitan's messages that repeat what a run says itself, or that no user acts on; never warnings."""

NOISY_WARNINGS = (
    # torchrun sets it, TorchTitan sets it to another value: no user did.
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",
    "Error running lspci",
    # Without it a model is written as one file, which is what a recipe asks for.
    "model.safetensors.index.json not found",
    # The rank that has the loss reports it here.
    "Pipeline Parallel loss is not visible",
)
"""Beginnings of warnings that no user can act on, each by its own words: any other may be the reason for a bad run."""


def say(text: str) -> None:
    """Print a line at once, on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def say_error(error: Exception) -> None:
    """Print an error of the user on stderr once: by the first rank that has it, which need not be rank 0.

    TorchTitan's trainer leaves its traceback for torchrun to print; that is withdrawn.
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).unlink(missing_ok=True)
    try:
        first = dist.distributed_c10d._get_default_store().add("titan_muon/errors", 1) == 1
    except RuntimeError:
        # The process that keeps the store has already ended, and so has said its error.
        return
    if first:
        print(f"error: {error}", file=sys.stderr, flush=True)


class _Useful(logging.Filter):
    """Lets messages through that are not noise; from ranks other than 0, errors only."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank != 0 and record.levelno < logging.ERROR:
            return False
        noise = NOISY_WARNINGS if record.levelno >= logging.WARNING else NOISE
        return not record.getMessage().startswith(noise)


class _Formatter(logging.Formatter):
    """The bare message, with its level before it from WARNING on."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


def set_up_logging() -> None:
    """Send the log to the console. TorchTitan logs to Python's root logger."""
    # MoE routers ask for float32 autocast; the CPU has none and needs none.
    warnings.filterwarnings("ignore", message="In CPU autocast", category=UserWarning)
    # On the CPU models draw their starting values without DTensor's generator (models/common.py).
    warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed).* on cpu", category=UserWarning)
    # TorchTitan's schedules ask for the rate this way when a checkpoint is loaded, and get the right one.
    warnings.filterwarnings("ignore", message="To get the last learning rate", category=UserWarning)
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(_Useful())
    handler.setFormatter(_Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
