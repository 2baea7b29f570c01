"""Names the rank that the others wait for, and ends processes that nothing else would end.

Every rank tells the store, in the background, how far it has come. A collective that waits does not say for whom, and a
process that is stopped, or whose peers are gone, may never end by itself.
"""

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from titan_muon.titan.recipe import RecipeError

# Of the time-out a fortieth, and six of them to be silent: who is late is known before 98 % of it are over, and so is
# ended by the peers' errors. All ranks of a cluster ask one store, hence not much more often.
INTERVAL_SHARE, LONGEST_INTERVAL = 1 / 40, 2.5
BEATS_TO_BE_SILENT = 6
NAMING_SHARE = 0.8
"""Share of the time-out after which late ranks are named: before a collective raises, or NCCL ends the process."""
GRACE_SECONDS = 2.0
"""What a process has beyond the time-out, or a peer's failure, to end by an error: it says more than the watchdog's."""
FAILED = "failed"
"""Key that is there once a rank has failed."""


@dataclass(frozen=True)
class Sign:
    """What a rank says of itself.

    Attributes:
        host: its host.
        pid: its process.
        stage: how often it has moved on: twice a step, at its begin and at its end.
        beat: how often it has said so.
        ended: whether it has nothing left to do.
    """

    host: str
    pid: int
    stage: int
    beat: int
    ended: bool = False

    def encode(self) -> str:
        """The text that the store keeps."""
        return f"{self.host} {self.pid} {self.stage} {self.beat} {int(self.ended)}"

    @classmethod
    def decode(cls, text: str) -> "Sign":
        """The sign of a text."""
        host, pid, stage, beat, ended = text.split()
        return cls(host, int(pid), int(stage), int(beat), ended == "1")


class Watchdog:
    """Context in which this rank tells how far it has come, and looks for those that others wait for.

    It goes on after an error that no user made: that one may leave this process, or others, without an end.

    Args:
        store: store of all ranks; a connection of its own is made to it.
        rank: this rank.
        world_size: number of ranks.
        first_timeout: seconds that collectives wait until the first step is done.
        timeout: seconds that they wait after it.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, *, first_timeout: float, timeout: float) -> None:
        # A connection serves one request at a time: what the main thread waits for must not silence this one.
        self._store = dist.PrefixStore("titan_muon/watchdog", store.clone())  # type: ignore[attr-defined]
        self._rank, self._world_size = rank, world_size
        self._first_timeout, self._timeout = first_timeout, timeout
        self._stage, self._beat, self._moved, self._named = 0, 0, time.monotonic(), -1
        self._failing, self._peer_failed = False, math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._world_size > 1:
            self._tell()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._world_size == 1:
            return
        if error is not None:
            self._failing = True
            with suppress(RuntimeError):
                self._store.set(FAILED, str(self._rank))
        if not (error is None or isinstance(error, RecipeError | FloatingPointError)):
            with suppress(RuntimeError):
                self._end_silent()
            return
        self._closed.set()
        self._thread.join()
        # The process that keeps the store may have ended before this one.
        with suppress(RuntimeError):
            self._store.set(_key(self._rank), replace(self._sign(), ended=True).encode())

    def advance(self) -> None:
        """Say that this rank has moved on; every rank does so when a step begins, and when it ends."""
        self._stage += 1
        self._moved = time.monotonic()

    @property
    def timeout(self) -> float:
        """Seconds that collectives wait now."""
        return self._first_timeout if self._stage < 2 else self._timeout

    @property
    def _interval(self) -> float:
        return min(LONGEST_INTERVAL, INTERVAL_SHARE * self.timeout)

    def _sign(self) -> Sign:
        return Sign(socket.gethostname(), os.getpid(), self._stage, self._beat)

    def _tell(self) -> None:
        self._beat += 1
        self._store.set(_key(self._rank), self._sign().encode())

    def _watch(self) -> None:
        try:
            while not self._closed.wait(self._interval):
                self._tell()
                waited = time.monotonic() - self._moved
                if waited > NAMING_SHARE * self.timeout and self._named != self._stage:
                    self._named = self._stage
                    self._name_late_ranks()
                gone = waited > self.timeout + GRACE_SECONDS and self._end_silent()
                if gone or self._outlives_failure():
                    print(f"error: rank {self._rank} ends: its peers are gone", file=sys.stderr, flush=True)
                    os._exit(1)
        except RuntimeError:
            # Whoever keeps the store has ended. Nobody can be watched any more, and collectives fail by themselves.
            return

    def _name_late_ranks(self) -> None:
        # One of those that wait looks: 1,000 ranks that each read 1,000 signs would hold up the store.
        if self._store.add(f"looks-{self._stage}", 1) > 1:
            return
        signs, silent = self._look()
        self._store.set(self._silent_key, " ".join(f"{rank}:{signs[rank].beat}" for rank in silent))
        late = late_ranks(signs, silent, self._world_size)
        # A rank that is late and lives looks as well, from the stage where it is.
        if late and self._store.add(f"named-{late}", 1) == 1:
            waited = time.monotonic() - self._moved
            print(f"error: no progress for {waited:.0f} s: {late}", file=sys.stderr, flush=True)

    def _outlives_failure(self) -> bool:
        """Whether a peer has failed for so long that this rank, if it waited for it, would have failed as well."""
        if self._failing or not self._store.check([FAILED]):
            return False
        # A rank that waits for something else than its peers knows nothing of it, and takes the launcher's SIGTERM for
        # the wish to end after the step: the launcher would wait half a minute for it.
        self._peer_failed = min(self._peer_failed, time.monotonic())
        return time.monotonic() - self._peer_failed > GRACE_SECONDS

    @property
    def _silent_key(self) -> str:
        return f"silent-{self._stage}"

    def _end_silent(self) -> bool:
        """End this host's processes that were found silent, and still are. Returns whether any are, on any host."""
        if not self._store.check([self._silent_key]):
            return False
        found = self._store.get(self._silent_key).decode().split()
        beats = {int(rank): int(beat) for rank, beat in (each.split(":") for each in found)}
        signs = {rank: Sign.decode(self._store.get(_key(rank)).decode()) for rank in beats}
        silent = [sign for rank, sign in signs.items() if sign.beat == beats[rank]]
        for sign in silent:
            # Their launcher sends SIGTERM, which a stopped process does not get, and then waits for half a minute.
            if sign.host == socket.gethostname() and is_sibling(sign.pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(sign.pid, signal.SIGKILL)
        return bool(silent)

    def _look(self) -> tuple[dict[int, Sign], set[int]]:
        """The signs of all ranks that ever gave one, and the ranks of them that give none now."""
        before = self._signs()
        for _ in range(BEATS_TO_BE_SILENT):
            self._closed.wait(self._interval)
            # Whoever looks at this rank meanwhile must find it alive.
            self._tell()
        now = self._signs()
        return now, {rank for rank, sign in before.items() if sign == now[rank] and not sign.ended}

    def _signs(self) -> dict[int, Sign]:
        keys = {rank: _key(rank) for rank in range(self._world_size)}
        return {
            rank: Sign.decode(self._store.get(key).decode()) for rank, key in keys.items() if self._store.check([key])
        }


def is_sibling(pid: int) -> bool:
    """Whether a process was started by this one's launcher, as the other ranks of its node were."""
    # Two containers may have one host name, and the same number there is somebody else's process here.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[1]) == os.getppid()


def late_ranks(signs: Mapping[int, Sign], silent: Collection[int], world_size: int) -> str:
    """Who keeps the others waiting, in words; empty if nobody can be told.

    A rank is late if it gives no sign of life, or is behind the one that came furthest.
    """
    furthest = max((sign.stage for sign in signs.values()), default=0)
    found = [f"rank {rank} has not come up" for rank in range(world_size) if rank not in signs]
    for rank, sign in sorted(signs.items()):
        where = f"rank {rank} (process {sign.pid} on {sign.host})"
        if rank in silent:
            found.append(f"{where} gives no sign of life")
        elif sign.stage < furthest and not sign.ended:
            found.append(f"{where} has not {_stage(sign.stage + 1)}")
    return ", ".join(found)


def _stage(stage: int) -> str:
    # Steps are counted from where this process began, which need not be the first of the run.
    return f"{'begun' if stage % 2 else 'ended'} step {(stage + 1) // 2} of this attempt"


def _key(rank: int) -> str:
    return f"rank-{rank}"
