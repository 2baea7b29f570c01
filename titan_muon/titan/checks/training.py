"""The checks of a training run, each called by the trainer at its point of a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_muon.titan.checks.curve import Curve, Report
from titan_muon.titan.checks.experts import ExpertLoads
from titan_muon.titan.checks.norms import NormWatch
from titan_muon.titan.checks.ranks import UNKNOWN, RankReport, StepInputs, check_reports, gather, twins

ADVICE = "Lower the learning rates, warm up for longer, or continue from an earlier checkpoint."


@dataclass(frozen=True)
class Place:
    """Where a step must begin to read: the number of the first block of this rank, or UNKNOWN for both."""

    position: int
    expected: int


class TrainingChecks:
    """Compares ranks and watches norms, the curve and experts. Warnings are returned, faults are raised on all ranks.

    Args:
        names: parameters of this rank in the order of the local norms.
        optimizers: optimizers whose steps are counted.
        parts: the model, or the parts of it on this rank.
        device: device of the training.
        data_rank: this rank's place among data-parallel ranks.
        token_group: ranks with different tokens; None for one.
        tolerates_nonfinite: whether a step with a norm that is not finite is passed over with a warning.
    """

    def __init__(
        self,
        names: Sequence[str],
        optimizers: Iterable[Optimizer],
        parts: Sequence[nn.Module],
        device: torch.device,
        *,
        data_rank: int,
        token_group: dist.ProcessGroup | None,
        tolerates_nonfinite: bool,
    ) -> None:
        self._norms = NormWatch(names, device)
        self.experts = ExpertLoads(parts, token_group, device)
        self.data_rank, self._tolerates = data_rank, tolerates_nonfinite
        self._optimizers = list(optimizers)
        self._inputs = StepInputs()
        self._group: dist.ProcessGroup | None = None
        self._curve = Curve()
        self._place = Place(UNKNOWN, UNKNOWN)
        self._taken = [0] * len(self._optimizers)
        self._steps, self._stale, self._twins_named = 0, 0, False
        self.tokens: dict[str, list[int]] = {}
        """Tokens of each expert in the reported step, by layer."""
        for index, optimizer in enumerate(self._optimizers):
            optimizer.register_step_post_hook(lambda *_, index=index: self._count(index))

    def _count(self, index: int) -> None:
        self._taken[index] += 1

    def begin(self, group: dist.ProcessGroup | None, earlier: Iterable[Report]) -> None:
        """Start to train. `group`: all ranks on gloo, None for one process. `earlier`: reports of the run until now."""
        self._group, self._curve = group, Curve(earlier)
        # PyTorch takes a step to make the optimizers' states before it loads them.
        self._steps, self._taken = 0, [0] * len(self._taken)

    def begin_step(self, *, reported: bool, counted: bool, place: Place) -> None:
        """Start a step. `place`: where the rank begins to read. `counted`: whether experts' tokens are counted."""
        self._steps += 1
        if counted:
            self.experts.begin_step()
        if not reported:
            return
        self._place = place
        self._stale = 0
        self._inputs.take()

    def before_backward(self, parameters: Iterable[Tensor]) -> None:
        """Count the parameters that have a gradient before the first backward of a reported step."""
        self._stale = sum(parameter.grad is not None for parameter in parameters)

    def add_inputs(self, inputs: Tensor) -> None:
        """Take a batch of a reported step: token ids, int64 on the CPU."""
        self._inputs.add(inputs)

    def after_clip(self, step: int, norm: Tensor, local_norms: Tensor, *, counted: bool) -> list[str]:
        """Take the norm of a step before the optimizers' step; raises FloatingPointError as `check_norm`."""
        lines = self.check_norm() if self._norms.is_late else []
        self._norms.watch(step, norm, local_norms)
        if not self._norms.is_late:
            lines = self.check_norm()
        if counted:
            self.tokens = self.experts.of_step()
        return lines

    def check_norm(self) -> list[str]:
        """Raise FloatingPointError on all ranks if the norm of a step was not finite, with parameters and ranks."""
        fault = self._norms.fault(self._group)
        if fault is None:
            return []
        if self._tolerates:
            return [fault]
        raise FloatingPointError(f"{fault}; nothing is saved from this step. {ADVICE}")

    def report(self, step: int, loss: float, grad_norm: float) -> tuple[list[str], int | None]:
        """Compare ranks and the curve in a reported step, on all ranks together.

        Returns:
            Warnings, and the last step before training began to look wrong, or None.

        Raises:
            RunFault: on all ranks, as `check_reports`.
        """
        lines = self._curve.add(Report(step, loss, grad_norm))
        sound_until = self._curve.sound_until
        report = RankReport(
            data_rank=self.data_rank,
            position=self._place.position,
            expected=self._place.expected,
            crc=self._inputs.take(),
            extra_steps=next((taken - self._steps for taken in self._taken if taken != self._steps), 0),
            stale_gradients=self._stale,
            sound_until=UNKNOWN if sound_until is None else sound_until,
        )
        self._steps, self._taken = 0, [0] * len(self._taken)
        reports = gather(report, self._group)
        check_reports(step, reports)
        if not self._twins_named and (pair := twins(reports)) is not None:
            self._twins_named = True
            lines.append(f"step {step}: ranks {pair[0]} and {pair[1]} trained on the same tokens")
        lines += self.experts.dead(step, self.tokens)
        latest = max(r.sound_until for r in reports)
        return lines, None if latest == UNKNOWN else latest
