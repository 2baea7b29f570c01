"""Names late ranks. A thread of every rank reports progress to the store."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace

import torch.distributed as dist

from titan_muon.trainer.fault import RunFault
from titan_muon.trainer.recipe import RecipeError

# Late ranks are known before 98 % of the time-out. At most a heartbeat per 2.5 s, because all ranks use a single store.
INTERVAL_SHARE, LONGEST_INTERVAL = 1 / 40, 2.5
BEATS_TO_BE_SILENT = 6
SECONDS_TO_NOTICE = 0.5
NAMING_SHARE = 0.8
"""Share of the time-out until late ranks are named, before a collective raises."""


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank."""

    host: str
    pid: int
    stage: int  # number of advances, two per step
    beat: int  # number of heartbeats
    ended: bool = False


class Watchdog:
    """Context in which this rank reports progress and looks for late ranks.

    After an internal error the thread goes on, because processes may hang. Time-outs of collectives in seconds:
    `first_timeout` until the end of the first step.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, *, first_timeout: float, timeout: float) -> None:
        # A wait of the main thread would block the heartbeat on the same connection.
        self._store = dist.PrefixStore("titan_muon/watchdog", store.clone())  # type: ignore[attr-defined]
        self._rank, self._world_size = rank, world_size
        self._first_timeout, self._timeout = first_timeout, timeout
        self._stage, self._beat, self._named_stage = 0, 0, -1
        self._advanced = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._world_size > 1:
            self._report()
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._world_size == 1:
            return
        # Raised by every rank.
        of_all_ranks = isinstance(error, RecipeError | FloatingPointError | RunFault)
        if error is not None and not of_all_ranks:
            self._name_ended_ranks()
            return
        self._closed.set()
        self._thread.join()
        with suppress(RuntimeError):
            self._send(replace(self._heartbeat(), ended=True))

    def advance(self) -> None:
        """Report progress; called by every rank at the beginning and end of a step."""
        self._stage += 1
        self._advanced = time.monotonic()

    @property
    def timeout(self) -> float:
        return self._first_timeout if self._stage < 2 else self._timeout

    @property
    def _interval(self) -> float:
        return min(LONGEST_INTERVAL, INTERVAL_SHARE * self.timeout)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(socket.gethostname(), os.getpid(), self._stage, self._beat)

    def _send(self, heartbeat: Heartbeat) -> None:
        self._store.set(f"rank-{self._rank}", json.dumps(astuple(heartbeat)))

    def _report(self) -> None:
        self._beat += 1
        self._send(self._heartbeat())

    def _watch(self) -> None:
        # Without the store, collectives name their own failure.
        with suppress(RuntimeError):
            while not self._closed.wait(self._interval):
                self._report()
                if time.monotonic() - self._advanced > NAMING_SHARE * self.timeout and self._named_stage != self._stage:
                    self._named_stage = self._stage
                    self._name_late_ranks()

    def _name_late_ranks(self) -> None:
        # 1,000 readers of 1,000 heartbeats would block the store.
        if self._store.add(f"looks-{self._stage}", 1) > 1:
            return
        before = self._heartbeats(range(self._world_size))
        for _ in range(BEATS_TO_BE_SILENT):
            self._closed.wait(self._interval)
            # Other ranks must see this rank alive.
            self._report()
        now = self._heartbeats(range(self._world_size))
        silent = {rank for rank, beat in before.items() if beat == now[rank] and not beat.ended}
        late = late_ranks(now, silent, self._world_size)
        # A late but living rank looks too, at its own stage.
        if late and self._store.add(f"named-{late}", 1) == 1:
            print_error(f"no progress for {time.monotonic() - self._advanced:.0f} s: {late}")

    def _name_ended_ranks(self) -> None:
        """Name ranks of this machine whose processes are gone, because torchrun names none that ended with 0."""
        first = self._rank - int(os.environ.get("LOCAL_RANK", self._rank))
        local = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size)))
        with suppress(RuntimeError):
            # A process exists until torchrun notices its end.
            time.sleep(SECONDS_TO_NOTICE)
            found, host = sorted(self._heartbeats(local).items()), socket.gethostname()
            ended = [(rank, beat.pid) for rank, beat in found if beat.host == host and not is_running(beat.pid)]
            if ended and self._store.add(f"ended-{ended}", 1) == 1:
                gone = ", ".join(f"rank {rank} (process {pid} on {host})" for rank, pid in ended)
                print_error(f"{gone} ended before this rank failed")

    def _heartbeats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        keys = {rank: f"rank-{rank}" for rank in ranks}
        sent = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        return {rank: Heartbeat(*json.loads(heartbeat)) for rank, heartbeat in sent.items()}


def is_running(pid: int) -> bool:
    """Whether a process of this machine exists."""
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def late_ranks(heartbeats: Mapping[int, Heartbeat], silent: Collection[int], world_size: int) -> str:
    """Text about silent ranks and ranks behind the furthest rank; empty without any."""
    furthest = max((heartbeat.stage for heartbeat in heartbeats.values()), default=0)
    late = [f"rank {rank} has not come up" for rank in range(world_size) if rank not in heartbeats]
    for rank, heartbeat in sorted(heartbeats.items()):
        where = f"rank {rank} (process {heartbeat.pid} on {heartbeat.host})"
        if rank in silent:
            late.append(f"{where} gives no sign of life")
        elif heartbeat.stage < furthest and not heartbeat.ended:
            action = "ended" if heartbeat.stage % 2 else "begun"
            late.append(f"{where} has not {action} step {heartbeat.stage // 2 + 1} of this attempt")
    return ", ".join(late)


def print_error(text: str) -> None:
    """Print an error of this rank, also from a thread."""
    print(f"error: {text}", file=sys.stderr, flush=True)
