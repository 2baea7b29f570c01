"""`titan-muon compare` on synthetic runs: every section, the picture, the page, and every error."""

import json
import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from titan_muon.trainer.commands import records, start

SCRIPTS = Path(__file__).parents[3] / "scripts"

RECIPE = """
[muon]
lr = {lr}
[debug]
seed = {seed}
[[optimizer.rule]]
match = "*"
optimizer = "{optimizer}"
"""
STEPS = range(1, 101)
Table = dict[str, list[str]]


def write_run(
    folder: Path,
    end: float = 2.0,
    steps: Iterable[int] = STEPS,
    *,
    tokens: int = 2048,
    second: float = 0.04,
    **keys: Any,
) -> Path:
    """A run whose loss falls from 6 to `end` over 100 steps of `tokens` tokens and `second` seconds."""
    time = {"forward_backward": 0.02, "clip": 0.004, "optimizer": 0.01, "step": 0.04}
    records = []
    for s in sorted(steps):
        loss = 6 - (6 - end) * s / 100
        measured = {"tokens_per_second": 100 / end, "lr": {"muon": 0.1}, "memory_gib": 1.5, "mfu": 0.4, "time": time}
        records.append({"step": s, "loss": loss, "seconds": s * second, "tokens": s * tokens} | measured)
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


def cells(text: str) -> Table:
    """A Markdown table's rows by the first cell, without the rule below the header."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows if set(row[0]) != {"-"}}


def sections(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, str]:
    """What a comparison prints, by title."""
    assert start("compare", [str(argument) for argument in arguments]) == 0
    _, *printed = capsys.readouterr().out.split("\n## ")
    return dict(section.rstrip().split("\n\n", 1) for section in printed)


def test_the_report_compares_recipe_losses_and_speed_with_the_first_run(
    pair: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = sections(capsys, *pair)
    assert cells(found["Recipe"])["muon.lr"] == ["0.01", "0.02"]
    assert "debug.seed" not in found["Recipe"], "an equal key"
    assert cells(found["Training loss"])["100"] == ["2.0000", "2.5000 (+0.5000)"]
    assert cells(found["Validation loss"])["50"] == ["5.0000", "5.2500 (+0.2500)"]
    assert cells(found["Bits per byte"])["100"] == ["4.3281", "5.0494 (+0.7213)"]
    steps, seconds = found["Training loss to reach"].split("\n\n")[1:]
    # The mean of five steps reaches a loss two steps later.
    assert cells(steps)["2.5700 (last of slow)"] == ["88", "100 (1.14x)"]
    assert cells(seconds)["2.5700 (last of slow)"] == ["3.5", "4.0 (1.14x)"]
    assert cells(found["Speed"])["tokens/s"] == ["50", "40 (0.80x)"]


def test_runs_of_other_batch_sizes_are_compared_by_tokens_and_by_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At equal steps the curves would differ, because a run has seen twice the tokens."""
    runs = [write_run(tmp_path / "a/t", 4.0), write_run(tmp_path / "b/t", 5.0, tokens=1024, second=0.08)]
    (runs[0] / "run.json").write_text('{"id": "a", "typed": [], "world": 2}')
    found = sections(capsys, *runs, "--x", "tokens")
    assert cells(found["Recipe"])["tokens a step"] == ["2,048", "1,024"]
    assert cells(found["Recipe"])["ranks"] == ["2", "-"], "a run of version 0.2 has no record of its ranks"
    assert "Warning: the runs do not train on the same tokens in a step" in found["Recipe"]
    assert cells(found["Training loss"])["102,400"] == ["5.0000", "5.0000 (+0.0000)"]


def test_runs_with_different_seeds_are_a_mean_curve_with_a_band(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_run(tmp_path / f"x/t{s}_muon.lr=0.01,debug.seed={s}", 2.0 + s, seed=s) for s in (0, 1, 2)]
    paths.append(write_run(tmp_path / "x/t_muon.lr=0.1,debug.seed=0", 5.0, lr=0.1))
    mean, single = records.read_runs(paths, "loss")
    assert (mean.label, mean.seeds, single.label) == ("muon.lr=0.01 (3 seeds)", 3, "muon.lr=0.1")
    assert (mean.of("loss")[100], mean.spread["loss"][100]) == (3.0, 1.0)
    assert cells(sections(capsys, *paths)["Training loss"])["± over seeds"] == ["1.0000", "-"]


def test_a_picture_is_a_file(pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.svg"
    words = ["--output", str(picture), "--title", "a < b", "--metric", "bits_per_byte"]
    assert start("compare", [*map(str, pair), *words]) == 0
    assert picture.read_text().startswith("<?xml")
    assert f"Picture: {picture}\n" in capsys.readouterr().out


def test_runs_without_a_step_are_passed_over_and_a_torn_line_is_skipped(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (pair[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "lo\n{"step": 102, "lo')
    (pair[0].parent / "t2").mkdir()
    (pair[0].parent / "latest").write_text("t1")
    assert start("compare", [*map(str, pair), str(pair[0].parent / "t2"), "--output", str(tmp_path / "c.png")]) == 0
    error = capsys.readouterr().err
    assert "t2: passed over" in error
    assert "metrics.jsonl: left out the damaged line 103\n" in error


REFUSALS = {
    "one run": ("{0}", "a comparison takes two or more runs, not 1"),
    "absent folder": ("{0} {root}/absent", "absent: no such folder"),
    "no TOML": ("{0} {broken}", "recipe.toml: not valid TOML"),
    "no common step": ("{0} {odd}", "no step at which each of them recorded `loss`"),
    "suffix": ("{0} {1} --output {root}/c.pdf", "the suffix must be .png or .svg"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_comparison_is_refused_in_one_line(
    case: str, pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, says = REFUSALS[case]
    broken, odd = write_run(tmp_path / "broken/t"), write_run(tmp_path / "odd/t", steps=[201, 203])
    (broken / "recipe.toml").write_text("[muon\n")
    named = {"broken": broken, "odd": odd, "root": tmp_path}
    assert start("compare", words.format(*pair, **named).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("compare: ")
    assert says in error
    assert error.count("\n") == 1


def test_the_script_runs_by_path_without_torch(pair: list[Path], tmp_path: Path) -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); assert 'torch' not in sys.modules"
    script = str(SCRIPTS / "compare_runs.py")
    environment = {"PYTHONPATH": str(SCRIPTS), "PATH": ""}
    subprocess.run([sys.executable, "-c", code, script], check=True, cwd=tmp_path, env=environment)
    subprocess.run([sys.executable, script, *map(str, pair)], check=True, cwd=SCRIPTS, capture_output=True)
    assert (tmp_path / "runs/compare.png").is_file(), "in the folder that has all runs"
