"""Who starts and who ends a bucket, if not the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ..comm.faults import Fault
from ..step.gradients import StepGradients
from ..step.rank import Rank
from ..step.step import Bucket, MuonStep
from ..step.views import BucketViews


class Overlap:
    """By default as without overlap.

    `holds_memory`: whether buffers are in use between steps.
    """

    holds_memory = False

    def attach(self, rank: Rank, views: Sequence[BucketViews]) -> None:
        """The tensors of the next steps: at the start, and after storage has moved."""

    def start(self, muon: MuonStep, views: BucketViews, gradients: StepGradients) -> Bucket:
        """The bucket, before Act.GATHER."""
        return muon.bucket(views, gradients)

    def begin(self, gradients: StepGradients) -> None:
        """Before the first bucket of a step."""

    def end(self) -> None:
        """After the last act of a step."""

    def keeps(self, index: int, running: dict[int, Bucket]) -> bool:
        """Whether the bucket stays suspended at Act.APPLY, and so leaves `running`."""
        return False

    def ready(self, muon: MuonStep) -> None:
        """Finish or drop what is in flight, before a step. Raises ValueError on all ranks if no step is possible."""

    def faults(self, faults: list[Fault]) -> list[Fault]:
        """The faults by parameter, with those of gradients that changed since backward."""
        return faults

    def on_faults(self) -> None:
        """Some parameter has a fault, so the step may raise."""

    def backward(self, muon: MuonStep) -> AbstractContextManager[None]:
        """Context of the last backward before a step."""
        return nullcontext()

    def finish(self) -> None:
        """End the buckets of the last step."""

    def drop(self, muon: MuonStep) -> None:
        """Drop the gathers of a backward. Collective."""
