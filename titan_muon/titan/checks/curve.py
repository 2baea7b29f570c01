"""Warnings for a loss or gradient norm far from the run's earlier reports.

A jump counts only if the loss stays high, because a single odd document triples the loss of a small recipe.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WINDOW, LOSS_WINDOW = 50, 20
"""Reports in a median of norms, and of losses, which fall."""
FEWEST = 5
DEAD_SHARE = 1e-6
EXPLODING = 100
DEVIATIONS = 8
LEAST_RISE = 0.25
"""A loss is high if above the median by DEVIATIONS median absolute deviations and by LEAST_RISE of the median."""
HIGH_REPORTS, HIGH_REPORTS_RESUMED = 10, 3
"""Consecutive high losses until a warning; after the load of a checkpoint, losses above all earlier ones."""


@dataclass(frozen=True)
class Report:
    """Loss in nats per token, and gradient norm."""

    step: int
    loss: float
    grad_norm: float


class Curve:
    """Compares each report with the last sound ones. `earlier`: reports of the run before this process.

    `sound_until`: last step before training began to look wrong; None while training looks right.
    """

    def __init__(self, earlier: Iterable[Report] = ()) -> None:
        self._sound: deque[Report] = deque(earlier, maxlen=WINDOW)
        self._loaded_from = self._sound[-1].step if self._sound else None
        self._high = 0
        self._named: set[str] = set()
        self._last_sound = self._sound[-1].step if self._sound else 0
        self.sound_until: int | None = None

    def add(self, report: Report) -> list[str]:
        """Warnings for a report, once until training recovers."""
        problems = dict(self._problems(report))
        lines = [text for name, text in problems.items() if text and name not in self._named]
        self._named |= {name for name, text in problems.items() if text}
        if problems or (self._named and report.loss > max(self._newer_losses(), default=math.inf)):
            self.sound_until = self._last_sound
        else:
            if self._named:
                lines.append(f"step {report.step}: loss and gradient norm look as before again")
            self.sound_until, self._loaded_from, self._named = None, None, set()
            self._last_sound = report.step
            self._sound.append(report)
        return lines

    def _problems(self, report: Report) -> Iterable[tuple[str, str]]:
        """(kind, warning) of each problem; a young problem has an empty warning."""
        step, norm = report.step, report.grad_norm
        if norm == 0:
            yield "dead", f"step {step}: the norm of all gradients is 0, so that nothing is learned"
        if len(self._sound) < FEWEST:
            return
        norms = statistics.median(sound.grad_norm for sound in self._sound)
        if 0 < norm < DEAD_SHARE * norms:
            yield "dead", f"step {step}: the norm of all gradients fell to {norm:.2e}, from a median of {norms:.2e}"
        if norm > EXPLODING * norms:
            yield (
                "exploding",
                f"step {step}: the norm of all gradients rose to {norm:.2e}, from a median of {norms:.2e}",
            )
        yield from self._high_loss(report)

    def _newer_losses(self) -> list[float]:
        """The newer half of the last sound losses, because a young run began with the losses of a new model."""
        losses = [sound.loss for sound in self._sound][-LOSS_WINDOW:]
        return losses[len(losses) // 2 :]

    def _high_loss(self, report: Report) -> Iterable[tuple[str, str]]:
        losses = [sound.loss for sound in self._sound][-LOSS_WINDOW:]
        middle = statistics.median(losses)
        deviation = statistics.median(abs(loss - middle) for loss in losses)
        limit = middle + max(DEVIATIONS * deviation, LEAST_RISE * middle)
        if self._loaded_from is not None and len(self._sound) < WINDOW:
            middle = statistics.median(self._newer_losses())
            limit = (1 + LEAST_RISE) * max(self._newer_losses())
        self._high = self._high + 1 if report.loss > limit else 0
        above_all = len(self._sound) < WINDOW or report.loss > max(sound.loss for sound in self._sound)
        if self._loaded_from is not None and self._high >= HIGH_REPORTS_RESUMED and above_all:
            yield (
                "high",
                f"step {report.step}: since the checkpoint of step {self._loaded_from} the loss is {report.loss:.4f}, "
                f"and the median before was {middle:.4f}; check that weights and states were loaded",
            )
        elif self._high >= HIGH_REPORTS:
            yield (
                "high",
                f"step {report.step}: the loss is {report.loss:.4f} and was above {limit:.4f} in the last {self._high} "
                f"reports; the median before was {middle:.4f}",
            )
        elif self._high:
            # Keeps the loss out of the medians, and the checkpoints before.
            yield "may be high", ""


def reports_of(records: Iterable[dict[str, Any]]) -> list[Report]:
    """Reports with finite numbers, from the records of a metrics file."""
    reports = []
    for record in records:
        if "loss" in record and "grad_norm" in record and math.isfinite(record["loss"] + record["grad_norm"]):
            reports.append(Report(record["step"], record["loss"], record["grad_norm"]))
    return reports
