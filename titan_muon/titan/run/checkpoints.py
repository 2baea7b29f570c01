"""Save, load and validate the checkpoints of a run (PyTorch's distributed checkpoints).

A checkpoint is whole if `.metadata` (PyTorch writes this file last) and all files named in it exist at full length.
"""

import json
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader

from titan_muon.titan import compat
from titan_muon.titan.assign.container import HybridOptimizers
from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.run.console import say

METADATA = ".metadata"
STEP_FOLDER = re.compile(r"step-(\d+)")
TRAINER_STEP = "train_state.step"
SCHEDULE = "schedule"
DATA_RANK = re.compile(r"dataloader\.dp_rank_\d+")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Path of the checkpoint of `step` in the checkpoint folder of a run."""
    return folder / f"step-{step}"


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's checkpoint folder, newest first, whole or not."""
    if not folder.is_dir():
        return []
    names = (STEP_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def flaw(checkpoint: Path) -> str | None:
    """Reason why a run cannot continue from a checkpoint; None if the checkpoint is whole.

    Reads the metadata and the sizes of files, not the contents.
    """
    if not (checkpoint / METADATA).is_file():
        return f"{METADATA} is missing: the save was cut off, or the model was exported"
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
        entries = list(metadata.storage_data.values())
        keys = metadata.state_dict_metadata.keys()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, ValueError) as error:
        return f"{METADATA} cannot be read ({type(error).__name__}: {error})"
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
        return "only the model was saved (checkpoint.last_save_model_only)"
    return None


class Schedule:
    """`[lr_scheduler]` of the recipe in the checkpoint, so that a continued run can report changed keys."""

    def __init__(self, recipe: Mapping[str, Any]) -> None:
        self._recipe = recipe
        self.changes: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        # A single entry, because a checkpoint must load under a version with an additional key.
        return {"recipe": json.dumps(dict(self._recipe))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = json.loads(state_dict["recipe"])
        self.changes = tuple(
            f"lr_scheduler.{key}: {saved[key]} -> {value}"
            for key, value in self._recipe.items()
            if key in saved and saved[key] != value
        )


class KnownOptions:
    """A container's state without the options that a checkpoint lacks, because an older version had no such option.

    A checkpoint has each option of each parameter. The recipe decides about options, so the load needs none of them.
    """

    def __init__(self, optimizers: HybridOptimizers, saved: Collection[str]) -> None:
        self._optimizers, self._saved = optimizers, saved

    def state_dict(self) -> dict[str, Any]:
        """The entries to load."""
        return {
            key: value
            for key, value in self._optimizers.state_dict().items()
            if not key.startswith("param_groups.") or f"optimizer.{key}" in self._saved
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load entries; the container adds the other options."""
        self._optimizers.load_state_dict(state_dict)


class RunCheckpoints(CheckpointManager):
    """TorchTitan's checkpoint manager; loads the checkpoint chosen by `runs.open_run`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        resume: str | None = None
        """Whole checkpoint to continue from; None for a new run."""

        schedule: Mapping[str, Any] = field(default_factory=dict)
        """Keys and values of `[lr_scheduler]`."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self.resume = config.resume
        self._loaded = False
        self._dtypes: tuple[str, ...] = ()
        self.forced = False
        """Save the current step at any interval, because the run ends."""
        self.paused: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context that excludes saving from the training time; set by the trainer."""
        self.check: Callable[[int], None] = lambda step: None
        """Raises FloatingPointError if the weights are not finite; set by the trainer."""
        super().__init__(config, **kwargs)
        self.schedule = Schedule(config.schedule)
        if config.enable:
            self.states[SCHEDULE] = self.schedule
        if config.enable and config.async_mode != "disabled":
            # The description marks the group, so that compat.time_out_all_groups leaves the time-out unchanged.
            self.pg._set_group_desc(compat.ASYNC_CHECKPOINT)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return (self.forced and not self.load_only) or super()._should_save(curr_step, last_step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        with self.paused():
            if self._should_save(curr_step, last_step):
                self.check(curr_step)
            return bool(super()._save(curr_step, last_step))

    def _load(self, step: int = -1) -> bool:
        # The run loads before training, to refuse a bad checkpoint early. TorchTitan's training loop loads again.
        if self._loaded:
            return False
        self._loaded = True
        if self.resume is None and self.initial_load_path is None and not self.initial_load_in_hf:
            return False
        source = self.resume if self.resume is not None else self.initial_load_path
        try:
            if self.resume is None:
                super()._load(step)
            else:
                self._continue_from(self.resume)
        except CheckpointException as error:
            raise RecipeError(_explain(source, error)) from error
        # TorchTitan's schedules leave the loaded rates in the optimizers' groups. The first step of an extended run
        # would otherwise use the rate after the old end, 0.
        for scheduler in self.states["lr_scheduler"]:
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        for change in (*self.states["optimizer"].changes, *self._dtypes, *self.schedule.changes):
            say(f"changed since the checkpoint: {change}")
        return True

    def _states_to_load(self, model_only: bool) -> dict[str, Any]:
        # Checkpoints of earlier versions have no SCHEDULE: `_continue_from` adds the key if the checkpoint has it.
        states: dict[str, Any] = super()._states_to_load(model_only)
        return {name: state for name, state in states.items() if name != SCHEDULE}

    def _continue_from(self, checkpoint: str) -> None:
        states = self._states_to_load(model_only=False)
        saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        if "optimizer" in states:
            check_optimizers(states["optimizer"], saved)
            self._dtypes = tuple(dict.fromkeys(changed_dtypes(states["optimizer"], saved)))
            states["optimizer"] = KnownOptions(states["optimizer"], saved)
        if "dataloader" in states:
            check_data_ranks(states["dataloader"], saved)
        if f"{SCHEDULE}.recipe" in saved:
            states[SCHEDULE] = self.schedule
        self.dcp_load(states, checkpoint, from_hf=False, from_quantized=False)


def check_optimizers(optimizers: HybridOptimizers, saved: Collection[str]) -> None:
    """Raise RecipeError for the first parameter with another optimizer than in the checkpoint with keys `saved`."""
    takers = {assignment.fqn: assignment.optimizer for assignment in optimizers.assignments}
    for key in optimizers.state_dict():
        fqn, _, state = key.removeprefix("state.").rpartition(".")
        # Loading itself reports a missing parameter.
        if key.startswith("state.") and fqn in saved and f"optimizer.{key}" not in saved:
            raise RecipeError(
                f"optimizer.rule: {takers[fqn]} trains {fqn}, and another optimizer trained {fqn} in the checkpoint, "
                f"which has no {state}. Restore the rules of the saved recipe, or set "
                'checkpoint.exclude_from_loading = ["optimizer"] to begin with new optimizer states.'
            )


def changed_dtypes(optimizers: HybridOptimizers, saved: Mapping[str, STORAGE_TYPES]) -> Iterator[str]:
    """Optimizer states with another dtype in the checkpoint, as `muon momentum_buffer: old -> new`."""
    takers = {assignment.fqn: assignment.optimizer for assignment in optimizers.assignments}
    for key, value in optimizers.state_dict().items():
        stored = saved.get(f"optimizer.{key}")
        if isinstance(stored, TensorStorageMetadata) and stored.properties.dtype != value.dtype:
            fqn, _, state = key.removeprefix("state.").rpartition(".")
            yield f"{takers[fqn]} {state}: {stored.properties.dtype} -> {value.dtype}"


def check_data_ranks(loader: BaseDataLoader, saved: Collection[str]) -> None:
    """Raise RecipeError if another number of data-parallel ranks saved the state of TorchTitan's loader."""
    ranks = sum(DATA_RANK.fullmatch(key) is not None for key in saved)
    # A rank's position in the documents is meaningless after another division of the documents.
    if isinstance(loader, ParallelAwareDataloader) and ranks != loader.dp_world_size:
        raise RecipeError(
            f"data.source = 'hf': the checkpoint was reading on {ranks} data-parallel ranks, and this run has "
            f"{loader.dp_world_size}. Restore their number (world size / (tensor x context x pipeline degree)), or set "
            'checkpoint.exclude_from_loading = ["dataloader"] to start this data from its beginning.'
        )


def _explain(checkpoint: str | None, error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    first_line = str(cause).strip().partition("\n")[0]
    return (
        f"{checkpoint}: the checkpoint cannot be loaded (rank {rank}: {type(cause).__name__}: {first_line}). If the "
        "recipe's model or optimizers differ from those that saved it, restore them. Otherwise a file is damaged: "
        "choose an earlier checkpoint with checkpoint.load_step, or move this folder away."
    )
