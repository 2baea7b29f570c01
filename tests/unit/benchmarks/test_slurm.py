"""scripts/slurm.sh: the commands on the nodes of an allocation, with stand-ins for SLURM's commands."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "slurm.sh"


def slurm(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    for name, program in (("scontrol", "printf 'node7\\nnode8\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        file = folder / name
        file.write_text(f"#!/bin/bash\n{program}\n")
        file.chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "20003", "SLURM_JOB_NUM_NODES": "2"}
    env = {**os.environ, **variables, **more, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=env, timeout=60)


def test_slurm_starts_a_torchrun_per_node(tmp_path: Path) -> None:
    done = slurm(tmp_path, "recipe.toml", "--training.steps", "5")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert {"torchrun", "--nnodes=2", "--rdzv-endpoint=node7:20003"} <= {*words}
    trained = ["train.py", "--config", "recipe.toml", "--name", "recipe-20003", "--checkpoint.load", "latest"]
    assert words[-9:] == [*trained, "--training.steps", "5"]


def test_the_variable_run_continues_the_runs_of_an_earlier_job(tmp_path: Path) -> None:
    words = slurm(tmp_path, "folder/recipe.toml", RUN="17").stdout.split()
    assert words[words.index("--name") + 1] == "recipe-17"


def test_a_start_without_a_recipe_prints_the_usage(tmp_path: Path) -> None:
    done = slurm(tmp_path)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr
