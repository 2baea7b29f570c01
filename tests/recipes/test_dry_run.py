"""`--dry-run` for a user: the verdict and alternatives."""

import json
import re
from pathlib import Path

import pytest

import models  # noqa: F401 (registers the families)
from titan_muon.trainer.commands import train
from titan_muon.trainer.dry_run.compare import compare
from titan_muon.trainer.dry_run.report import report
from titan_muon.trainer.recipe import RecipeError
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


BETAS = "options={betas=[0.9,2.0]}"
REFUSED = [
    # By Muon.
    ("--muon.algorithm muonh", r"muon\.weight_decay = 0\.1: algorithm = 'muonh' keeps the norm"),
    ("--muon.algorithm normoun", r"muon\.algorithm = 'normoun' is unknown; did you mean 'normuon'\?"),
    (
        "--muon.expert.orthogonalize gram --muon.expert.ns_dtype bfloat16",
        r"muon\.expert\.ns_dtype = 'bfloat16'.* diverges",
    ),
    ("--muon.expert.ns_kernel triton", r"muon\.expert\.ns_kernel = 'triton' needs CUDA and the package triton"),
    ("--muon.expert.buffer_gib 1e-6 --world-size 2", r"muon\.expert\.buffer_gib = .* is too small"),
    ("--muon.split {match='*.wq.weight',dims='(hf)d->h|fd',lengths={f=7}}", r"muon\.split: dims = "),
    # By rules, placements and models.
    ("--placement.muon own", r"placement\.muon = 'own' is unknown; did you mean 'owned'\?"),
    (
        "--model.flavor moe_tinny",
        r"^command line: model\.flavor = 'moe_tinny' is unknown; did you mean 'moe_tiny'\? choo",
    ),
    (
        "--optimizer.rule {match='*norm*',optimizer='muon'}",
        r"optimizer\.rule\[0\] .* gives Muon \S+norm.weight of shap",
    ),
    (f"--optimizer.rule {{match='*norm*',optimizer='adamw',{BETAS}}}", "betas"),
    (
        "--optimizer.rule {match='layer.0.*',optimizer='adamw'}",
        r"^command line: optimizer\.rule\[0\]: 'layer\.0\.\*' take",
    ),
    ("--optimizer.rule {match='layers.*',optimizer='adamw'} --placement.muon owned", "Muon takes no"),
    ("--optimizer.rule {match='*wq*',optimizer='muon'} --optimizer.defaults false", "no rule matches"),
    # By data, batch and machine.
    ("--model.vocab_size 10", r"data\.tokenizer has 258 tokens and the model embeds 10"),
    ("--data.tokenizer hf --data.tokenizer_path absent --model.vocab_size 9", r"data\.tokenizer_path = 'absent' has"),
    ("--training.disable_cuda_graphs false --parallelism.expert_parallel_degree 2", "disable_cuda_graphs"),
    ("--training.global_batch_size 7 --world-size 2", r"training\.global_batch_size = 7 is not accepted on 2"),
    ("--parallelism.tensor_parallel_degree 3 --world-size 2", "takes a multiple of 3 processes, and this is 2"),
    ("--checkpoint.async_mode async_with_pinned_mem", r"checkpoint\.async_mode .* not accepted on the CPU"),
]


@pytest.mark.parametrize(("words", "problem"), REFUSED)
def test_the_dry_run_refuses_the_recipes_that_training_refuses(words: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        train.train(parse(["--config", "configs/qwen_moe_muon.toml", "--dry-run", *words.split()]))


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
