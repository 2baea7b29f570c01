"""Save, load and validate the checkpoints of a run.

A checkpoint is whole if it has `.metadata`, written last, and every file of `.metadata` at full length. `damage` in
`run_folder.py` verifies the content.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from titan_muon.trainer.assign.container import HybridOptimizers
from titan_muon.trainer.data.loader import PackedDataLoader
from titan_muon.trainer.fault import RunFault
from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.run.console import print_on_rank0
from titan_muon.trainer.run_folder import METADATA, STEP_FOLDER, check_names, saved_steps
from titan_muon.trainer.storage.checksums import SummingWriter
from titan_muon.trainer.storage.reader import SafePlanner, SafeReader
from titan_muon.trainer.torchtitan import compat

ASIDE_FOLDER = re.compile(r"aside-(\d+)(-\d+)?")
TRAINER_STEP, DATA_START = "train_state.step", "train_state.data_start"
NOT_PLAIN = re.compile(r"^(Trying to load|Unsupported).*$", re.MULTILINE)
"""The reason in the error of PyTorch's weights-only load."""
DATA_RANK = re.compile(r"dataloader\.dp_rank_\d+")


def flaw(checkpoint: Path) -> str | None:
    """Reason why a run cannot continue from a checkpoint; None for a whole checkpoint. Reads no tensors."""
    if not (checkpoint / METADATA).is_file():
        return f"{METADATA} is missing: the save was cut off, or the model was exported"
    lengths: dict[str, int] = {}
    try:
        metadata = SafeReader(checkpoint).read_metadata()
        for entry in metadata.storage_data.values():
            lengths[entry.relative_path] = max(lengths.get(entry.relative_path, 0), entry.offset + entry.length)
        check_names(METADATA, lengths)
        for name, length in lengths.items():
            file = checkpoint / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size < length:
                return f"{name} has {file.stat().st_size} of {length} bytes"
        if TRAINER_STEP not in metadata.state_dict_metadata:
            return "only the model was saved (checkpoint.last_save_model_only)"
    # Damaged bytes raise any error, such as MemoryError for a length.
    except Exception as error:
        return f"{METADATA} cannot be read ({type(error).__name__}: {error})"
    return None


class RunCheckpoints(CheckpointManager):
    """TorchTitan's checkpoint manager, with checksums. Loads the checkpoint of `runs.open_run`.

    The state `train_state` is the run's trainer, which checks the model before each save. `last_saved`: the newest step
    that this process saved.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        resume: str | None = None
        run: str | None = None  # id of the run, saved in checksums.json
        excluded: tuple[str, ...] = ()
        """States not to load. TorchTitan's own field takes the optimizer with its schedule only."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        self.resume, self.run = config.resume, config.run
        self.last_saved: int | None = None
        self._loaded = False
        super().__init__(config, **kwargs)
        self.exclude_from_loading = list(config.excluded)
        if config.enable and config.async_mode != "disabled":
            # compat.time_out_all_groups leaves this group alone.
            self.pg._set_group_desc(compat.ASYNC_CHECKPOINT)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        # A stop ends the run after this step.
        stopping = self.states["train_state"].stop.stopping and not self.load_only
        return stopping or super()._should_save(curr_step, last_step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        self.states["train_state"].check_before_save()
        self.maybe_wait_for_saving()
        if self.last_saved is not None and not Path(self.folder).is_dir():
            print_on_rank0(f"warning: {self.folder} was removed; checkpoints up to step {self.last_saved} are gone")
        try:
            saved = bool(super()._save(curr_step, last_step))
        except CheckpointException as error:
            raise self._not_saved(curr_step, error) from error
        self.last_saved = curr_step
        return saved

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
        except CheckpointException as error:
            assert self.last_saved is not None, "a save that is waited for has begun"
            raise self._not_saved(self.last_saved, error) from error

    def _not_saved(self, step: int, error: CheckpointException) -> RunFault:
        folder = Path(self.folder)
        newest = next((other for other in saved_steps(folder) if flaw(folder / f"step-{other}") is None), None)
        left = "no whole checkpoint is left" if newest is None else f"the newest whole checkpoint is step {newest}"
        return RunFault(
            f"step {step} is not saved in {folder} ({_first_failure(error)}); {left}. Free space or lower "
            "checkpoint.keep_latest_k if the disk is full, then continue the run with checkpoint.load."
        )

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """TorchTitan's save with checksums, except for Hugging Face."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        name = STEP_FOLDER.fullmatch(Path(checkpoint_id).name)
        assert name is not None, f"{checkpoint_id} is not a step's folder"
        writer = SummingWriter(checkpoint_id, int(name[1]), self.run)
        result: Any = None
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
        else:
            options: dict[str, Any] = {"storage_writer": writer, "process_group": self.pg}
            if async_mode != AsyncMode.ASYNC:
                options |= {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
            result = dcp.async_save(state_dict, **options)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def _purge_stale_checkpoints(self) -> None:
        if not self._should_purge():
            return
        folder = Path(self.folder)
        steps = saved_steps(folder)
        kept = set(steps[: self.keep_latest_k])
        stale = [folder / f"step-{step}" for step in steps if step not in kept]
        asides = ((path, ASIDE_FOLDER.fullmatch(path.name)) for path in folder.iterdir())
        stale += [path for path, name in asides if name is not None and int(name[1]) < min(kept)]
        for path in stale:
            self.purge_queue.put(str(path))

    def _load(self, step: int = -1) -> bool:
        # The job loads before training; TorchTitan's loop loads again.
        if self._loaded:
            return False
        self._loaded = True
        source = self.resume if self.resume is not None else self.initial_load_path
        if source is None and not self.initial_load_in_hf:
            return False
        try:
            if self.resume is None:
                super()._load(step)
            else:
                self._continue_from(self.resume)
        except CheckpointException as error:
            raise RecipeError(
                f"{source}: the checkpoint cannot be loaded ({_first_failure(error)}). If the recipe's model or "
                "optimizers differ from those that saved it, restore them. Otherwise a file is damaged: choose an "
                "earlier checkpoint with checkpoint.load_step, or move this folder away."
            ) from error
        # Otherwise an extended run takes a step at the loaded rate, 0 at the old end.
        for scheduler in self.states["lr_scheduler"]:
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        return True

    def _continue_from(self, checkpoint: str) -> None:
        """Load a run's checkpoint, and print each difference from the recipe, which decides."""
        states = self._states_to_load(model_only=False)
        saved = SafeReader(checkpoint).read_metadata().state_dict_metadata
        optimizers: HybridOptimizers = self.states["optimizer"]
        lines = dict.fromkeys(differences(optimizers, saved) if "optimizer" in states else ())
        if "dataloader" in states:
            check_data_ranks(states["dataloader"], saved)
        self.dcp_load(states, checkpoint, from_hf=False, from_quantized=False)
        if "train_state" in states:
            self._check_train_state(Path(checkpoint))
        for change in optimizers.changes:
            print_on_rank0(f"changed since the checkpoint: {change}")
        for line in lines:
            print_on_rank0(line)

    def _check_train_state(self, checkpoint: Path) -> None:
        """Raise RecipeError for values that no save writes: a wrong type, or another step than the folder's."""
        loaded = self.states["train_state"].state_dict()
        numbers = all(type(value) is int for value in loaded.values())
        if not numbers or checkpoint.name != f"step-{loaded['step']}" or loaded["ntokens_seen"] < 0:
            raise RecipeError(f"{checkpoint}: train_state = {loaded} is not the state of this step; choose another one")

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """TorchTitan's load, without running code of the checkpoint."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        # Hyperparameters of a newer version keep the recipe's values.
        planner = SafePlanner(optional=lambda key: key.startswith("optimizer.param_groups.") or key == DATA_START)
        dcp.load(state_dict, storage_reader=SafeReader(checkpoint_id), planner=planner)
        self.states[MODEL].load_state_dict(state_dict)


def differences(optimizers: HybridOptimizers, saved: Mapping[str, STORAGE_TYPES]) -> Iterator[str]:
    """Lines about states with another dtype in the checkpoint, and about hyperparameters without a value.

    `saved`: entries of the checkpoint. Raises RecipeError for a parameter with another optimizer.
    """
    takers = {assignment.fqn: assignment.optimizer for assignment in optimizers.assignments}
    for key, value in optimizers.state_dict().items():
        table, _, name = key.partition(".")
        fqn, _, entry = name.rpartition(".")
        stored = saved.get(f"optimizer.{key}")
        if isinstance(stored, TensorStorageMetadata) and stored.properties.dtype != value.dtype:
            yield f"changed since the checkpoint: {takers[fqn]} {entry}: {stored.properties.dtype} -> {value.dtype}"
        elif stored is None and table == "param_groups":
            yield f"not in the checkpoint, so that the recipe's value counts: {takers[fqn]}.{entry} = {value}"
        elif stored is None and fqn in saved:
            raise RecipeError(
                f": {takers[fqn]} trains {fqn}, and another optimizer trained {fqn} in the checkpoint, "
                f"which has no {entry}. Restore the rules of the saved recipe, or set "
                'checkpoint.exclude_from_loading = ["optimizer"] to begin with new optimizer states.',
                key="optimizer.rule",
            )


def check_data_ranks(loader: Any, saved: Collection[str]) -> None:
    """Raise RecipeError if another number of data-parallel ranks saved the state of TorchTitan's loader."""
    ranks = sum(DATA_RANK.fullmatch(key) is not None for key in saved)
    if not isinstance(loader, PackedDataLoader) and ranks != loader.dp_world_size:
        raise RecipeError(
            f"= 'hf': the checkpoint was reading on {ranks} data-parallel ranks, and this run has "
            f"{loader.dp_world_size}. Restore their number (world size / (tensor x context x pipeline degree)), or set "
            'checkpoint.exclude_from_loading = ["dataloader"] to start this data from its beginning.',
            key="data.source",
        )


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    text = str(cause).strip()
    if isinstance(cause, UnpicklingError) and (detail := NOT_PLAIN.search(text)):
        # PyTorch's text begins with the advice to load without this protection.
        text = f"a saved value is not plain data: {detail[0]}"
    return f"rank {rank}: {type(cause).__name__}: {text.partition(chr(10))[0]}"
