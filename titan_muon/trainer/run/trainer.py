"""TorchTitan's trainer with the step of a recipe."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from shlex import quote
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.trainer import Trainer

from titan_muon.engine.tensors.dtensor import local
from titan_muon.plugins.clip import GradientClip, NormCheck
from titan_muon.trainer.assign.container import HybridOptimizers
from titan_muon.trainer.checks.training import ADVICE, UNKNOWN, TrainingChecks
from titan_muon.trainer.data.loader import PackedDataLoader, bytes_per_token
from titan_muon.trainer.data.tokenizers import check_vocabulary
from titan_muon.trainer.data.validation import HeldOutValidator
from titan_muon.trainer.device import Stopwatch
from titan_muon.trainer.fault import RunFault
from titan_muon.trainer.model.qk_clip import build_qk_clip
from titan_muon.trainer.recipe.sections import QKClip as QKClipSection
from titan_muon.trainer.run.checkpoints import RunCheckpoints
from titan_muon.trainer.run.console import print_on_rank0, show
from titan_muon.trainer.run.metrics import RunMetrics
from titan_muon.trainer.run.signals import StopSignals
from titan_muon.trainer.torchtitan import compat

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
LARGEST_WEIGHT = 1e6
"""A flipped exponent bit makes a weight far larger, and training does not."""


class MuonTrainer(Trainer):
    """TorchTitan's trainer with clipping by optimizer, timed phases and a stop request."""

    # A copy of TorchTitan's loop and step would miss special cases, such as the loss of tensor parallelism.

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        clip: Literal["adamw", "all", "none"] = "adamw"
        qk_clip: QKClipSection = field(default_factory=QKClipSection)
        converters: tuple[ModelConfigConverter.Config, ...] = ()
        check_replicas_freq: int = 0
        stop: StopSignals = field(default_factory=StopSignals)

    config: Config
    optimizers: HybridOptimizers
    checkpointer: RunCheckpoints
    metrics_processor: RunMetrics
    validator: HeldOutValidator

    def __init__(self, config: Config) -> None:
        # Not in a dry run, which may plan float8 on a machine without.
        for converter in config.converters:
            assert config.model_spec is not None, "the recipe names a model"
            config.model_spec.model = converter.build().convert(config.model_spec.model)
        config.metrics = replace(config.metrics, trainer=lambda: self)
        super().__init__(config)
        self.stop = config.stop
        check_vocabulary(self.tokenizer.get_vocab_size(), decoder_vocab_size(config.model_spec))
        self.bytes_per_token: float | None = None
        if config.validator.enable:
            self.bytes_per_token = bytes_per_token(self.validator.dl_config, self.tokenizer, config.training.seq_len)
        self.timers = {name: Stopwatch(self.device) for name in ("data", "forward_backward", "clip", "optimizer")}
        self.qk_clip = build_qk_clip(
            config.qk_clip, self.model_config, self.model_parts, self.parallel_dims, self.device
        )
        if (qk_clip := self.qk_clip) is not None:
            self.optimizers.register_step_pre_hook(lambda *_: qk_clip.start_reduce())
            self.optimizers.register_step_post_hook(lambda *_: qk_clip.apply())
        self.optimizers.register_step_post_hook(lambda *_: self.timers["optimizer"].mark())
        self.tokens_before = 0
        self.data_start = 0
        """Token of the data stream where the run's first step began."""
        stage_ranks = dist.get_world_size() // self.parallel_dims.pp
        self.clip = GradientClip(
            [p for part in self.model_parts for p in part.parameters()],
            self.optimizers.clipped_parameters(config.clip),
            max_norm=config.training.max_norm,
            stage_ranks=stage_ranks,
        )
        self.checks = self._new_checks()
        self.compared = 0
        """The last step with a comparison of replicas."""

    def _new_checks(self) -> TrainingChecks:
        dims = self.parallel_dims
        names: dict[torch.Tensor, str] = {p: name for name, p in self.optimizers.named_parameters.items()}
        token_mesh = dims.get_optional_mesh("loss") if dims.dp_cp_enabled else None
        return TrainingChecks(
            [names[parameter] for parameter in self.clip.parameters],
            self.model_parts,
            self.device,
            group=self.stop.group,
            token_group=None if token_mesh is None else token_mesh.get_group(),
            tolerates_nonfinite=self.config.optimizer.tables["muon"]["expert"].skips_step,
        )

    def init_distributed(self) -> ParallelDims:
        # The run has a process group already.
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    @property
    def tokens(self) -> int:
        dims = self.parallel_dims
        return self.tokens_before + self.ntokens_seen * dims.dp_replicate * dims.dp_shard * dims.cp

    def state_dict(self) -> dict[str, Any]:
        # This rank's tokens would be wrong on another number of ranks.
        return {"step": self.step, "ntokens_seen": self.tokens, "data_start": self.data_start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.tokens_before, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"], 0
        self.data_start = state_dict["data_start"]

    def train(self) -> None:
        """Train until the last step or a stop."""
        self.metrics_processor.start(self.step)
        self._begin_checks()
        try:
            with compat.ending_at_once():
                super().train()
            # The next step raises a step's faults, and the last step has none.
            self._warn(self.checks.check_norm())
            self.optimizers.check_last_step()
        except FloatingPointError as error:
            reason = str(error).replace("(expert.", "(muon.expert.")
            self.metrics_processor.logger.log({"diverged": reason}, self.step)
            raise FloatingPointError(reason) from error
        self.checkpointer.maybe_wait_for_saving()
        self.metrics_processor.show_end(self.step, self.config.dump_folder)
        checkpoint = self.config.checkpoint
        saves = checkpoint.enable and not checkpoint.load_only
        if self.step < self.config.training.steps and self.stop.stopping:
            off = "load_only = true" if checkpoint.enable else "enable = false"
            saved = "saved; the same command with --checkpoint.load latest continues"
            outcome = saved if saves else f"nothing is saved (checkpoint.{off})"
            print_on_rank0(f"stopped after step {self.step} of {self.config.training.steps}: {outcome}")
        elif saves and not checkpoint.last_save_in_hf:
            folder = quote(self.config.dump_folder)
            held_out = self.config.validator.enable and isinstance(self.dataloader, PackedDataLoader)
            evaluate = f"; titan-muon evaluate {folder}" if held_out else ""
            print_on_rank0(f"next: titan-muon sample {folder}{evaluate}")

    def _begin_checks(self) -> None:
        if not isinstance(self.dataloader, PackedDataLoader):
            return
        start = self.dataloader.blocks * self.config.training.seq_len - self.tokens
        excluded = {"dataloader", "train_state"} & set(self.config.checkpoint.excluded)
        if self.step == 0 or excluded:
            self.data_start = start
        elif start != self.data_start:
            raise RunFault(
                f"the data stands {start - self.data_start:+} tokens from where step {self.step} ended. Continue from "
                "another checkpoint (checkpoint.load_step), or set checkpoint.exclude_from_loading = "
                '["dataloader"] to start the data from its beginning.'
            )

    def _place(self) -> tuple[int, int]:
        if not isinstance(self.dataloader, PackedDataLoader):
            return UNKNOWN, UNKNOWN
        first = (self.tokens + self.data_start) // self.config.training.seq_len
        parallelism = self.config.parallelism
        # A pipeline cuts a pass.
        piped = parallelism.pipeline_parallel_degree > 1
        batch = parallelism.pipeline_parallel_microbatch_size if piped else self.config.training.local_batch_size
        dims = self.parallel_dims
        data_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
        return self.dataloader.position, first + data_rank * batch

    def _warn(self, lines: Iterable[str]) -> None:
        for line in lines:
            if self.metrics_processor.is_reporter:
                show(f"warning: {line}")

    def should_continue_training(self) -> bool:
        """Called before each step, after the last one was saved and validated."""
        self._check_validation()
        self.metrics_processor.resume()
        return super().should_continue_training() and not self.stop.stopping

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        self.stop.begin_step()
        self.reported = self.metrics_processor.should_log(self.step)
        self.checks.begin_step(self._place() if self.reported else None)
        with compat.clipping_by(self._clip_gradients), compat.reporting_every_loss():
            super().train_step(data_iterator)
        if self.reported:
            self._check_reported()
        if self.config.check_replicas_freq > 0 and self.step % self.config.check_replicas_freq == 0:
            self._check_replicas()
        # TorchTitan saves before the validation, so that a failed or interrupted validation loses no step.
        self.stop.end_step()
        self.metrics_processor.advance(self.step)
        self.metrics_processor.pause()

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        batches = super().batch_generator(data_iterable)
        while True:
            with self.timers["data"]:
                batch = next(batches)
            yield batch

    def forward_backward_step(self, **microbatches: Any) -> torch.Tensor:
        """TorchTitan's forward and backward."""
        with self.timers["forward_backward"]:
            return super().forward_backward_step(**microbatches)

    def _clip_gradients(self) -> torch.Tensor:
        with self.timers["clip"]:
            grad_norm = self.clip()
            norm = NormCheck(grad_norm, self.checks.names, self.clip.local_norms)
            # Otherwise a norm that is not finite ends the run without a save of the step. So the step need not be
            # undone, which would take a launch for each piece of a matrix.
            if self.checks.tolerates_nonfinite:
                self.optimizers.skip_unless_finite(norm)
            self._warn(self.checks.after_clip(self.step, norm))
        # The schedule changes the rates before the report.
        self.rates = self.optimizers.learning_rates()
        # A hook of the optimizers ends this phase.
        self.timers["optimizer"].mark()
        return grad_norm

    @torch.no_grad()
    def check_before_save(self) -> None:
        """Raise FloatingPointError on all ranks for a gradient of Muon that is not finite, or a weight that is not
        finite or above LARGEST_WEIGHT; RunFault for replicas that differ."""
        self._warn(self.checks.check_norm())
        self.optimizers.check_last_step()
        self._check_replicas()
        local_parts = {name: local(parameter) for name, parameter in self.optimizers.named_parameters.items()}
        shards = {name: shard for name, shard in local_parts.items() if shard.numel() > 0}
        # A rank may have only empty shards.
        norms = torch._foreach_norm([torch.zeros(1, device=self.device), *shards.values()], math.inf)
        largest = torch.stack([norm.to(self.device, torch.float64) for norm in norms])
        # The comparison is false for NaN.
        largest = largest.where(largest <= LARGEST_WEIGHT, math.inf)
        everywhere = largest.max()
        dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
        causes = NormCheck(everywhere, [*shards], largest[1:]).causes()
        if causes is not None:
            raise FloatingPointError(
                f"step {self.step}: weights are not finite or larger than {LARGEST_WEIGHT:g} ({causes}), and nothing "
                f"is saved from this step. {ADVICE} If a rank is named again, test its memory."
            )

    def _check_replicas(self) -> None:
        """Raise RunFault on all ranks if replicas of weights, states or hyperparameters differ."""
        if self.step == self.compared:
            return
        self.compared = self.step
        # The cause comes before its consequences.
        self._warn(self.checks.check_norm())
        try:
            self.optimizers.check_replicas()
        except ValueError as error:
            raise RunFault(f"step {self.step}: {error}") from error

    def _max_over_ranks(self, value: float) -> float:
        largest = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest.item())

    def measure(self) -> dict[str, Any]:
        """Values of a logged step; `phases` in seconds since the last one, and memory as their peak of all ranks."""
        record: dict[str, Any] = {"lr": self.rates}
        if self.qk_clip is not None:
            record["qk"] = asdict(self.qk_clip.report())
        peak = self.metrics_processor.device_memory_monitor.get_peak_stats()
        record["memory_gib"] = self._max_over_ranks(peak.max_reserved_gib)
        record["phases"] = {name: timer.take() for name, timer in self.timers.items()}
        return record

    def _check_validation(self) -> None:
        """Raise FloatingPointError on all ranks for a new held-out loss that is not finite."""
        loss, step = self.metrics_processor.validation or (math.nan, -1)
        if step != self.step:
            return
        self._warn(self.checks.check_norm())
        if self._max_over_ranks(not math.isfinite(loss)) > 0:
            raise FloatingPointError(
                f"step {self.step}: the loss on the held-out text is not finite; training cannot go on. {ADVICE}"
            )

    def _check_reported(self) -> None:
        """Raise FloatingPointError on all ranks for a loss or a gradient norm that is not finite; compare the ranks."""
        assert self.metrics_processor.losses is not None, "TorchTitan logs a reported step"
        loss, grad_norm = self.metrics_processor.losses
        if math.isfinite(loss):
            self._warn(self.checks.check_norm())
        if not math.isfinite(loss + grad_norm):
            raise FloatingPointError(
                f"step {self.step}: the loss is {loss} and the norm of the gradients {grad_norm}; training cannot go "
                f"on. {ADVICE}"
            )
        self._warn(self.checks.report(self.step))
