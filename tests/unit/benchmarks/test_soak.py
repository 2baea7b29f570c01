"""The soak test on a small case, and the reported problems."""

from pathlib import Path

import pytest

from scripts import soak
from tests import tiny


def observed(steps: int, growth: float = 0.0) -> soak.Soak:
    memory = {step: [1000 * (1 + growth * step / steps)] * 2 for step in range(1, steps + 1)}
    return soak.Soak(losses={step: 1 / step for step in range(1, steps + 1)}, memory=memory, code=0)


def test_different_losses_memory_growth_and_exit_codes_are_problems() -> None:
    assert soak.problems(observed(400), observed(300), 100) == []
    other = observed(400)
    other.losses = {**other.losses, 7: 0.5}
    assert "1 of 400 losses differ, the first in step 7" in soak.problems(observed(400), other, 100)[0]
    assert "memory grows by" in soak.problems(observed(400, 0.1), observed(400), 100)[0]
    failed = observed(400)
    failed.code = 1
    assert soak.problems(observed(400), failed, 100) == ["the killed run ended with exit code 1"]
    assert soak.problems(soak.Soak(code=0), observed(4), 100) == ["the runs have no step in common"]
    assert soak.growth(observed(102).memory, 100) is None


@pytest.mark.slow
def test_a_killed_run_has_the_losses_of_an_undisturbed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 steps, with a kill and a checkpoint every 2 steps."""
    recipe = tiny.write_recipe(tmp_path)
    words = ("--steps=6", "--kills=1", "--minutes=8", f"--config={recipe}", f"--folder={tmp_path / 'soak'}")
    keys = ("--checkpoint.interval=2", "--model.name=llama3", "--model.flavor=tiny", "--muon.ns_dtype=float32")
    code = soak.main([*words, "--", *keys])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "6 steps undisturbed" in shown.out
    assert "6 steps with 1 kills" in shown.out
    (killed,) = (tmp_path / "soak").glob("*/killed")
    assert len(list(killed.rglob("metrics.jsonl"))) == 1, "a restart continues in the folder of the run"
