"""A rank with a lost, stopped or unreachable store ends in time with an error, except after training."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
TIMEOUT = 3

RANK = f"""
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from titan_muon.titan.launch.watchdog import Watchdog
port, done = int(sys.argv[1]), sys.argv[2] == "done"
keeper = os.fork()
store = dist.TCPStore("localhost", port, is_master=keeper == 0, timeout=timedelta(seconds=30))
if keeper == 0:
    os.close(1), os.close(2)
    time.sleep(60)
    os._exit(0)
def stop(*_):
    print("stopped after this step", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
with Watchdog(store, 1, 2, first_timeout={TIMEOUT}, timeout={TIMEOUT}) as watchdog:
    for _ in range(3):
        watchdog.advance()
    if done:
        watchdog.finish()
    print(keeper, flush=True)
    time.sleep(4 if done else 60)
"""


@dataclass(frozen=True)
class Case:
    """A signal to the process with the store, and how the rank must end."""

    sent: signal.Signals
    code: int
    text: str
    role: str = "training"
    environment: dict[str, str] = field(default_factory=dict)

    def start(self) -> "subprocess.Popen[str]":
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, port, self.role],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


UNDER_TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
CASES = (
    Case(signal.SIGKILL, 1, "rank 1 ends: the process with the job's store is gone"),
    Case(signal.SIGSTOP, 1, "rank 1 ends: no answer from the job's store"),
    Case(signal.SIGKILL, 0, "is gone; training ends after this step", environment=UNDER_TORCHRUN),
    Case(signal.SIGKILL, 0, "", role="done"),
)


def test_a_lost_store_ends_a_rank_in_time_and_is_named() -> None:
    """A killed store, a stopped store, and a lost launcher; after training there is no error."""
    ranks = [case.start() for case in CASES]
    keepers: list[int] = []
    try:
        for case, rank in zip(CASES, ranks, strict=True):
            assert rank.stdout is not None
            keepers.append(int(rank.stdout.readline()))
            os.kill(keepers[-1], case.sent)
        for case, rank in zip(CASES, ranks, strict=True):
            shown = rank.communicate(timeout=60)[0]
            assert rank.returncode == case.code, shown
            errors = [line for line in shown.splitlines() if line.startswith("error: ")]
            assert len(errors) == bool(case.text), shown
            assert case.text in shown
    finally:
        for pid in (*keepers, *(rank.pid for rank in ranks)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
