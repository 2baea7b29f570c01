"""Gloo ranks that stay alive and run one function after another."""

import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.dist.harness import _context


def _work(rank: int, size: int, rendezvous: str, tasks: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=90)
    )
    while True:
        fn, args = pickle.loads(tasks.recv_bytes())
        try:
            answer = True, fn(rank, size, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        # Bytes, because torch would send a tensor by a file of this process.
        tasks.send_bytes(pickle.dumps(answer))


class World:
    """Ranks with one process each, which start with the first run and end with `close` or the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            args = rank, self.size, f"{self._folder.name}/rendezvous", theirs
            process = _context.Process(target=_work, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """The results of `fn(rank, size, *args)`, in rank order.

        Raises AssertionError with the traceback of the first failed rank, or with the ranks that hang. The ranks are
        gone then, because the others wait for the failed one.
        """
        __tracebackhide__ = True
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send_bytes(pickle.dumps((fn, args)))
        try:
            return self._collect(time.monotonic() + timeout)
        except AssertionError:
            self.close()
            raise

    def _collect(self, deadline: float) -> list[Any]:
        __tracebackhide__ = True
        results: dict[int, Any] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} did not finish in time (a hang)"
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    raise AssertionError(f"rank {rank} died without a traceback") from None
                assert succeeded, f"rank {rank} failed:\n{value}"
                results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        if self._ranks:
            self._folder.cleanup()
        self._ranks = []
