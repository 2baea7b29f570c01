"""What the launcher says of the world in environment variables, as torch.distributed wants it."""

import os
import socket

from titan_muon.titan.recipe import RecipeError


def describe_world() -> None:
    """Describe a world of one process to torch.distributed, unless a launcher has described one.

    Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (a free port). Raises RecipeError
    in one of several tasks of `srun`.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    # Of the step, not of the job: a shell in an allocation of eight tasks may well train in one process.
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1:
        raise RecipeError(
            f"srun started {tasks} tasks, and none knows of the others: each would train alone. Start one task a node, "
            "and in it `torchrun --nnodes=$SLURM_NNODES --nproc-per-node=gpu --rdzv-backend=c10d "
            "--rdzv-endpoint=FIRST_NODE:29500 train.py ...`, as scripts/slurm.sh does."
        )
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
