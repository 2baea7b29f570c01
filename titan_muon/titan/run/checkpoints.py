"""Which checkpoints are whole, and how one is saved and loaded (PyTorch's distributed checkpoints).

A checkpoint is whole when its `.metadata` is there, which PyTorch writes last, and every file that it names is there
at its full length.
"""

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager

from titan_muon.titan import compat
from titan_muon.titan.recipe import RecipeError

METADATA = ".metadata"
STEP_FOLDER = re.compile(r"step-(\d+)")
TRAINER_STEP = "train_state.step"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, in the checkpoint folder of a run."""
    return folder / f"step-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's checkpoint folder, newest first, whole or not."""
    if not folder.is_dir():
        return []
    names = (STEP_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def flaw(checkpoint: Path) -> str | None:
    """Why a run cannot be continued from a checkpoint, naming the file; None if it can, as far as sizes tell.

    Reads the metadata and the sizes of files, not their content.
    """
    if not (checkpoint / METADATA).is_file():
        return f"it has no {METADATA}: saving it was cut off, or the model was exported"
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
        entries = list(metadata.storage_data.values())
        keys = metadata.state_dict_metadata.keys()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, ValueError) as error:
        return f"its {METADATA} cannot be read ({type(error).__name__}: {error})"
    lengths: dict[str, int] = {}
    for entry in entries:
        lengths[entry.relative_path] = max(lengths.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, length in lengths.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size < length:
            return f"{name} has {file.stat().st_size} of {length} bytes"
    if TRAINER_STEP not in keys:
        return "it holds only the model (checkpoint.last_save_model_only)"
    return None


class RunCheckpoints(CheckpointManager):
    """TorchTitan's checkpoints of one run, loaded from the checkpoint that was chosen for it."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        resume: str | None = None
        """Checkpoint to continue from, already found whole; None for a new run."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self.resume = config.resume
        self._forced = False
        super().__init__(config, **kwargs)
        if config.enable and config.async_mode != "disabled":
            # Known by this, it keeps its own time-out: compat.time_out_all_groups says why.
            self.pg._set_group_desc(compat.ASYNC_CHECKPOINT)

    def save_now(self, step: int) -> None:
        """Save everything needed to continue after `step`, whatever the interval, and wait until it is written."""
        self._forced = True
        self.save(step)
        self._forced = False
        self.maybe_wait_for_saving()

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._forced or super()._should_save(curr_step, last_step)

    def _load(self, step: int = -1) -> bool:
        if self.resume is None and self.initial_load_path is None and not self.initial_load_in_hf:
            return False
        source = self.resume if self.resume is not None else self.initial_load_path
        try:
            if self.resume is None:
                return super()._load(step)
            self.dcp_load(self._states_to_load(model_only=False), self.resume, from_hf=False, from_quantized=False)
        except CheckpointException as error:
            raise RecipeError(_explain(source, error)) from error
        return True


def _explain(checkpoint: str | None, error: CheckpointException) -> str:
    """One message for what went wrong on any rank while loading."""
    rank, (cause, _) = min(error.failures.items())
    first_line = str(cause).strip().partition("\n")[0]
    return (
        f"{checkpoint}: the checkpoint cannot be loaded (rank {rank}: {type(cause).__name__}: {first_line}). If the "
        "recipe's model or optimizers differ from those that saved it, restore them. Otherwise a file is damaged: "
        "choose an earlier checkpoint with checkpoint.load_step, or move this folder away."
    )
