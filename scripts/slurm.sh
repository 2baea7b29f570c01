#!/bin/bash
# Trains a recipe on the nodes of a SLURM allocation, one torchrun a node:
#     sbatch --nodes=2 scripts/slurm.sh configs/qwen3_8b_muon.toml [--section.key value ...]
# Each job has runs of its own, so a sweep of jobs gives as many runs. To go on with the runs of job 1234 in a new job:
#     RUN=1234 sbatch --nodes=2 scripts/slurm.sh configs/qwen3_8b_muon.toml [--section.key value ...]
# docs/cluster.md says what the nodes have to share.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Time to finish a step and to save before the limit ends the job; torchrun gets as much below.
#SBATCH --signal=TERM@120

set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: sbatch --nodes=N scripts/slurm.sh RECIPE.toml [--section.key value ...]" >&2
    exit 2
fi

recipe=$1
shift
# Not by `head`: scontrol may then end by SIGPIPE, and this script with it.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_node=${nodes%%$'\n'*}
# A port of the job's own: two jobs may share a node.
port=$((20000 + SLURM_JOB_ID % 10000))

# `latest`: the first start finds no run and begins one, a job that was requeued goes on with it. The name keeps other
# jobs out of it.
name=$(basename "$recipe" .toml)-${RUN:-$SLURM_JOB_ID}
exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=gpu \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first_node:$port" \
    --max-restarts=3 --shutdown-timeout=110 \
    train.py --config "$recipe" --name "$name" --checkpoint.load latest "$@"
