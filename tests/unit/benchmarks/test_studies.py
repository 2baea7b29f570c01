"""scripts/study_rules.py and scripts/finetune.py train small cases, and say what they have found."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import finetune, study_rules
from scripts.study_rules import Arguments, Run

ROOT = Path(__file__).parents[3]


def test_the_final_loss_is_of_the_last_tenth_and_infinite_for_a_run_that_ended_early() -> None:
    run = Run("dense", "muon", 1e-3, 0, (*(9.0,) * 18, 2.0, 4.0))
    assert run.final(20) == 3.0
    assert run.final(21) == math.inf


def test_a_study_has_every_recipe_rule_rate_and_seed() -> None:
    runs = list(study_rules.runs(Arguments(out=Path("results"))))
    assert len(runs) == len({run.key for run in runs}) == 2 * 5 * 4 * 3
    assert {run.contender for run in runs} == {"muon", "normuon", "adamuon", "muonh", "adamw"}


@pytest.mark.parametrize("words", [["--recipes", "dens"], ["--contenders", "sgd"], ["--steps", "5"]], ids=" ".join)
def test_a_study_refuses_what_it_does_not_know(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"choose from|at least"):
        Arguments(
            out=Path("results"),
            **{words[0].removeprefix("--"): int(words[1]) if words[1].isdigit() else (words[1],)},  # type: ignore[arg-type]
        )


def test_a_study_trains_writes_its_page_and_goes_on(tmp_path: Path) -> None:
    size = {"steps": 10, "batch": 1, "seq_len": 32, "seeds": 1}
    words = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    words += ["--recipes", "dense", "--contenders", "muonh", "--data.cache", str(tmp_path / "cache")]
    command = [sys.executable, str(ROOT / "scripts/study_rules.py"), "--out", str(tmp_path), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "rules.json").read_text())
    assert len(found["runs"]) == 4
    assert all(len(run["losses"]) == 10 and all(map(math.isfinite, run["losses"])) for run in found["runs"])
    page = (tmp_path / "rules.md").read_text()
    assert "| muonh | 1 | 0.01: " in page
    assert found["command"] in page
    assert (tmp_path / "rules.png").stat().st_size > 10_000
    arguments, keys = Arguments(tmp_path, recipes=("dense",), contenders=("muonh",), **size), words[-2:]
    assert study_rules.main(arguments, keys) == found, "no run is repeated"
    assert "Incomplete" not in page
    assert "**Incomplete: 3 of 4 runs.**" in study_rules.page({**found, "runs": found["runs"][:3]})
    with pytest.raises(SystemExit, match="is of another command"):
        study_rules.main(arguments, [*keys, "--muon.momentum", "0.9"])


def test_finetuning_compares_all_pairs_of_optimizers(tmp_path: Path) -> None:
    arguments = finetune.Arguments(
        tmp_path, pretrain_steps=8, finetune_steps=3, seeds=1, rates=(1e-3,), dim=32, batch=4
    )
    found: dict[str, Any] = finetune.main(arguments)
    pairs = {(row["pretrain"], row["finetune"]) for row in found["rows"]}
    assert len(found["rows"]) == len(pairs) == 4
    assert all(row["help"] < row["help_before"] for row in found["rows"])
    assert "| adamw | muon | 0.001 |" in (tmp_path / "finetune.md").read_text()
