"""Sweeps on small cases, and a job of SLURM."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from titan_muon.trainer.commands import start, sweep

ROOT = Path(__file__).parents[3]
DENSE, MOE = (str(ROOT / f"configs/{name}.toml") for name in ("llama_muon", "qwen_moe_muon"))


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Keys of runs of four small steps with checkpoints."""
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text(f"document {index} " * 200)
    keys = {
        "training.steps": "4",
        "training.seq_len": "64",
        "training.global_batch_size": "1",
        "validator.freq": "4",
        "validator.steps": "1",
        "metrics.log_freq": "1",
        "checkpoint.freq": "2",
        "data.source": "files",
        "data.files": str(tmp_path / "*.txt"),
        "data.validation_fraction": "0.3",
        "data.cache": str(tmp_path / "cache"),
        "dump_folder": str(tmp_path / "runs"),
    }
    return [word for key, value in keys.items() for word in (f"--{key}", value)]


def test_a_grid_has_every_recipe_and_value_seed_by_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert start("sweep", [DENSE, MOE, "muon.lr+adamw.lr=1e-3,2e-3", "training.seed=0,1", "--dry-run"]) == 0
    *runs, last = capsys.readouterr().out.splitlines()
    assert last.startswith("8 runs")
    assert runs[0] == "llama_muon muon.lr+adamw.lr=1e-3 training.seed=0"
    assert [run[-1] for run in runs] == ["0"] * 4 + ["1"] * 4
    recipe = sweep.plan([DENSE], ["muon.lr+adamw.lr=3e-3", "training.seed=5"], (), 1)[0].recipe
    assert (recipe.muon.lr, recipe.adamw.lr, recipe.debug.seed, recipe.data.seed) == (3e-3, 3e-3, 5, 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([DENSE, "muon.lrr=1"], "Did you mean muon.lr?"),
        ([DENSE, "muon.lr=1e-3,0.001"], "the same run as llama_muon muon.lr=1e-3"),
        (
            [DENSE, "parallelism.tensor_parallel_degree=1,2", "--nproc", "1"],
            "takes a multiple of 2 processes, and this is 1 process",
        ),
    ],
    ids=["key", "twice", "ranks"],
)
def test_a_bad_sweep_is_refused_before_the_first_run(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("sweep", words) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "[1/" not in output.out


@pytest.mark.slow
def test_a_sweep_continues_after_a_divergence_and_resumes(
    tmp_path: Path, small: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = [DENSE, "muon.lr=1e30,1e-3,2e-3", "training.seed=1", *small]
    assert start("sweep", arguments) == 1
    shown = capfd.readouterr()
    assert "[1/3] llama_muon muon.lr=1e30 training.seed=1: failed with exit code 1" in shown.err
    assert "## Held-out loss" in shown.out or "## Validation loss" in shown.out, "the table of compare"

    # Cut off after the checkpoint of step 2.
    run, other = sweep.plan([DENSE], arguments[1:3], small, 1)[1:]
    folder = run.finished()
    assert folder is not None
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(metrics[:2]) + "\n")
    shutil.rmtree(folder / "checkpoint/step-4")
    assert run.finished() is None
    assert start("sweep", [DENSE, "muon.lr=1e-3,2e-3", *arguments[2:]]) == 0
    assert f"{other.name}: finished before in" in capfd.readouterr().out
    assert run.finished() == folder
    assert (folder / "metrics.jsonl").read_text().count('"loss"') == 4


def slurm(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/slurm.sh with stand-ins for SLURM's commands; `srun` prints its words."""
    for name, program in (("scontrol", "printf 'node7\\nnode8\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        file = folder / name
        file.write_text(f"#!/bin/bash\n{program}\n")
        file.chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "20003", "SLURM_JOB_NUM_NODES": "2"}
    env = {**os.environ, **variables, **more, "PATH": f"{folder}:{os.environ['PATH']}"}
    script = str(ROOT / "scripts" / "slurm.sh")
    return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, env=env, timeout=60)


def test_slurm_starts_a_torchrun_per_node_and_continues_a_named_run(tmp_path: Path) -> None:
    done = slurm(tmp_path, "recipe.toml", "--training.steps", "5")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert {"torchrun", "--nnodes=2", "--rdzv-endpoint=node7:20003"} <= {*words}
    trained = ["train.py", "--config", "recipe.toml", "--name", "recipe-20003", "--checkpoint.load", "latest"]
    assert words[-9:] == [*trained, "--training.steps", "5"]
    assert "recipe-17" in slurm(tmp_path, "folder/recipe.toml", RUN="17").stdout.split()
    assert slurm(tmp_path).returncode == 2, "without a recipe"
