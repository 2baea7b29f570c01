"""Ctrl-C and SIGTERM end a run after the current step, at the same step on every rank.

Signals reach the ranks at different times. So every rank starts an all-reduce of "I was asked to stop" when a step
begins and reads it when the step ends: the answer is the same everywhere and has crossed the network meanwhile.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_PRESS_SECONDS = 2.0
"""A terminal, a scheduler and torchrun may each pass on one and the same Ctrl-C; within this time they count once."""


class StopSignals:
    """Context in which Ctrl-C and SIGTERM only ask for an end. A second one, later, ends the process at once.

    Args:
        group: process group of all ranks whose collectives run on the CPU (gloo); None for a single process.
        announce: whether this rank says on the console that it was asked.
        on_progress: called when a step begins, and when it ends.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        announce: bool = True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.group = group
        self.announce = announce
        self._on_progress = on_progress
        self.name = ""
        self._first = 0.0
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self.name, self._first = signal.Signals(number).name, time.monotonic()
            if self.announce:
                # print() is not safe here: the signal may have interrupted another print().
                os.write(
                    1, f"{self.name}: the run ends after this step or the next; another one ends it at once\n".encode()
                )
        elif time.monotonic() - self._first > SAME_PRESS_SECONDS:
            self._end_now(number)

    @staticmethod
    def _end_now(number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def begin_step(self) -> None:
        """Start asking the other ranks; called by every rank when a step begins."""
        self._on_progress()
        self._flag.fill_(bool(self.name))
        if self.group is not None:
            self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def stop_after_step(self) -> bool:
        """Whether any rank had been asked to stop when it began this step; the same answer on every rank."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        elif self.group is None:
            self._flag.fill_(bool(self.name))
        self._on_progress()
        return bool(self._flag.item())
