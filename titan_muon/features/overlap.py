"""`overlap`: a pass of the model starts or ends buckets of a step. By default as without overlap."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ..comm.faults import Fault
from ..step.rank import Rank
from ..step.step import MuonStep, Overlap
from ..step.views import BucketViews


class PassOverlap(Overlap):
    """Base of the overlaps: what happens between steps.

    Attributes:
        holds_memory: whether buffers are in use between steps.
    """

    holds_memory = False

    def attach(self, rank: Rank, views: Sequence[BucketViews]) -> None:
        """The tensors of the next steps: at the start, and after storage has moved."""

    def check_scaler(self) -> None:
        """Raise OptionError if a torch.amp.GradScaler cannot scale the gradients."""

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
