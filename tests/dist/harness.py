"""Run tests and functions on gloo ranks, each a process with one thread.

The workers come from a fork server with PyTorch loaded, so a 2-rank test starts in a fraction of a second. An error on
a rank ends the run at once: the traceback becomes the test's failure, and no rank keeps running.
"""

import functools
import importlib
import inspect
import multiprocessing as mp
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A process that is forked after a look for GPUs cannot use them.
_context = mp.get_context("spawn" if os.environ.get("PARITY_DEVICE") == "cuda" else "forkserver")
_context.set_forkserver_preload(
    # In this order: `model.spec` prepares torchtitan for the CPU before its import.
    [
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "titan_muon.trainer.model.spec",
        "models",
        "torchtitan.trainer",
        # Without preloading, each rank of each test imports these modules again.
        "pytest",
        "torch.distributed.checkpoint.state_dict",
        "titan_muon.hybrid",
        "titan_muon.owned",
        "titan_muon.trainer.run.job",
        "models.deepseek_v3",
        "models.llama3",
        "models.qwen3",
        "tests.reference_muon",
        "tests.dist.small_params",
        # Last, because this module freezes all objects of the modules above.
        "tests.dist.frozen",
    ]
)

SECONDS_AFTER_A_DEATH = 20.0
"""Time for the errors of the surviving ranks."""


def _work(rank: int, size: int, rendezvous: str, tasks: Connection, quiet: bool) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    if quiet:
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
        # Bytes, because torch would send a tensor by a file of this process, and the file may be gone.
        tasks.send_bytes(pickle.dumps(answer))


class World:
    """Gloo ranks that run one function after another.

    They start with the first run and end with `close` or the first failure. `quiet`: they print no warnings.
    """

    def __init__(self, size: int, *, quiet: bool = False) -> None:
        self.size, self._quiet = size, quiet
        self._ranks: list[tuple[Any, Connection]] = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            args = rank, self.size, f"{self._folder.name}/rendezvous", theirs, self._quiet
            process = _context.Process(target=_work, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """The results of `fn(rank, size, *args)`, in rank order.

        `fn` must be a module-level function with picklable results. Raises AssertionError with the traceback of the
        first failed rank, or with the ranks that hang. The ranks are gone then, because the others wait for the failed
        one.
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
        died = list[int]()
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            assert ready or died, f"ranks {sorted(waiting.values())} did not finish in time (a hang)"
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    # The traceback of another rank says more.
                    died.append(rank)
                    deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_DEATH)
                    continue
                assert succeeded, f"rank {rank} failed:\n{value}"
                results[rank] = value
        assert not died, f"rank {died[0]} died without a traceback"
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        if self._ranks:
            self._folder.cleanup()
        self._ranks = []


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180.0) -> list[Any]:
    """The results of `fn(rank, world_size, *args)` on every rank of a new world, as `World.run`."""
    with closing(World(world_size)) as world:
        return world.run(fn, *args, timeout=timeout)


def on_ranks(size: int, timeout: float = 180.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that runs on every rank of a new world: its first argument is the rank, the others are pytest's."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            run_ranks(_body, size, body.__module__, body.__name__, arguments, timeout=timeout)

        declared = inspect.signature(body)
        test.__signature__ = declared.replace(parameters=list(declared.parameters.values())[1:])  # type: ignore[attr-defined]
        return test

    return decorate


def _body(rank: int, size: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(rank, **arguments)


def on_all_ranks(value: Any) -> list[Any]:
    """The values of all ranks, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _program(words: tuple[str, ...], shown: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    output = os.open(shown, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = list(words)
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    else:
        # As Python does for a script.
        sys.path.insert(0, str(Path(words[0]).parent.resolve()))
        runpy.run_path(words[0], run_name="__main__")
    sys.stdout.flush()


def run_program(*words: str, timeout: float = 120.0) -> tuple[int, str]:
    """Run `python WORDS` from the repository's root, without the time of imports. Returns the exit code, and all
    output."""
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder) / "shown"
        process = _context.Process(target=_program, args=(words, str(shown)))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        return process.exitcode, shown.read_text()
