"""Warnings for a loss or gradient norm far from the run's earlier reports.

A jump counts only if the loss stays high, because a single odd document triples the loss of a small recipe.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

WINDOW, LOSS_WINDOW = 50, 20
"""Sound reports in a median of norms, and of losses, which fall."""
FEWEST = 5
DEAD, EXPLODING, HIGH = 1e-6, 100, 1.25
"""Norms and losses out of the ordinary, as factors of the median."""
DEVIATIONS = 8
"""A high loss is also this many median absolute deviations above the median."""
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
        self.sound_until: int | None = None

    def add(self, report: Report) -> list[str]:
        """Warnings for a report, once until training recovers."""
        problems = dict(self._problems(report))
        lines = [text for kind, text in problems.items() if text and kind not in self._named]
        self._named |= {kind for kind, text in problems.items() if text}
        # The loss of a model that was reset is no recovery.
        if problems or (self._named and report.loss > max(self._newer_losses(), default=math.inf)):
            self.sound_until = self._sound[-1].step if self._sound else 0
            return lines
        if self._named:
            lines.append(f"step {report.step}: loss and gradient norm look as before again")
        self.sound_until, self._loaded_from, self._named = None, None, set()
        self._sound.append(report)
        return lines

    def _newer_losses(self) -> list[float]:
        """The newer half of the last sound losses, because a young run began with the losses of a new model."""
        losses = [sound.loss for sound in self._sound][-LOSS_WINDOW:]
        return losses[len(losses) // 2 :]

    def _problems(self, report: Report) -> Iterator[tuple[str, str]]:
        """(kind, warning) of each problem; a young problem has an empty warning."""
        step, norm, name = report.step, report.grad_norm, "the norm of all gradients"
        if norm == 0:
            yield "dead", f"step {step}: {name} is 0, so that nothing is learned"
        if len(self._sound) < FEWEST:
            return
        norms = statistics.median(sound.grad_norm for sound in self._sound)
        if 0 < norm < DEAD * norms:
            yield "dead", f"step {step}: {name} fell to {norm:.2e}, from a median of {norms:.2e}"
        if norm > EXPLODING * norms:
            yield "exploding", f"step {step}: {name} rose to {norm:.2e}, from a median of {norms:.2e}"
        yield from self._high_loss(report)

    def _high_loss(self, report: Report) -> Iterator[tuple[str, str]]:
        step, loss = report.step, f"the loss is {report.loss:.4f}"
        resumed, young = self._loaded_from is not None, len(self._sound) < WINDOW
        losses = self._newer_losses() if resumed and young else [sound.loss for sound in self._sound][-LOSS_WINDOW:]
        middle = statistics.median(losses)
        deviation = statistics.median(abs(other - middle) for other in losses)
        limit = HIGH * max(losses) if resumed and young else max(HIGH * middle, middle + DEVIATIONS * deviation)
        self._high = self._high + 1 if report.loss > limit else 0
        above_all = young or report.loss > max(sound.loss for sound in self._sound)
        before = f"the median before was {middle:.4f}"
        if resumed and self._high >= HIGH_REPORTS_RESUMED and above_all:
            where = f"since the checkpoint of step {self._loaded_from} {loss}"
            yield "high", f"step {step}: {where}, and {before}; check that weights and states were loaded"
        elif self._high >= HIGH_REPORTS:
            yield "high", f"step {step}: {loss} and was above {limit:.4f} in the last {self._high} reports; {before}"
        elif self._high:
            # Keeps the loss out of the medians, and the checkpoints before.
            yield "may be high", ""


def reports_of(records: Iterable[Mapping[str, Any]]) -> list[Report]:
    """Reports with finite numbers, from the records of a metrics file."""
    logged = (record for record in records if "loss" in record and "grad_norm" in record)
    finite = (record for record in logged if math.isfinite(record["loss"] + record["grad_norm"]))
    return [Report(record["step"], record["loss"], record["grad_norm"]) for record in finite]
