"""Train a recipe in this process: process group, run folder, trainer, exit code."""

import faulthandler
import gc
import os
import resource
import shlex
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.tools import utils as device_utils

from titan_muon.assignment.table import decay_lines, frozen_lines, parameter_table
from titan_muon.muon import Muon
from titan_muon.plan import summarize
from titan_muon.tensors.process_groups import default_store
from titan_muon.titan import compat
from titan_muon.titan.assign import explain
from titan_muon.titan.checks.assignments import assigned_optimizers, changed_assignments
from titan_muon.titan.checks.machine import check_machine
from titan_muon.titan.checks.start import check_start, data_facts, start_facts
from titan_muon.titan.data.loader import PackedDataLoader
from titan_muon.titan.device import on_accelerator
from titan_muon.titan.fault import RunFault
from titan_muon.titan.launch.attempts import (
    interrupted_run,
    lasting_store,
    remember_run,
    store_of_attempt,
    store_of_ranks,
)
from titan_muon.titan.launch.environment import describe_world
from titan_muon.titan.launch.folder_lock import FolderLock
from titan_muon.titan.launch.watchdog import Watchdog
from titan_muon.titan.model.qk_clip import qk_clip_lines, reduced_bytes
from titan_muon.titan.recipe import Recipe, RecipeError, check_degrees
from titan_muon.titan.recipe.constraints import owns
from titan_muon.titan.recipe.files import keys_of_the_command_line, with_source
from titan_muon.titan.recipe.toml import plural
from titan_muon.titan.run import runs
from titan_muon.titan.run.console import say, say_error, say_fault, set_up_logging
from titan_muon.titan.run.runs import Run
from titan_muon.titan.run.signals import StopSignals
from titan_muon.titan.run.trainer import MuonTrainer
from titan_muon.titan.run.trainer_config import comm_config, trainer_config
from titan_muon.titan.storage.space import unusable

TRACEBACK_FILE = "traceback.txt"
MOST_FILES = 65536
SECONDS_TO_EXIT = 3
"""With two for the launcher, a job ends within five seconds after a time-out."""


def run(recipe: Recipe, config: str, *, quiet: bool = False) -> int:
    """Train a recipe of the file `config` in this process, alone or under torchrun. Returns the exit code.

    0: training ended or was stopped; 1: training diverged, or a RunFault; 2: user error. Other errors raise.
    `quiet`: as in `console.is_quiet`.
    """
    describe_world()
    set_up_logging(quiet=quiet)
    device_utils.device_module.set_device(device_utils.get_local_device())
    lasting = _init_distributed(recipe)
    code = 0
    try:
        train(recipe, keys_of_the_command_line(config, recipe), lasting)
    except RecipeError as error:
        code = 2
        say_error(with_source(error, config, recipe), code)
    except FloatingPointError as error:
        code = 1
        say_error(error, code)
    except RunFault as error:
        code = 1
        say_fault(error)
    except Exception:
        # The exit may wait for collectives without peers, and the launcher waits for the exit.
        faulthandler.dump_traceback_later(SECONDS_TO_EXIT, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        raise
    # Not in a `finally`: after another error, this could wait for ranks in a collective.
    dist.destroy_process_group()
    # Otherwise the interpreter visits all objects at exit, for seconds.
    gc.freeze()
    return code


def _init_distributed(recipe: Recipe) -> dist.Store | None:
    """Store of all attempts of the job, or None. Raises TimeoutError with the missing ranks."""
    timeout = timedelta(seconds=recipe.comm.init_timeout_seconds)
    lasting = lasting_store(timeout)
    if lasting is None:
        store = store_of_ranks(timeout)
    else:
        store = store_of_attempt(lasting, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout)
    # torch refuses a second CPU backend.
    cpu_backend = recipe.training.enable_cpu_offload and on_accelerator()
    compat.init_distributed(comm_config(recipe), cpu_backend=cpu_backend, folder=recipe.dump_folder, store=store)
    return lasting


def train(recipe: Recipe, overrides: tuple[str, ...] = (), lasting: dist.Store | None = None) -> str:
    """Train a recipe, or continue its run, on the default process group. Returns the run's folder.

    `overrides`: keys of the command line, for the run's name. `lasting`: store of all attempts of the job. Raises
    RecipeError before the first step for user errors.
    """
    world = dist.get_world_size()
    # On gloo, because reading a device tensor waits for the device's queue.
    timeout = timedelta(seconds=recipe.comm.init_timeout_seconds)
    group = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None
    # Ranks with other recipes may not meet in later collectives.
    check_start(start_facts(recipe), group)
    check_degrees(recipe, world)
    check_machine(recipe)
    _raise_file_limit()
    store = default_store()
    first, later = recipe.comm.init_timeout_seconds, recipe.comm.train_timeout_seconds
    watch = Watchdog(store, dist.get_rank(), world, first_timeout=first, timeout=later)
    with FolderLock() as lock, watch as watchdog:
        run = runs.agree(recipe, group, lock, overrides, interrupted_run(lasting))
        if dist.get_rank() == 0:
            # Now, so that an early end leaves the folder to the next attempt.
            remember_run(lasting, run.folder)
        trainer = _prepare(recipe, run, group)
        keep = partial(runs.keep_folder, run, recipe, lock) if dist.get_rank() == 0 else lambda: None
        # Groups of Muon and TorchTitan would keep PyTorch's 30 minutes.
        compat.set_timeouts(timeout)
        try:
            if trainer.step < trainer.config.training.steps:
                with StopSignals(group, announce=dist.get_rank() == 0, on_progress=watchdog.advance) as stop:
                    trainer.train(stop, keep)
            watchdog.finish()
        except FloatingPointError:
            if dist.get_rank() == 0 and trainer.checkpointer.last_saved is None:
                runs.note_divergence(run, recipe)
            raise
        finally:
            trainer.close()
    return run.folder


def _raise_file_limit() -> None:
    """Raise the usual limit of 1,024 open files, because each gloo group has a socket per rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some programs visit every possible file at their start.
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _prepare(recipe: Recipe, run: Run, group: dist.ProcessGroup | None) -> MuonTrainer:
    trainer: MuonTrainer | None = None
    try:
        trainer = trainer_config(recipe, run, dist.get_world_size()).build()
        assert trainer is not None, "a configuration builds its trainer"
        check_start(data_facts(trainer.dataloader, trainer.tokenizer), group)
        trainer.checkpointer.load()
        _refuse_late_export(trainer, recipe)
    except Exception as error:
        refusal = _refusal(error, recipe)
        if refusal is None:
            raise
        if trainer is not None:
            trainer.close()
        if dist.get_rank() == 0:
            runs.discard(run)
        if refusal is error:
            raise
        raise refusal from error
    reports = _gather_parts(trainer, recipe, group)
    answer: list[dict[str, str] | RecipeError] = [{}]
    # A refused run writes no recipe and leaves `latest` unchanged.
    if dist.get_rank() == 0:
        try:
            answer[0] = _begin_run(trainer, recipe, run, reports)
        except OSError as error:
            runs.discard(run)
            answer[0] = unusable(recipe.dump_folder, error)
    if group is not None:
        # Under pipeline parallelism another rank than 0 reports.
        dist.broadcast_object_list(answer, src=0, group=group)
    texts = answer[0]
    if isinstance(texts, RecipeError):
        trainer.close()
        raise texts
    trainer.metrics_processor.describe({tag: text for tag, text in texts.items() if text}, run.folder)
    return trainer


def _refusal(error: Exception, recipe: Recipe) -> RecipeError | None:
    """An error of the trainer's start as a refusal; None if the recipe is not its cause."""
    if isinstance(error, RecipeError):
        return error
    # TorchTitan raises these for bad configurations, without a key.
    if isinstance(error, ValueError | NotImplementedError):
        return RecipeError(f"{error} (refused at {_traced(error, recipe)})")
    if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
        return None
    model = recipe.model
    vocabulary = "" if model.vocab_size is None else f" with model.vocab_size = {model.vocab_size}"
    return RecipeError(
        f"model.flavor = {model.flavor!r}{vocabulary} does not fit into the memory of rank {dist.get_rank()}: "
        f"{str(error).splitlines()[0]}. Choose a smaller model or vocabulary, or more ranks; a dry run (--dry-run) "
        f"lists the memory by purpose (refused at {_traced(error, recipe)})"
    )


def _refuse_late_export(trainer: MuonTrainer, recipe: Recipe) -> None:
    """Raise RecipeError if a finished run should be exported."""
    steps = trainer.config.training.steps
    if recipe.checkpoint.last_save_in_hf and trainer.step >= steps:
        raise RecipeError(
            f"checkpoint.last_save_in_hf = true: step {trainer.step} of {steps} is done, and only a run that trains "
            "exports. Continue from an earlier checkpoint (checkpoint.load_step), or raise training.steps."
        )


def _traced(error: Exception, recipe: Recipe) -> str:
    """Where the error was raised, and the file of the last refusal's traceback, because the run has no folder."""
    file, where = Path(recipe.dump_folder, TRACEBACK_FILE), traceback.extract_tb(error.__traceback__)[-1]
    with suppress(OSError):
        runs.write_file(file, "".join(traceback.format_exception(error)))
    return f"{where.filename}:{where.lineno}; traceback in {file}"


def _say_start(trainer: MuonTrainer, recipe: Recipe, run: Run) -> None:
    if note := compat.spmd_note(recipe.parallelism.spmd_backend, owned=owns(recipe)):
        say(note)
    steps, dims = trainer.config.training.steps, trainer.parallel_dims
    if run.checkpoint is not None:
        say(f"continuing after step {trainer.step}, from {run.checkpoint}")
    if trainer.step >= steps:
        folder = shlex.quote(run.source or run.folder)
        say(
            f"nothing to do: step {trainer.step} of {steps} is done. Raise training.steps to go on; "
            f"titan-muon evaluate {folder} gives the held-out loss, titan-muon sample writes text"
        )
    else:
        sizes = {"pp": dims.pp, "hsdp": dims.dp_replicate, "fsdp": dims.dp_shard, "cp": dims.cp, "tp": dims.tp}
        meshes = ", ".join(f"{axis} {size}" for axis, size in (sizes | {"ep": dims.ep}).items() if size > 1)
        ranks = plural(dist.get_world_size(), "rank") + (f" ({meshes})" if meshes else "")
        left = plural(steps - trainer.step, "step")
        for line in _data_lines(trainer, recipe):
            say(line)
        say(f"training {left} of {_batch(trainer)} on {ranks}; the first one takes longest")


def _sequences(trainer: MuonTrainer) -> int:
    """Sequences of a step, over all ranks."""
    dims = trainer.parallel_dims
    ranks = dims.dp_replicate * dims.dp_shard
    return trainer.config.training.local_batch_size * ranks * trainer.gradient_accumulation_steps


def _batch(trainer: MuonTrainer) -> str:
    sequences, passes = _sequences(trainer), trainer.gradient_accumulation_steps
    tokens = sequences * trainer.config.training.seq_len
    return f"{plural(sequences, 'sequence')} ({tokens:,} tokens{f', in {passes} passes' if passes > 1 else ''})"


def _data_lines(trainer: MuonTrainer, recipe: Recipe) -> list[str]:
    steps, sequences = trainer.config.training.steps - trainer.step, _sequences(trainer)
    if isinstance(trainer.dataloader, PackedDataLoader):
        return trainer.dataloader.describe(steps, sequences)
    tokens = steps * sequences * recipe.training.seq_len
    return [f"data: {recipe.data.dataset} by TorchTitan's loader, which counts no passes; {tokens:,} tokens are read"]


@dataclass(frozen=True)
class StageText:
    """Report on a pipeline rank's optimizers, for the console (`lines`) and the file (`full`)."""

    lines: str
    full: str


def _gather_parts(trainer: MuonTrainer, recipe: Recipe, group: dist.ProcessGroup | None) -> list[StageText]:
    world, rank, stages = dist.get_world_size(), dist.get_rank(), trainer.parallel_dims.pp
    ranks = explain.stage_ranks(world, stages, rank * stages // world)
    own = _in_words(trainer, recipe, ranks) if rank == ranks[0] else None
    parts = [own]
    if stages > 1:
        parts = [None] * world
        dist.gather_object(own, parts if rank == 0 else None, group=group)
    return [part for part in parts if part is not None]


def _in_words(trainer: MuonTrainer, recipe: Recipe, ranks: range) -> StageText:
    assigned, world = trainer.optimizers.assignments, dist.get_world_size()
    plans = (optimizer.plan for optimizer in trainer.optimizers if isinstance(optimizer, Muon))
    # A stage without matrices has a Muon too, for agreements among all ranks.
    plan = next((plan for plan in plans if plan.matrices), None)
    summary = None if plan is None else summarize(plan)
    named = {canonical_fqn(name): p for part in trainer.model_parts for name, p in part.named_parameters()}
    loads = explain.owner_loads(named, summary, ranks)
    head = [] if len(ranks) == world else [explain.pipeline_line(ranks, world, assigned)]
    lines = [
        *explain.plan_lines(plan, summary),
        *explain.owned_step_lines(plan, named, skips=recipe.muon.missing_grad == "skip"),
    ]
    table = parameter_table(assigned, named, plan, full=True)
    full = [*head, table, "", *lines, "", *explain.owner_lines(loads, full=True)]
    return StageText("\n".join([*head, *lines, *explain.owner_summary(loads)]), "\n".join(full))


def _begin_run(trainer: MuonTrainer, recipe: Recipe, run: Run, reports: list[StageText]) -> dict[str, str]:
    """Print the run's start and write its files, on rank 0. Returns texts for TensorBoard and W&B by tag."""
    # Before `begin`, which replaces the recipe of a continued run.
    changes = runs.changes_text(run, recipe)
    for change in runs.changed_keys(run, recipe):
        say(f"changed since the checkpoint: {change}")
    for line in _changed_assignments(reports, run, recipe):
        say(f"warning: {line}")
    runs.begin(run, recipe)
    plan = _say_optimizers(trainer, recipe, run, reports)
    _say_start(trainer, recipe, run)
    return {"plan": plan, "changes": changes}


def _changed_assignments(parts: Sequence[StageText], run: Run, recipe: Recipe) -> list[str]:
    earlier = runs.earlier_optimizers(run, recipe)
    if earlier is None:
        return []
    after = assigned_optimizers("\n".join(part.full for part in parts))
    return changed_assignments(assigned_optimizers(earlier), after)


def _say_optimizers(trainer: MuonTrainer, recipe: Recipe, run: Run, parts: list[StageText]) -> str:
    """Write the table of parameters; print and return each optimizer's share and the cost of Muon's plan."""
    say(f"run {run.folder}")
    world = dist.get_world_size()
    optimizers = trainer.optimizers.parts
    lines = [*explain.optimizer_lines(optimizers.whole, recipe.muon.split, world), *decay_lines(optimizers.groups)]
    clips = qk_clip_lines(recipe.qk_clip, reduced_bytes(trainer.model_config), world)
    counts = "\n".join([*lines, *clips, *frozen_lines(optimizers.frozen)])
    shown = "\n".join([counts, *(part.lines for part in parts if part.lines)])
    say(shown)
    text = "\n\n".join([*(part.full for part in parts), counts])
    runs.write_file(Path(run.folder) / runs.OPTIMIZERS_FILE, text + "\n")
    return shown
