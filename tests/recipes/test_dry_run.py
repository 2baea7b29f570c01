"""`--dry-run` for a user: the verdict and alternatives."""

import json
import re
from pathlib import Path

import pytest

import models  # noqa: F401 (registers the families)
from titan_muon.trainer.dry_run.compare import compare
from titan_muon.trainer.dry_run.report import report
from titan_muon.trainer.recipe.command_line import Command, parse

RECIPE = """
name = "small"
[model]
name = "qwen3"
flavor = "moe_tiny"
[data]
source = "files"
files = ["absent/*.txt"]
tokenizer = "hf"
tokenizer_path = "absent"
[training]
local_batch_size = 1
seq_len = 128
"""


def command(folder: Path, *words: str) -> Command:
    file = folder / "small.toml"
    file.write_text(RECIPE)
    return parse(["--config", str(file), "--dry-run", *words])


def test_a_dry_run_prints_a_verdict_and_writes_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "plan.json"
    words = ("--machine", "h100x8", "--parallelism.expert_parallel_degree", "2", "--json", numbers)
    report(command(tmp_path, "--world-size", "16", *map(str, words)))
    text = capsys.readouterr().out
    assert re.search(r"memory +fits: [\d.]+ GiB of 79.0 GiB", text)
    assert re.search(r"a step takes [\d.]+ \w+, and with AdamW for all parameters", text)
    assert "modelled" in text
    assert "[training]" not in text, "the recipe is behind --verbose"
    assert "data.files" in text.rsplit("training on this machine would be refused", 2)[1], "another machine has files"
    assert "data.tokenizer_path = 'absent' has no tokenizer.json" in text
    assert json.loads(numbers.read_text())["verdict"]["fits"] is True


def test_compare_lists_the_shortest_fitting_step_first(tmp_path: Path) -> None:
    asked = command(tmp_path, "--world-size", "4", "--compare", "placement.muon=owned,shard0,nowhere")
    lines = [line for line in compare(asked.alternatives, 4, None) if "placement.muon" in line]
    tabled = [line for line in lines if "refused" not in line]
    assert len(tabled) == 2
    times = [float(re.split(r" {2,}", line.strip())[3].replace(",", "")) for line in tabled]
    assert times == sorted(times)
    assert [line for line in lines if "refused: " in line] == [lines[-1]]
    assert "nowhere" in lines[-1]


def test_the_dry_run_names_work_that_replicas_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Owned experts are whole on each replica of HSDP."""
    words = ("--world-size", "8", "--parallelism.data_parallel_replicate_degree", "4", "--placement.muon", "owned")
    words += ("--parallelism.expert_parallel_degree", "2")
    report(command(tmp_path, *words, "--muon.expert.replicas", "redundant"))
    assert '"split", which sends results' in capsys.readouterr().out
    report(command(tmp_path, *words))
    assert "repeated" not in capsys.readouterr().out
