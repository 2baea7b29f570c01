"""`titan-muon compare` on synthetic runs, sweeps on small cases, and a job of SLURM."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from titan_muon.trainer.commands import records, start, sweep

ROOT = Path(__file__).parents[3]
DENSE, MOE = (str(ROOT / f"configs/{name}.toml") for name in ("llama_muon", "qwen_moe_muon"))
RECIPE = """
[muon]
lr = {lr}
[debug]
seed = {seed}
[[optimizer.rule]]
match = "*"
optimizer = "{optimizer}"
"""
Capture = pytest.CaptureFixture[str]


def write_run(
    folder: Path, end: float = 2.0, steps: Iterable[int] = range(1, 101), *, tokens: int = 2048, **keys: Any
) -> Path:
    """A run whose loss falls from 6 to `end` over 100 steps of `tokens` tokens."""
    time = {"forward_backward": 0.02, "clip": 0.004, "optimizer": 0.01, "step": 0.04}
    records = []
    for s in sorted(steps):
        loss = 6 - (6 - end) * s / 100
        measured = {"tokens_per_second": 100 / end, "lr": {"muon": 0.1}, "memory_gib": 1.5, "mfu": 0.4, "time": time}
        records.append({"step": s, "loss": loss, "seconds": s * 0.04, "tokens": s * tokens} | measured)
        if s % 50 == 0:
            bits = {"val_loss": loss + 1, "bits_per_byte": (loss + 1) / math.log(2)}
            records.append({"step": s, "tokens": s * tokens, "seconds": 99.0} | bits)
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE.format(**({"lr": 0.01, "seed": 0, "optimizer": "muon"} | keys)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    fast = write_run(tmp_path / "runs/fast/t1")
    return [fast, write_run(tmp_path / "runs/slow/t1", 2.5, lr=0.02, optimizer="adamw")]


def sections(capsys: Capture, *arguments: object) -> dict[str, Any]:
    """What a comparison prints: by title the text, and by title and first cell the cells of a row."""
    assert start("compare", [str(argument) for argument in arguments]) == 0
    _, *printed = capsys.readouterr().out.split("\n## ")
    found: dict[str, Any] = dict(section.rstrip().split("\n\n", 1) for section in printed)
    for title, text in [*found.items()]:
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
        found |= {f"{title}: {row[0].strip()}": [cell.strip() for cell in row[1:]] for row in reversed(rows)}
    return found


def test_the_report_compares_recipe_losses_and_speed_with_the_first_run(pair: list[Path], capsys: Capture) -> None:
    found = sections(capsys, *pair)
    assert (
        found.items()
        >= {
            "Recipe: muon.lr": ["0.01", "0.02"],
            "Training loss: 100": ["2.0000", "2.5000 (+0.5000)"],
            "Validation loss: 50": ["5.0000", "5.2500 (+0.2500)"],
            "Bits per byte: 100": ["4.3281", "5.0494 (+0.7213)"],
            # The mean of five steps reaches a loss two steps later.
            "Training loss to reach: 2.5700 (last of slow)": ["88", "100 (1.14x)"],
            "Speed: tokens/s": ["50", "40 (0.80x)"],
        }.items()
    )
    assert "debug.seed" not in found["Recipe"], "an equal key"


def test_runs_of_other_batch_sizes_are_warned_about(tmp_path: Path, capsys: Capture) -> None:
    runs = [write_run(tmp_path / "a/t", 4.0), write_run(tmp_path / "b/t", 5.0, tokens=1024)]
    (runs[0] / "run.json").write_text('{"id": "a", "typed": [], "world": 2}')
    found = sections(capsys, *runs)
    assert found["Recipe: tokens a step"] == ["2,048", "1,024"]
    assert found["Recipe: ranks"] == ["2", "-"], "a run of version 0.2 has no record of its ranks"
    assert "Warning: the runs do not train on the same tokens in a step" in found["Recipe"]


def test_runs_with_different_seeds_are_a_mean_curve_with_a_band(tmp_path: Path, capsys: Capture) -> None:
    paths = [write_run(tmp_path / f"x/t{s}_muon.lr=0.01,debug.seed={s}", 2.0 + s, seed=s) for s in (0, 1, 2)]
    paths.append(write_run(tmp_path / "x/t_muon.lr=0.1,debug.seed=0", 5.0, lr=0.1))
    mean, single = records.read_runs(paths, "loss")
    assert (mean.label, mean.seeds, single.label) == ("muon.lr=0.01 (3 seeds)", 3, "muon.lr=0.1")
    assert (mean.of("loss")[100], mean.spread["loss"][100]) == (3.0, 1.0)
    assert sections(capsys, *paths)["Training loss: ± over seeds"] == ["1.0000", "-"]


def test_runs_without_a_step_and_torn_lines_are_passed_over(pair: list[Path], tmp_path: Path, capsys: Capture) -> None:
    with (pair[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "lo\n{"step": 102, "lo')
    (pair[0].parent / "t2").mkdir()
    (pair[0].parent / "latest").write_text("t1")
    picture = tmp_path / "curves.svg"
    words = [*map(str, pair), str(pair[0].parent / "t2"), "--output", str(picture), "--metric", "bits_per_byte"]
    assert start("compare", words) == 0
    shown = capsys.readouterr()
    assert "t2: passed over" in shown.err
    assert "metrics.jsonl: left out the damaged line 103\n" in shown.err
    assert picture.read_text().startswith("<?xml")


REFUSALS = [
    # Command, arguments, and the error. {0} and {1} are runs.
    ("compare", "{0}", "a comparison takes two or more runs, not 1"),
    ("compare", "{0} {root}/absent", "absent: no such folder"),
    ("compare", "{0} {broken}", "recipe.toml: not valid TOML"),
    ("compare", "{0} {odd}", "no step at which each of them recorded `loss`"),
    ("compare", "{0} {1} --output {root}/c.pdf", "the suffix must be .png or .svg"),
    ("sweep", "{dense} muon.lrr=1", "Did you mean muon.lr?"),
    ("sweep", "{dense} muon.lr=1e-3,0.001", "the same run as llama_muon muon.lr=1e-3"),
    ("sweep", "{dense} parallelism.tensor_parallel_degree=1,2 --nproc 1", "takes a multiple of 2 processes, and this"),
]


@pytest.mark.parametrize(("command", "words", "says"), REFUSALS, ids=[says[:30] for *_, says in REFUSALS])
def test_a_wrong_command_is_refused_in_a_line(
    command: str, words: str, says: str, pair: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    named = {"broken": write_run(tmp_path / "broken/t"), "odd": write_run(tmp_path / "odd/t", steps=[201, 203])}
    (named["broken"] / "recipe.toml").write_text("[muon\n")
    assert start(command, words.format(*pair, **named, root=tmp_path, dense=DENSE).split()) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert "Traceback" not in shown.err
    assert command == "sweep" or (shown.err.startswith("compare: ") and shown.err.count("\n") == 1)
    assert "[1/" not in shown.out, "no run has started"


def test_the_script_runs_by_path_without_torch(pair: list[Path], tmp_path: Path) -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); assert 'torch' not in sys.modules"
    scripts = ROOT / "scripts"
    script, environment = str(scripts / "compare_runs.py"), {"PYTHONPATH": str(scripts), "PATH": ""}
    subprocess.run([sys.executable, "-c", code, script], check=True, cwd=tmp_path, env=environment)
    subprocess.run([sys.executable, script, *map(str, pair)], check=True, cwd=scripts, capture_output=True)
    assert (tmp_path / "runs/compare.png").is_file(), "in the folder that has all runs"


def test_a_grid_has_every_recipe_and_value_seed_by_seed(capsys: Capture) -> None:
    assert start("sweep", [DENSE, MOE, "muon.lr+adamw.lr=1e-3,2e-3", "training.seed=0,1", "--dry-run"]) == 0
    *runs, last = capsys.readouterr().out.splitlines()
    assert last.startswith("8 runs")
    assert runs[0] == "llama_muon muon.lr+adamw.lr=1e-3 training.seed=0"
    assert [run[-1] for run in runs] == ["0"] * 4 + ["1"] * 4
    recipe = sweep.plan([DENSE], ["muon.lr+adamw.lr=3e-3", "training.seed=5"], (), 1)[0].recipe
    assert (recipe.muon.lr, recipe.adamw.lr, recipe.debug.seed, recipe.data.seed) == (3e-3, 3e-3, 5, 5)


def test_a_stopped_run_did_not_fail_and_the_sweep_says_how_to_go_on(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.run", lambda command, check: subprocess.CompletedProcess(command, 0))
    assert start("sweep", [DENSE, "muon.lr=1e-3", "--dump_folder", str(tmp_path)]) == 1
    assert "[1/1] llama_muon muon.lr=1e-3: stopped; repeat it to go on" in capsys.readouterr().err


SMALL = "--training.steps 4 --training.global_batch_size 1 --validator.freq 4 --checkpoint.freq 2 --dump_folder"


@pytest.mark.slow
def test_a_sweep_continues_after_a_divergence_and_resumes(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [*SMALL.split(), str(tmp_path / "runs"), *tiny.small_words(tmp_path)]
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
