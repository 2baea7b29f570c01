"""Run a function on several gloo ranks, each a process with one thread, and return the results.

The workers come from a fork server with PyTorch loaded, so a 2-rank test starts in a fraction of a second. An error on
a rank ends the run at once: the traceback becomes the test's failure, and no rank keeps running.
"""

import multiprocessing as mp
import os
import pickle
import queue
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    # In this order: `model.spec` prepares torchtitan for the CPU before its import.
    [
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "titan_muon.titan.model.spec",
        "models",
        "torchtitan.trainer",
        # Without preloading, each rank of each test imports these modules again.
        "pytest",
        "torch.distributed.checkpoint.state_dict",
        "titan_muon.hybrid",
        "titan_muon.owned",
        "titan_muon.titan.run.job",
        "models.deepseek_v3",
        "models.llama3",
        "models.qwen3",
        "tests.reference_muon",
        "tests.dist.small_params",
        # Last, because this module freezes all objects of the modules above.
        "tests.dist.frozen",
    ]
)


def _worker(
    fn: Callable[..., Any], rank: int, world_size: int, rendezvous: str, args: tuple[Any, ...], results: Any
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        # Bytes, because torch would send a tensor by a file of this process, and the file may be gone.
        results.put((rank, True, pickle.dumps(fn(rank, world_size, *args))))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(1)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 180.0) -> list[Any]:
    """The results of `fn(rank, world_size, *args)` on every rank of a gloo world, in rank order.

    `fn` must be a module-level function with picklable results. Raises AssertionError with the traceback of the first
    failed rank, or with the ranks still running after `timeout` seconds (a hang).
    """
    results = _context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        processes = [
            _context.Process(target=_worker, args=(fn, r, world_size, rendezvous, args, results), daemon=True)
            for r in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


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
        assert process.exitcode is not None
        return process.exitcode, shown.read_text()


def _collect(processes: list[Any], results: Any, deadline: float) -> list[Any]:
    outcome: dict[int, Any] = {}
    while len(outcome) < len(processes):
        missing = [r for r in range(len(processes)) if r not in outcome]
        assert time.monotonic() < deadline, f"ranks {missing} did not finish in time (a hang)"
        dead = [r for r in missing if processes[r].exitcode is not None]
        try:
            rank, ok, value = results.get(timeout=2.0 if dead else 0.2)
        except queue.Empty:
            assert not dead, f"rank {dead[0]} died with exit code {processes[dead[0]].exitcode} and no traceback"
            continue
        assert ok, f"rank {rank} failed:\n{value}"
        outcome[rank] = pickle.loads(value)
    return [outcome[r] for r in range(len(processes))]
