"""Ctrl-C and SIGTERM end a run after the current step, at the same step on every rank.

Every rank starts an all-reduce of a stop flag at the beginning of a step and reads the result at the end.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_PRESS_SECONDS = 2.0
"""Signals within this time count once: terminal, scheduler and torchrun may each forward a Ctrl-C."""


class StopSignals:
    """Context in which Ctrl-C or SIGTERM requests a stop. A second, later signal ends the process at once.

    `group`: all ranks, gloo; None for a single process. `announce`: print the signal. `on_progress`: called at the
    beginning and at the end of a step.
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

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self.name, self._first = signal.Signals(number).name, time.monotonic()
            if self.announce:
                # Not print(): the signal may have interrupted another print().
                line = f"{self.name}: the run ends after this step or the next; a second signal ends the run at once\n"
                os.write(1, line.encode())
        elif time.monotonic() - self._first > SAME_PRESS_SECONDS:
            self._end_now(number)

    @staticmethod
    def _end_now(number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def begin_step(self) -> None:
        self._on_progress()
        self._flag.fill_(bool(self.name))
        if self.group is not None:
            self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def stop_after_step(self) -> bool:
        """Whether any rank had a stop request when this step began."""
        if self._work is not None:
            self._work.wait()
        elif self.group is None:
            self._flag.fill_(bool(self.name))
        self._on_progress()
        return bool(self._flag.item())
