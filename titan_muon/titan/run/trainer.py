"""Runs a recipe: opens its run folder, builds TorchTitan's trainer, trains, validates, saves, and cleans up.

`compat.install()` must have run before this module is imported.
"""

import gc
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools import utils as device_utils
from torchtitan.trainer import Trainer

from titan_muon.muon import Muon
from titan_muon.plan import summarize
from titan_muon.titan import compat
from titan_muon.titan.clip import GradientClip
from titan_muon.titan.dry_run.explain import optimizer_lines, parameter_table, plan_lines
from titan_muon.titan.dry_run.ownership_report import loads, ownership_lines, ownership_summary
from titan_muon.titan.optimizers import HybridOptimizers
from titan_muon.titan.recipe import Recipe, RecipeError, check_degrees
from titan_muon.titan.run.checkpoints import RunCheckpoints
from titan_muon.titan.run.console import say, say_error, set_up_logging
from titan_muon.titan.run.metrics import Metrics, StepReport
from titan_muon.titan.run.runs import Run, agree, begin, discard
from titan_muon.titan.run.signals import StopSignals
from titan_muon.titan.run.step_timer import StepTimer
from titan_muon.titan.run.trainer_config import comm_config, trainer_fields

OPTIMIZERS_FILE = "optimizers.txt"

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class MuonTrainer(Trainer):
    """TorchTitan's trainer with its own step: clipping by optimizer, timed phases, and an end that can be asked for."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        clip: Literal["adamw", "all", "none"] = "adamw"
        """Whose gradients `training.max_norm` clips; `adamw` is all but Muon's."""

    config: Config
    optimizers: HybridOptimizers
    checkpointer: RunCheckpoints
    metrics_processor: Metrics

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._check_vocabulary()
        self.timer = StepTimer(self.device)
        self.tokens_before = 0
        parameters = [p for part in self.model_parts for p in part.parameters()]
        self.clip = GradientClip(
            parameters,
            self.optimizers.clipped_parameters(config.clip),
            max_norm=config.training.max_norm,
            stage_ranks=dist.get_world_size() // self.parallel_dims.pp,
        )

    def _check_vocabulary(self) -> None:
        """Raise RecipeError if the tokenizer has tokens that the model cannot embed."""
        tokens, rows = self.tokenizer.get_vocab_size(), decoder_vocab_size(self.config.model_spec)
        if tokens > rows:
            raise RecipeError(
                f"data.tokenizer has {tokens} tokens and the model embeds {rows}; set model.vocab_size = {tokens}"
            )

    def init_distributed(self) -> ParallelDims:
        """The degrees on the process group that is already there."""
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    @property
    def tokens(self) -> int:
        """Tokens trained on since the run began, over all ranks; each rank of a step takes equally many."""
        dims = self.parallel_dims
        return self.tokens_before + self.ntokens_seen * dims.dp_replicate * dims.dp_shard * dims.cp

    def state_dict(self) -> dict[str, Any]:
        """Counts that mean the same on any number of ranks."""
        return {"step": self.step, "ntokens_seen": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts."""
        self.step, self.tokens_before, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"], 0

    def train(self, stop: StopSignals) -> None:
        """Train until the last step, or until `stop` was asked for; then save."""
        first = self.step + 1
        self.metrics_processor.start(self.step)
        with self.config.profiler.build(global_step=self.step, base_folder=self.config.dump_folder) as profiler:
            batches = self.batch_generator(self.dataloader)
            stopped = False
            while self.step < self.config.training.steps and not stopped:
                self.step += 1
                stop.begin_step()
                self.gc_handler.run(self.step)
                self.train_step(batches)
                stopped = stop.stop_after_step()
                self._save(stopped)
                self._validate(stopped)
                profiler.step()
                if self.step == first:
                    self._shorten_timeout()
        self.checkpointer.maybe_wait_for_saving()

    def _save(self, stopped: bool) -> None:
        last = self.step == self.config.training.steps
        with self.metrics_processor.paused():
            saved = self.checkpointer.save(self.step, last_step=last)
            if stopped and not saved:
                self.checkpointer.save_now(self.step)
        if stopped and not last:
            kept = "saved" if self.config.checkpoint.enable else "nothing is saved (checkpoint.enable = false)"
            say(f"stopped after step {self.step} of {self.config.training.steps}: {kept}")

    def _validate(self, stopped: bool) -> None:
        last = self.step == self.config.training.steps
        if self.config.validator.enable and (last or (self.validator.should_validate(self.step) and not stopped)):
            self.validator.validate(self.model_parts, self.step)

    def _shorten_timeout(self) -> None:
        seconds = timedelta(seconds=self.config.comm.train_timeout_seconds)
        dist_utils.set_pg_timeouts(timeout=seconds, parallel_dims=self.parallel_dims)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One optimizer step on `gradient_accumulation_steps` microbatches."""
        self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)
        with self.timer.phase("data"):
            groups, tokens = self._fetch(data_iterator)
        with self.timer.phase("forward_backward"):
            loss = self._forward_backward(groups, tokens)
        with self.timer.phase("clip"):
            grad_norm = self.clip()
        rates = self.optimizers.learning_rates()
        with self.timer.phase("optimizer"):
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            self._report(loss, grad_norm, rates)

    def _fetch(self, batches: Iterator[Batch]) -> tuple[list[list[Batch]], torch.Tensor]:
        """The step's microbatches, one list for each forward and backward, and its tokens over all ranks, int64."""
        groups = [
            [next(batches) for _ in range(self.num_pipeline_parallel_microbatches)]
            for _ in range(self.gradient_accumulation_steps)
        ]
        counts = [(labels != IGNORE_INDEX).sum() for group in groups for _, labels in group]
        tokens = torch.stack(counts).sum().to(self.device, non_blocking=True)
        if self.parallel_dims.dp_enabled:
            tokens = dist_utils.dist_sum_tensor(tokens, self.parallel_dims.get_mesh("batch"))
        return groups, tokens

    def _forward_backward(self, groups: list[list[Batch]], tokens: torch.Tensor) -> torch.Tensor:
        """Add up gradients over the groups. Returns this rank's part of the mean loss over `tokens` tokens."""
        losses = torch.zeros((), device=self.device)
        for group in groups:
            inputs = [{name: t.to(self.device, non_blocking=True) for name, t in batch.items()} for batch, _ in group]
            labels = [target.to(self.device, non_blocking=True) for _, target in group]
            pipeline = self.parallel_dims.pp_enabled
            loss = self.forward_backward_step(
                input_dict=inputs if pipeline else inputs[0],
                labels=labels if pipeline else labels[0],
                global_valid_tokens=tokens,
            )
            losses += loss.detach().squeeze()
        return losses

    def _report(self, loss: torch.Tensor, grad_norm: torch.Tensor, rates: dict[str, float]) -> None:
        """Gather the step's numbers from all ranks and report them. Waits for the device.

        Raises FloatingPointError if the loss or the gradient is not finite.
        """
        loss = loss.double()
        if self.parallel_dims.dp_cp_enabled:
            loss = dist_utils.dist_sum_tensor(loss, self.parallel_dims.get_mesh("loss"))
        peak = self.metrics_processor.peak_memory().to(self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        mean_loss, norm = float(loss.item()), float(grad_norm.item())
        self.metrics_processor.log_step(
            StepReport(
                step=self.step,
                loss=mean_loss,
                grad_norm=norm,
                tokens=self.tokens,
                lr=rates,
                seconds=self.timer.drain(),
                memory=int(peak.item()),
            )
        )
        if not math.isfinite(mean_loss + norm):
            raise FloatingPointError(
                f"step {self.step}: the loss is {mean_loss} and the norm of the gradients {norm}; training cannot go "
                "on. Lower the learning rates, warm up for longer, or continue from an earlier checkpoint."
            )


def trainer_config(recipe: Recipe, run: Run) -> MuonTrainer.Config:
    """TorchTitan's configuration of a recipe, for a run kept in `run.folder`.

    Raises RecipeError or ValueError for a model, data or optimizers that cannot be had.
    """
    return MuonTrainer.Config(**trainer_fields(recipe, run), clip=recipe.optimizer.clip)


def run(recipe: Recipe) -> int:
    """Train a recipe in this process, one of those that torchrun started or the only one. Returns the exit code.

    0 if training ended or was asked to, 1 if it diverged, 2 if the user has to correct something; these two are said
    once. Anything else raises.
    """
    compat.single_process_environment()
    set_up_logging()
    device_utils.device_module.set_device(device_utils.get_local_device())
    dist_utils.init_distributed(comm_config(recipe), recipe.training.enable_cpu_offload, base_folder=recipe.dump_folder)
    code = 0
    try:
        train(recipe)
    except (RecipeError, FloatingPointError) as error:
        say_error(error)
        code = 2 if isinstance(error, RecipeError) else 1
    dist.destroy_process_group()
    # Without this the interpreter walks every object of PyTorch once more while it exits, which takes seconds.
    gc.freeze()
    return code


def train(recipe: Recipe) -> str:
    """Train a recipe on the process group that is there, or go on with it. Returns the run's folder.

    Raises RecipeError, before the first step, for what the user has to correct.
    """
    world = dist.get_world_size()
    check_degrees(recipe, world)
    group = dist.new_group(backend="gloo") if world > 1 else None
    run = agree(recipe, group)
    trainer = _prepare(recipe, run)
    try:
        with StopSignals(group, announce=dist.get_rank() == 0) as stop:
            trainer.train(stop)
    finally:
        trainer.close()
    return run.folder


def _prepare(recipe: Recipe, run: Run) -> MuonTrainer:
    """The trainer of a run, with the run's checkpoint loaded.

    TorchTitan refuses a configuration with ValueError or NotImplementedError; both become a RecipeError here.
    """
    trainer: MuonTrainer | None = None
    try:
        trainer = trainer_config(recipe, run).build()
        assert trainer is not None, "a configuration builds its trainer"
        trainer.checkpointer.load()
    except (ValueError, NotImplementedError) as error:
        if trainer is not None:
            trainer.close()
        if dist.get_rank() == 0:
            discard(run)
        if isinstance(error, RecipeError):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise RecipeError(f"{error} (refused at {where.filename}:{where.lineno})") from error
    if dist.get_rank() == 0:
        begin(run, recipe)
    _say_start(trainer, run)
    return trainer


def _say_optimizers(trainer: MuonTrainer, run: Run) -> None:
    """Say how much each optimizer takes and what Muon's plan costs; the table of all parameters goes to the folder."""
    if dist.get_rank() != 0:
        return
    optimizers = trainer.optimizers
    assert isinstance(optimizers, HybridOptimizers), "the recipe's container"
    plan = next((optimizer.plan for optimizer in optimizers if isinstance(optimizer, Muon)), None)
    summary = None if plan is None else summarize(plan)
    counts = optimizer_lines(optimizers.assignments, plan, dist.get_world_size())
    lines = "\n".join([*counts, *plan_lines(plan, summary)])
    named = {canonical_fqn(name): p for part in trainer.model_parts for name, p in part.named_parameters()}
    owned = {} if summary is None else loads(named, summary, dist.get_world_size())
    say("\n".join([lines, *ownership_summary(owned)]))
    table = parameter_table(optimizers.assignments, named, plan, full=True)
    owners = "\n".join(ownership_lines(owned, full=True))
    (Path(run.folder) / OPTIMIZERS_FILE).write_text(f"{table}\n\n{lines}\n\n{owners}\n", encoding="utf-8")


def _say_start(trainer: MuonTrainer, run: Run) -> None:
    steps = trainer.config.training.steps
    say(f"run {run.folder}")
    _say_optimizers(trainer, run)
    if run.checkpoint is not None:
        say(f"continuing after step {trainer.step}, from {run.checkpoint}")
    if trainer.step >= steps:
        say(f"nothing to do: step {trainer.step} of {steps} is done; raise training.steps to go on")
    else:
        say(f"training {steps - trainer.step} steps on {dist.get_world_size()} ranks; the first one takes longest")
