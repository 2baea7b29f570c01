"""Ranges of a step in a profiler's trace, such as "Muon.gather bucket 3"."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

from .gradients import Step
from .stages import Stage, Stages


def profiling() -> bool:
    """Whether a profiler records this thread."""
    # A private name: a record_function takes 9 us of the host without a profiler, and this call 0.05 us.
    return torch.autograd._profiler_enabled()


def trace_range(stage: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """A range of a stage, if a profiler records."""
    if not profiling():
        return nullcontext()
    return record_function(f"Muon.{stage}" if bucket is None else f"Muon.{stage} bucket {bucket}")


def with_ranges(stages: Stages) -> Stages:
    """The stages, each in a range."""
    return Stages(**{name: _with_range(name, stage) for name, stage in stages._asdict().items()})


def _with_range(name: str, stage: Stage) -> Stage:
    def run(bucket: int, step: Step) -> None:
        if not profiling():
            stage(bucket, step)
            return
        with trace_range(name, bucket):
            stage(bucket, step)

    return run
