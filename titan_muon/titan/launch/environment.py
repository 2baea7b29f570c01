"""The launcher's environment variables, as torch.distributed expects them."""

import os

from titan_muon.titan.recipe import RecipeError


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
