"""Environment and stores of a job. `torchrun --max-restarts` restarts all processes and keeps its store: an attempt."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

from titan_muon.trainer.recipe import RecipeError

RUN_KEY = "titan_muon/run"
SECONDS_BETWEEN_LOOKS = 0.02


def describe_world() -> None:
    """Set torch.distributed's variables for a single process, unless a launcher has set them.

    Raises RecipeError in an `srun` step with several tasks.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    # Not the job's tasks: a shell in a larger allocation may train in a single process.
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1:
        raise RecipeError(
            f"srun started {tasks} tasks, and every task would train alone. Start one task per node with "
            "`torchrun --nnodes=$SLURM_NNODES --nproc-per-node=gpu --rdzv-backend=c10d "
            "--rdzv-endpoint=FIRST_NODE:29500 train.py ...`, as scripts/slurm.sh does."
        )
    # Asynchronous checkpoints start a process that connects to MASTER_ADDR.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost")


def lasting_store(timeout: timedelta) -> dist.Store | None:
    """Store of torchrun's agent, which outlives this process; None under another launcher."""
    return _connect(timeout) if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else None


def store_of_ranks(timeout: timedelta) -> dist.Store:
    """Store on rank 0 of a job without torchrun's agent. A single process listens on no port."""
    return dist.HashStore() if os.environ.get("WORLD_SIZE") == "1" else _connect(timeout)


def _connect(timeout: timedelta) -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store


def store_of_attempt(lasting: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """New store of the current attempt. Raises TimeoutError, on rank 0 with the missing ranks."""
    meeting = dist.PrefixStore("titan_muon/attempts", lasting)
    number = _gather_ranks(meeting, world_size, timeout) if rank == 0 else _arrive(meeting, rank, timeout)
    return dist.PrefixStore(f"attempt-{number}", lasting)


# Rank 0 numbers the attempt, because TORCHELASTIC_RESTART_COUNT ignores restarts after a fault of another node. An
# attempt's processes end before the next attempt.


def _gather_ranks(meeting: dist.Store, world_size: int, timeout: timedelta) -> int:
    number, answered = meeting.add("number", 1), 0
    deadline = time.monotonic() + timeout.total_seconds()
    while meeting.add(f"{number}/arrived", 0) < world_size - 1:
        # Ended processes get an answer too.
        arrivals = meeting.add("arrivals", 0)
        for place in range(answered + 1, arrivals + 1):
            meeting.set(f"answer-{place}", str(number))
        answered = arrivals
        if time.monotonic() > deadline:
            late = [rank for rank in range(1, world_size) if not meeting.check([f"{number}/rank-{rank}"])]
            raise TimeoutError(f"ranks {late} have not arrived after {timeout.total_seconds():.0f} s")
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return number


def _arrive(meeting: dist.Store, rank: int, timeout: timedelta) -> int:
    place = meeting.add("arrivals", 1)
    try:
        number = int(meeting.get(f"answer-{place}"))
    except dist.DistStoreError as error:
        raise TimeoutError(f"rank 0 has not arrived after {timeout.total_seconds():.0f} s") from error
    meeting.set(f"{number}/rank-{rank}", "")
    meeting.add(f"{number}/arrived", 1)
    return number


def interrupted_run(lasting: dist.Store | None) -> str | None:
    """Run folder of the job's earlier attempt; None in the first attempt."""
    if lasting is None or not lasting.check([RUN_KEY]):
        return None
    return lasting.get(RUN_KEY).decode()


def remember_run(lasting: dist.Store | None, folder: str) -> None:
    """Keep the run folder for a later attempt."""
    if lasting is not None:
        lasting.set(RUN_KEY, folder)
