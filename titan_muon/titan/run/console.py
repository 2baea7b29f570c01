"""What a run says on the console: rank 0's own words, and of TorchTitan's log what helps a user."""

import hashlib
import logging
import sys
import warnings

import torch.distributed as dist

from titan_muon.titan.launch.endings import record_end

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


def say_error(error: Exception, code: int) -> None:
    """Print an error of the user on stderr, by the first rank with the error. torchrun's summary gets the error too.

    Args:
        error: what the user has to know.
        code: exit code of this process.
    """
    first = _is_first("errors")
    # In place of the traceback that TorchTitan's trainer leaves for torchrun to print.
    record_end(str(error), code, first=first)
    if first:
        print(f"error: {error}", file=sys.stderr, flush=True)


def _is_first(event: str) -> bool:
    """Whether this rank is the first to report an event."""
    try:
        return dist.distributed_c10d._get_default_store().add(f"titan_muon/{event}", 1) == 1
    except RuntimeError:
        # The process that keeps the store has already ended, after it reported its own events.
        return False


class _Useful(logging.Filter):
    """Lets messages through that are not noise; from ranks other than 0, a warning that no rank has said before."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = dist.get_rank() if dist.is_initialized() else 0
        text = record.getMessage()
        if text.startswith(NOISY_WARNINGS if record.levelno >= logging.WARNING else NOISE):
            return False
        if record.levelno != logging.WARNING or not dist.is_initialized():
            return rank == 0 or record.levelno > logging.WARNING
        # A slow link or a faulty GPU warns on its own rank alone; most other warnings are the same on all ranks.
        if not _is_first(f"warnings/{hashlib.sha256(text.encode()).hexdigest()}"):
            return rank == 0
        if rank != 0:
            record.msg, record.args = f"rank {rank}: {text}", None
        return True


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
