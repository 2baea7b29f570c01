"""Console output of a run: rank 0's lines, and warnings of all libraries."""

import hashlib
import logging
import sys
import warnings

import torch.distributed as dist
from tqdm import tqdm

from titan_muon.engine.tensors.process_groups import default_store
from titan_muon.trainer.recipe.toml import without_password

NOISY_WARNINGS = (
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",
    "Error running lspci",
    "model.safetensors.index.json not found",
    "Pipeline Parallel loss is not visible",
)
"""Beginnings of warnings without a remedy."""

# At level INFO, and WARNING under --quiet.
_OURS = logging.getLogger("titan_muon")


def is_quiet() -> bool:
    """Whether the console shows errors, warnings and the summary only."""
    return _OURS.level >= logging.WARNING


def show(text: str) -> None:
    """Print a line at once, above a progress bar, without passwords in URLs."""
    tqdm.write(without_password(text))
    sys.stdout.flush()


def print_on_rank0(text: str) -> None:
    """Print a line at once, on rank 0 only; under --quiet warnings only."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0 and (text.startswith("warning: ") or not is_quiet()):
        show(text)


def print_error_once(error: Exception) -> None:
    """Print an error of every rank once."""
    if _is_first("errors"):
        print(f"error: {error}", file=sys.stderr, flush=True)


def _is_first(event: str) -> bool:
    try:
        return default_store().add(f"titan_muon/{event}", 1) == 1
    except RuntimeError:
        # The process with the store has ended after its own events.
        return False


class _Useful(logging.Filter):
    """Drops NOISY_WARNINGS. Ranks other than 0 show errors, and warnings new to the job."""

    def filter(self, record: logging.LogRecord) -> bool:
        rank = dist.get_rank() if dist.is_initialized() else 0
        text = record.getMessage()
        if text.startswith(NOISY_WARNINGS):
            return False
        if record.levelno != logging.WARNING or not dist.is_initialized():
            return rank == 0 or record.levelno > logging.WARNING
        # A slow link or faulty GPU warns on its own rank.
        if not _is_first(f"warnings/{hashlib.sha256(text.encode()).hexdigest()}"):
            return rank == 0
        if rank != 0:
            record.msg, record.args = f"rank {rank}: {text}", None
        return True


class _Console(logging.Handler):
    """Prints records like the lines of a run."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        show(f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text)


def set_up_logging(*, quiet: bool = False) -> None:
    """Send our log and warnings of all libraries to the console."""
    _OURS.setLevel(logging.WARNING if quiet else logging.INFO)
    # CPU models draw initial values without DTensor's generator (models/common.py).
    warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed).* on cpu", category=UserWarning)
    # TorchTitan's schedules query the rate like this on loading, and get the right rate.
    warnings.filterwarnings("ignore", message="To get the last learning rate", category=UserWarning)
    handler = _Console()
    handler.addFilter(_Useful())
    # The root is TorchTitan's logger, whose other lines repeat ours.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s", force=True)
