"""TorchTitan's trainer with the step of a recipe. `compat.install()` must have run before this module is imported."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

from titan_muon.titan.clip import GradientClip
from titan_muon.titan.data.loader import bytes_per_token
from titan_muon.titan.optimizers import HybridOptimizers
from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.run.checkpoints import RunCheckpoints
from titan_muon.titan.run.console import say
from titan_muon.titan.run.metrics import RunMetrics, StepReport
from titan_muon.titan.run.signals import StopSignals
from titan_muon.titan.run.step_timer import StepTimer

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
    metrics_processor: RunMetrics

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # Only now tokenizer and model are there to compare. An id beyond the embedding would be an index error of the
        # device, reported late and without a name.
        self._check_vocabulary()
        if config.validator.enable:
            held_out = config.validator.dataloader
            self.metrics_processor.bytes_per_token = bytes_per_token(held_out, self.tokenizer)
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
        tokens, rows = self.tokenizer.get_vocab_size(), decoder_vocab_size(self.config.model_spec)
        if tokens > rows:
            raise RecipeError(
                f"data.tokenizer has {tokens} tokens and the model embeds {rows}; set model.vocab_size = {tokens}"
            )

    def init_distributed(self) -> ParallelDims:
        """The degrees on the process group that is already there."""
        # TorchTitan would make one: here the run's folder was agreed on in it before the trainer is built.
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    @property
    def tokens(self) -> int:
        """Tokens trained on since the run began, over all ranks; each rank of a step takes equally many."""
        dims = self.parallel_dims
        return self.tokens_before + self.ntokens_seen * dims.dp_replicate * dims.dp_shard * dims.cp

    def state_dict(self) -> dict[str, Any]:
        """Counts that mean the same on any number of ranks."""
        # TorchTitan saves this rank's tokens, which a run continued on another number of ranks would add up wrongly.
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
                # Saved first: a validation that fails, or that a second Ctrl-C ends, then loses no step.
                self._save(stopped)
                self._validate(stopped)
                profiler.step()
                # Only the first step compiles, connects and allocates; after it a rank that is late has died.
                if self.step == first:
                    seconds = timedelta(seconds=self.config.comm.train_timeout_seconds)
                    dist_utils.set_pg_timeouts(timeout=seconds, parallel_dims=self.parallel_dims)
        self.checkpointer.maybe_wait_for_saving()

    def _save(self, stopped: bool) -> None:
        last = self.step == self.config.training.steps
        with self.metrics_processor.paused():
            saved = self.checkpointer.save(self.step, last_step=last)
            if stopped and not saved:
                self.checkpointer.save_now(self.step)
        if stopped and not last:
            checkpoint = self.config.checkpoint
            off = "load_only = true" if checkpoint.enable else "enable = false"
            saves = checkpoint.enable and not checkpoint.load_only
            kept = "saved" if saves else f"nothing is saved (checkpoint.{off})"
            say(f"stopped after step {self.step} of {self.config.training.steps}: {kept}")

    def _validate(self, stopped: bool) -> None:
        last = self.step == self.config.training.steps
        if self.config.validator.enable and (last or (self.validator.should_validate(self.step) and not stopped)):
            self.metrics_processor.tokens = self.tokens
            with self.metrics_processor.paused():
                self.validator.validate(self.model_parts, self.step)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One optimizer step on `gradient_accumulation_steps` microbatches."""
        self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)
        with self.timer.phase("data"):
            groups, tokens = self._fetch(data_iterator)
        with self.timer.phase("forward_backward"):
            loss = self._forward_backward(groups, tokens)
        with self.timer.phase("clip"):
            grad_norm = self.clip()
        # The rates that this step is taken with: the schedule moves them on before the report.
        rates = self.optimizers.learning_rates()
        with self.timer.phase("optimizer"):
            # An asynchronous save may still be copying the weights that the step is about to change.
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
        # Counted over all microbatches before the first forward: each loss is divided by the tokens of the whole step,
        # so that a microbatch with few labels does not weigh as much as a full one.
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
        seconds, memory = self.timer.drain(), int(peak.item())
        report = StepReport(
            step=self.step, loss=mean_loss, grad_norm=norm, tokens=self.tokens, lr=rates, seconds=seconds, memory=memory
        )
        self.metrics_processor.log_step(report)
        # After the report, which is the record of where the run diverged.
        if not math.isfinite(mean_loss + norm):
            raise FloatingPointError(
                f"step {self.step}: the loss is {mean_loss} and the norm of the gradients {norm}; training cannot go "
                "on. Lower the learning rates, warm up for longer, or continue from an earlier checkpoint."
            )
