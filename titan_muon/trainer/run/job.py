"""Train a recipe in this process: process group, run folder, trainer, exit code."""

import faulthandler
import gc
import os
import resource
import shlex
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.tools import utils as device_utils

from titan_muon.assignment.table import decay_lines, frozen_lines, parameter_table
from titan_muon.engine.tensors.process_groups import default_store
from titan_muon.forecast.lines import optimizer_lines, owned_step_lines, owner_lines, owner_summary, plan_lines
from titan_muon.forecast.model import owner_loads
from titan_muon.options import plural
from titan_muon.planner.summary import summarize
from titan_muon.trainer.checks.start import check_machine, check_start, data_facts, start_facts
from titan_muon.trainer.data.loader import PackedDataLoader
from titan_muon.trainer.data.tokenizers import BPETokenizer
from titan_muon.trainer.device import on_accelerator
from titan_muon.trainer.fault import RunFault, by_rank_0
from titan_muon.trainer.launch.attempts import (
    describe_world,
    interrupted_run,
    lasting_store,
    remember_run,
    store_of_attempt,
    store_of_ranks,
)
from titan_muon.trainer.launch.watchdog import Watchdog
from titan_muon.trainer.model.pipeline import pipeline_line, stage_ranks
from titan_muon.trainer.model.qk_clip import qk_clip_lines, reduced_bytes
from titan_muon.trainer.recipe import Recipe, RecipeError, check_degrees
from titan_muon.trainer.recipe.files import with_source
from titan_muon.trainer.run import runs
from titan_muon.trainer.run.console import print_error_once, print_on_rank0, set_up_logging
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.signals import StopSignals
from titan_muon.trainer.run.trainer import MuonTrainer
from titan_muon.trainer.run.trainer_config import comm_config, trainer_config
from titan_muon.trainer.run_folder import FolderLock, write_file
from titan_muon.trainer.torchtitan import compat

MOST_FILES = 65536
SECONDS_TO_EXIT = 3
"""With two for the launcher, a job ends within five seconds after a time-out."""


def run(recipe: Recipe, sources: Mapping[str, str], *, typed: tuple[str, ...] = (), quiet: bool = False) -> int:
    """Train a recipe in this process, alone or under torchrun. Returns the exit code.

    0: training ended or was stopped; 1: training diverged, or a RunFault; 2: user error. Other errors raise.
    `sources`: the file or command line with each given key. `typed`: keys of the command line. `quiet`: as in
    `console.is_quiet`.
    """
    describe_world()
    set_up_logging(quiet=quiet)
    device_utils.device_module.set_device(device_utils.get_local_device())
    lasting = _init_distributed(recipe)
    code = 0
    try:
        train(recipe, typed, lasting)
    except RecipeError as error:
        code = 2
        print_error_once(with_source(error, sources))
    except (FloatingPointError, RunFault) as error:
        code = 1
        print_error_once(error)
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


def train(recipe: Recipe, typed: tuple[str, ...] = (), lasting: dist.Store | None = None) -> str:
    """Train a recipe, or continue its run, on the default process group. Returns the run's folder.

    `typed`: keys of the command line, for the run's name. `lasting`: store of all attempts of the job. Raises
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
        run = runs.agree(recipe, group, lock, typed, interrupted_run(lasting))
        if dist.get_rank() == 0:
            # Now, so that an early end leaves the folder to the next attempt.
            remember_run(lasting, run.folder)
        stop = StopSignals(group, watchdog.advance)
        trainer = _prepare(recipe, run, typed, stop)
        # Groups of Muon and TorchTitan would keep PyTorch's 30 minutes.
        compat.set_timeouts(timeout)
        try:
            if trainer.step < trainer.config.training.steps:
                with stop:
                    trainer.train()
                # A captured step ends before the process groups.
                trainer.optimizers.free()
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


def _prepare(recipe: Recipe, run: Run, typed: tuple[str, ...], stop: StopSignals) -> MuonTrainer:
    """The trainer with the run's checkpoint, and the files of the run's start. Leaves no folder of a refused run."""
    trainer: MuonTrainer | None = None
    try:
        trainer = trainer_config(recipe, run, dist.get_world_size(), stop).build()
        assert trainer is not None, "a configuration builds its trainer"
        check_start(data_facts(trainer.dataloader, trainer.tokenizer), stop.group)
        trainer.checkpointer.load()
        _begin_run(trainer, recipe, run, typed, stop.group)
    except Exception as error:
        refusal = _refusal(error, recipe)
        if refusal is None:
            raise
        if trainer is not None:
            trainer.close()
        if dist.get_rank() == 0:
            runs.discard(run)
        raise refusal from None if refusal is error else error
    return trainer


def _refusal(error: Exception, recipe: Recipe) -> RecipeError | None:
    """An error of the trainer's start as a refusal; None if the recipe is not its cause."""
    if isinstance(error, RecipeError):
        return error
    where = traceback.extract_tb(error.__traceback__)[-1]
    refused = f"(refused at {where.filename}:{where.lineno})"
    # TorchTitan raises these for bad configurations and missing packages, without a key.
    if isinstance(error, ValueError | NotImplementedError | ImportError):
        return RecipeError(f"{error} {refused}")
    if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
        return None
    return RecipeError(
        f"= {recipe.model.flavor!r} does not fit into the memory of rank {dist.get_rank()}: "
        f"{str(error).splitlines()[0]}. Choose a smaller model or vocabulary, or more ranks; --dry-run lists the "
        f"memory by purpose {refused}",
        key="model.flavor",
    )


def _begin_run(
    trainer: MuonTrainer, recipe: Recipe, run: Run, typed: tuple[str, ...], group: dist.ProcessGroup | None
) -> None:
    """Print the run's start and write its files, on rank 0. Raises on every rank if rank 0 fails."""
    world, rank, stages = dist.get_world_size(), dist.get_rank(), trainer.parallel_dims.pp
    ranks = stage_ranks(world, stages, rank * stages // world)
    own = _stage_texts(trainer, recipe, ranks) if rank == ranks[0] else None
    parts = [own]
    if stages > 1:
        parts = [None] * world
        dist.gather_object(own, parts if rank == 0 else None, group=group)

    def begin() -> None:
        for change in runs.changed_keys(run, recipe):
            print_on_rank0(f"changed since the checkpoint: {change}")
        tokenizer = trainer.tokenizer.text if isinstance(trainer.tokenizer, BPETokenizer) else None
        runs.begin(run, recipe, typed, world, tokenizer)
        _print_optimizers(trainer, recipe, run, [part for part in parts if part is not None])
        _print_start(trainer, recipe, run)

    by_rank_0(begin, recipe.dump_folder, group)


def _stage_texts(trainer: MuonTrainer, recipe: Recipe, ranks: range) -> tuple[str, str]:
    """Report on a pipeline stage's optimizers, for the console and for OPTIMIZERS_FILE."""
    assigned, world = trainer.optimizers.assignments, dist.get_world_size()
    plan, named = trainer.optimizers.plan, trainer.optimizers.named_parameters
    summary = None if plan is None else summarize(plan)
    loads = owner_loads(named, summary, ranks)
    head = [] if len(ranks) == world else [pipeline_line(ranks, world, assigned)]
    lines = [*plan_lines(plan, summary), *owned_step_lines(plan, named, skips=recipe.muon.expert.skips_missing)]
    table = parameter_table(assigned, named, plan, full=True)
    full = [*head, table, "", *lines, "", *owner_lines(loads, full=True)]
    return "\n".join([*head, *lines, *owner_summary(loads)]), "\n".join(full)


def _print_optimizers(trainer: MuonTrainer, recipe: Recipe, run: Run, parts: list[tuple[str, str]]) -> None:
    """Write the table of parameters; print each optimizer's share and the cost of Muon's plan."""
    print_on_rank0(f"run {run.folder}")
    world, optimizers = dist.get_world_size(), trainer.optimizers.parts
    lines = [*optimizer_lines(optimizers.whole, recipe.muon.split, world), *decay_lines(optimizers.groups)]
    clips = qk_clip_lines(recipe.qk_clip, reduced_bytes(trainer.model_config), world)
    counts = "\n".join([*lines, *clips, *frozen_lines(optimizers.frozen)])
    print_on_rank0("\n".join([counts, *(short for short, _ in parts if short)]))
    write_file(Path(run.folder, runs.OPTIMIZERS_FILE), "\n\n".join([*(full for _, full in parts), counts]) + "\n")


def _print_start(trainer: MuonTrainer, recipe: Recipe, run: Run) -> None:
    training, dims, passes = trainer.config.training, trainer.parallel_dims, trainer.gradient_accumulation_steps
    if run.checkpoint is not None:
        print_on_rank0(f"continuing after step {trainer.step}, from {run.checkpoint}")
    left = training.steps - trainer.step
    if left <= 0:
        folder = shlex.quote(run.source or run.folder)
        print_on_rank0(
            f"nothing to do: step {trainer.step} of {training.steps} is done. Raise training.steps to go on; "
            f"titan-muon evaluate, sample and export read {folder}"
        )
        return
    sequences = training.local_batch_size * dims.dp_replicate * dims.dp_shard * passes
    tokens = sequences * training.seq_len
    if isinstance(trainer.dataloader, PackedDataLoader):
        for line in trainer.dataloader.describe(left, sequences):
            print_on_rank0(line)
    else:
        read = f"which counts no passes; {left * tokens:,} tokens are read"
        print_on_rank0(f"data: {recipe.data.dataset} by TorchTitan's loader, {read}")
    batch = f"{plural(sequences, 'sequence')} ({tokens:,} tokens{f', in {passes} passes' if passes > 1 else ''})"
    sizes = (dims.pp, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.ep)
    axes = zip(("pp", "hsdp", "fsdp", "cp", "tp", "ep"), sizes, strict=True)
    meshes = ", ".join(f"{axis} {size}" for axis, size in axes if size > 1)
    ranks = plural(dist.get_world_size(), "rank") + (f" ({meshes})" if meshes else "")
    print_on_rank0(f"training {plural(left, 'step')} of {batch} on {ranks}; the first one takes longest")
    if recipe.training.mixed_precision_param == "auto" and trainer.config.training.mixed_precision_param == "float32":
        print_on_rank0("passes in float32, because this CPU has no instructions for bfloat16")
