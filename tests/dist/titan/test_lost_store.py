"""A rank with a lost, stopped or unreachable store ends in time with an error, except after training."""

import os
import signal
import socket
import subprocess
import sys
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


UNDER_TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
CASES = (
    (signal.SIGKILL, 1, "rank 1 ends: the process with the job's store is gone", "training", {}),
    (signal.SIGSTOP, 1, "rank 1 ends: no answer from the job's store", "training", {}),
    (signal.SIGKILL, 0, "is gone; training ends after this step", "training", UNDER_TORCHRUN),
    (signal.SIGKILL, 0, "", "done", {}),
)
"""Signal to the process with the store; exit code and text of the rank; the rank's role and environment."""


def start(role: str, environment: dict[str, str]) -> "subprocess.Popen[str]":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", RANK, port, role],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_a_lost_store_ends_a_rank_in_time_and_is_named() -> None:
    """A killed store, a stopped store, and a lost launcher; after training there is no error."""
    ranks = [start(role, environment) for *_, role, environment in CASES]
    keepers: list[int] = []
    try:
        for (sent, *_), rank in zip(CASES, ranks, strict=True):
            assert rank.stdout is not None
            keepers.append(int(rank.stdout.readline()))
            os.kill(keepers[-1], sent)
        for (_, code, text, *_), rank in zip(CASES, ranks, strict=True):
            shown = rank.communicate(timeout=60)[0]
            assert rank.returncode == code, shown
            errors = [line for line in shown.splitlines() if line.startswith("error: ")]
            assert len(errors) == bool(text), shown
            assert text in shown
    finally:
        for pid in (*keepers, *(rank.pid for rank in ranks)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
