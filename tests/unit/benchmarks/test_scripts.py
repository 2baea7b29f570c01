"""Scripts on small cases: sweeps, a soak test, finetuning, and a job of SLURM."""

import fcntl
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Python finds the neighbours of a script here.
sys.path.insert(0, str(ROOT / "scripts"))

import sweep  # noqa: E402
from compare import sweep_report  # noqa: E402
from compare.sweep_report import Header, Result  # noqa: E402

from scripts import soak  # noqa: E402
from tests import tiny  # noqa: E402

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
    assert sweep.main([DENSE, MOE, "muon.lr+adamw.lr=1e-3,2e-3", "training.seed=0,1", "--dry-run"]) == 0
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
    assert sweep.main(words) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert "[1/" not in output.out


@pytest.mark.slow
def test_a_sweep_continues_after_a_divergence_and_resumes(
    tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = [DENSE, "muon.lr=1e30,1e-3", "training.seed=1", "--out", str(tmp_path / "out"), *small]
    assert sweep.main(arguments) == 1
    assert "[1/2] llama_muon muon.lr=1e30 training.seed=1: failed: " in capsys.readouterr().out
    diverged, finished = json.loads((tmp_path / "out/sweep.json").read_text())["results"]
    assert "Lower the learning rates" in diverged["error"]
    assert (finished["error"], finished["tokens"], list(finished["val_loss"])) == (None, 256, ["4"])
    assert 0 < finished["optimizer_seconds"] < finished["step_seconds"]
    page = (tmp_path / "out/sweep.md").read_text()
    assert "| llama_muon | 1e30 | 0, 1 failed | - | - | - |" in page
    assert f"| llama_muon | 1e-3 | 1 | **{finished['val_loss']['4']:.3f}** |" in page

    trained: list[str] = []
    train = sweep.train
    monkeypatch.setattr(sweep, "train", lambda run, *others: trained.append(run.name) or train(run, *others))
    assert sweep.main(arguments) == 1
    assert (trained, capsys.readouterr().out.count("in the report before")) == ([], 1)

    # Cut off after the checkpoint of step 2.
    run = sweep.plan([DENSE], arguments[1:3], small, 1)[1]
    folder = run.folder()
    assert folder is not None
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(metrics[:2]) + "\n")
    os.rename(folder / "checkpoint/step-4", folder / "cut-off")
    os.rename(tmp_path / "out", tmp_path / "before")
    assert sweep.main(arguments) == 1
    assert "was interrupted in" in capsys.readouterr().out
    assert trained == [run.name]
    assert (folder / "metrics.jsonl").read_text().count('"loss"') == 4
    assert json.loads((tmp_path / "out/sweep.json").read_text())["results"][1]["val_loss"] == finished["val_loss"]

    # Data of a finished run is as good as its folder, but not for a recipe with another value.
    shutil.rmtree(tmp_path / "runs")
    trained.clear()
    assert sweep.main([DENSE, "muon.lr=1e-3", "training.seed=1", *arguments[3:]]) == 0
    assert trained == []
    assert sweep.main([DENSE, "muon.lr=1e-3", "training.seed=2", *arguments[3:]]) == 0
    assert len(trained) == 1


def test_a_run_trained_by_a_second_sweep_is_skipped(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = sweep.plan([DENSE], ["muon.lr=1"], small, 1)
    run.log.parent.mkdir(parents=True)
    with run.log.open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert sweep.main([DENSE, "muon.lr=1", "--out", str(tmp_path / "out"), *small]) == 1
    assert f"muon.lr=1: failed: another process trains this run ({run.log})" in capsys.readouterr().out


def results(recipe: str, best: float) -> list[Result]:
    """Two seeds at three rates; the loss is least at the rate `best`."""
    found = []
    for rate, seed in itertools.product((1e-3, 1e-2, 1e-1), (0, 1)):
        losses = {step: 3 / step + abs(math.log10(rate / best)) + 0.1 * seed for step in range(5, 21, 5)}
        keys = {"muon.lr": str(rate)}, {"training.seed": str(seed)}
        found.append(Result(recipe, {}, *keys, None, 8, 0.1 + 0.02 * seed, losses, losses))
    return found


def test_a_report_has_means_over_seeds_and_the_best_rate_of_every_recipe(tmp_path: Path) -> None:
    header = Header("python scripts/sweep.py", "2026-01-01", "abc", "2.13.0", "x86_64, 2 CPU cores", 12, 1)
    text = sweep_report.write_report(tmp_path, header, [*results("a", 1e-2), *results("b", 1e-1)])
    assert "| a | 0.01 | 2 | **0.200 ± 0.071** | 0.200 ± 0.071 | 0.110 ± 0.014 |" in text
    assert "| b | 0.1 | 2 | **0.200 ± 0.071** |" in text
    assert text.count("**") == 4
    assert (tmp_path / "sweep.png").is_file()


def test_a_damaged_report_of_a_sweep_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.json"
    file.write_text('{"results": [{"recipe": ')
    assert sweep_report.finished_results(tmp_path) == []
    assert f"warning: {file} is damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_run_has_the_losses_of_an_undisturbed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 steps, with a kill and a checkpoint every 2 steps."""
    recipe = tiny.write_recipe(tmp_path)
    words = ("--steps=6", "--kills=1", "--minutes=8", f"--config={recipe}", f"--folder={tmp_path / 'soak'}")
    keys = ("--checkpoint.freq=2", "--model.name=llama3", "--model.flavor=tiny", "--muon.expert.ns_dtype=float32")
    code = soak.main([*words, "--", *keys])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "6 steps undisturbed" in shown.out
    assert "6 steps with 1 kills" in shown.out
    (killed,) = (tmp_path / "soak").glob("*/killed")
    assert len(list(killed.rglob("metrics.jsonl"))) == 1, "a restart continues in the folder of the run"


def test_different_losses_memory_growth_and_exit_codes_are_problems_of_a_soak() -> None:
    losses = {step: 1 / step for step in range(1, 401)}
    sound = soak.Soak(losses=losses, memory={step: [1000.0] * 2 for step in losses}, code=0)
    assert soak.problems(sound, sound, 100) == []
    growing = soak.Soak(losses=losses, memory={step: [1000 + step / 4] * 2 for step in losses}, code=0)
    other = soak.Soak(losses=losses | {7: 0.5}, memory=sound.memory, code=1)
    ended, differ, grows = soak.problems(growing, other, 100)
    assert ended == "the killed run ended with exit code 1"
    assert differ.startswith("1 of 400 losses differ, the first in step 7")
    assert grows.startswith("memory grows by")


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
