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

    `group`: all ranks, gloo; None for a single process. `on_progress`: called at the beginning and end of a step.
    `stopping`: whether a rank had a request when the last step began; equal on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, on_progress: Callable[[], None] = lambda: None) -> None:
        self.stopping = False
        self.group = group
        self._on_progress = on_progress
        self._name = ""
        self._first = 0.0
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._name:
            self._name, self._first = signal.Signals(number).name, time.monotonic()
            if self.group is None or dist.get_rank(self.group) == 0:
                # Not print(): the signal may have interrupted another print().
                line = f"{self._name}: the run ends after this step or the next; a second signal ends the run at once\n"
                os.write(1, line.encode())
        elif time.monotonic() - self._first > SAME_PRESS_SECONDS:
            self._end_now(number)

    @staticmethod
    def _end_now(number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def begin_step(self) -> None:
        self._on_progress()
        if self.group is not None:
            self._flag.fill_(bool(self._name))
            self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def end_step(self) -> None:
        """Set `stopping`."""
        if self._work is None:
            self.stopping = bool(self._name)
        else:
            self._work.wait()
            self.stopping = bool(self._flag.item())
        self._on_progress()
