"""Overrides, the flags of train.py, and the help."""

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.recipe_files import RULE, error_of, write
from titan_muon.trainer.recipe import Recipe, command_line, load, schema, sections, torchtitan_sections
from titan_muon.trainer.recipe.command_line import Command, parse

TWO = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--parallelism.tensor_parallel_degree 2", "parallelism.tensor_parallel_degree", 2),
        ("--parallelism.tensor-parallel-degree 2", "parallelism.tensor_parallel_degree", 2),
        ("--training.steps=3", "training.steps", 3),
        ("--training.steps 3 --training.steps 4", "training.steps", 4),
        ("--training.global_batch_size -1", "training.global_batch_size", -1),
        ("--muon.lr .5", "muon.lr", 0.5),
        ("--compile.enable", "compile.enable", True),
        ("--checkpoint.enable False", "checkpoint.enable", False),
        ("--compile.components", "compile.components", ()),
        ("--data.files 'a b' c", "data.files", ("a b", "c")),
        ('--data.files \'["a/*", "b"]\'', "data.files", ("a/*", "b")),
        ("--data.files [ab]*", "data.files", ("[ab]*",)),
        ("--adamw.betas '[0.1, 0]'", "adamw.betas", (0.1, 0.0)),
        ("--muon.expert.soap_freq 4", "muon.expert.soap_freq", 4),
        ("--muon.ns_coefficients cans", "muon.ns_coefficients", "cans"),
        ("--muon.ns_steps 2 --muon.ns_coefficients '[1, 2, 3]' '[4, 5, 6]'", "muon.ns_coefficients", TWO),
        ("--muon.ns_steps 2 --muon.ns_coefficients '[[1, 2, 3], [4, 5, 6]]'", "muon.ns_coefficients", TWO),
        ('--muon.algorithm \'["normuon", "muonh"]\'', "muon.algorithm", ("normuon", "muonh")),
        ("--muon.algorithm normuon,muonh", "muon.algorithm", ("normuon", "muonh")),
        ("--muon.ns_steps=2 --muon.ns_coefficients 1,2,3 4,5,6", "muon.ns_coefficients", TWO),
        ("--adamw.betas 0.1,0", "adamw.betas", (0.1, 0.0)),
        ("--data.files a/*.txt,b", "data.files", ("a/*.txt", "b")),
        ("--data.files memory://{a,b}.txt", "data.files", ("memory://{a,b}.txt",)),
        ("--model.flavor 8", "model.flavor", "8"),
    ],
)
def test_an_override_wins_over_the_file(tmp_path: Path, words: str, key: str, value: object) -> None:
    path = write(
        tmp_path,
        "name = 'x'\n[training]\nsteps = 100\nglobal_batch_size = 16\n"
        "[muon]\nlr = 0.7\n[compile]\ncomponents = ['model']\n",
    )
    recipe = load(path, shlex.split(words))
    read_value = schema.values(recipe)[key]
    assert read_value == value
    assert type(read_value) is type(value)
    alone = schema.values(load(path))
    differing = [name for name, other in schema.values(recipe).items() if other != alone[name]]
    assert differing in ([key], ["muon.ns_steps", key], ["data.source", key])


@pytest.mark.parametrize(
    ("base", "own", "words", "source"),
    [
        ("", "files = ['a']", "", "files"),
        ("source = 'python'", "files = ['a']", "", "files"),
        ("", "source = 'hf'\ntokenizer = 'hf'\ntokenizer_path = 'x'", "--data.files my/*.txt", "files"),
        ("", "files = ['a']", "--data.files --data.source python", "python"),
        ("", "tokenizer = 'hf'\ntokenizer_path = 'x'", "--data.dataset c4_test", "hf"),
        ("", "files = ['a']", "--data.source python", "refused"),
        ("files = ['a']", "source = 'python'", "", "refused"),
    ],
)
def test_data_is_read_from_the_source_given_last(tmp_path: Path, base: str, own: str, words: str, source: str) -> None:
    write(tmp_path, f"[data]\n{base}\n", "base.toml")
    path = write(tmp_path, f"base = 'base.toml'\n[data]\n{own}\n")
    if source != "refused":
        assert load(path, words.split()).data.source == source
        return
    message = error_of(lambda: load(path, words.split()))
    assert 'data.files = ["a"] is not accepted' in message
    assert 'Here data.source = "python"' in message


@pytest.mark.parametrize("brackets", ["%s", "[%s]"])
def test_an_override_may_give_rules_as_inline_tables(tmp_path: Path, brackets: str) -> None:
    word = brackets % '{match = "*", optimizer = "adamw", options = {lr = 1}}'
    recipe = load(write(tmp_path, ""), ["--optimizer.rule", word])
    assert recipe.optimizer.rule == (sections.Rule(match="*", optimizer="adamw", options={"lr": 1.0}),)


def test_the_command_line_names_the_recipe_and_the_action(tmp_path: Path) -> None:
    path = write(tmp_path, "[muon]\nlr = 0.5")
    plain = parse(["--config", path, "--muon.momentum", "0.1"])
    assert plain == Command(
        config=path, recipe=load(path, ["--muon.momentum", "0.1"]), typed=("muon.momentum",), sources=plain.sources
    )
    assert plain.sources == {"muon.lr": path, "muon.momentum": "command line"}
    flags = ["--dry-run", "--full", "--world-size", "8", "--device=cpu", "--json", "plan.json", "--training.steps", "3"]
    assert parse([*flags, f"--config={path}"]) == Command(
        config=path,
        recipe=load(path, ["--training.steps", "3"]),
        dry_run=True,
        full=True,
        world_size=8,
        device="cpu",
        json="plan.json",
        typed=("training.steps",),
        sources={"muon.lr": path, "training.steps": "command line"},
    )
    assert parse(["--config", path, "--dry_run"]).dry_run


def test_a_recipe_of_this_package_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(Path(__file__).parents[4] / "configs" / "qwen_moe_muon.toml")
    assert parse(["--config", "qwen_moe_muon"]).config == parse(["--config=qwen_moe_muon.toml"]).config == path
    write(tmp_path, "name = 'own'", "qwen_moe_muon")
    assert parse(["--config", "qwen_moe_muon"]).recipe.name == "own"


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    return " ".join(" ".join(line.strip("│ ") for line in lines).split())


def test_help_lists_every_key_with_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    """tyro would show the comment above a field without a docstring."""
    text = help_of(["--help", "all"], capsys)
    assert [key for key in schema.keys(Recipe) if f"--{key} " not in text] == []
    assert "--muon.ns_steps an integer Newton-Schulz iterations. (default: 5)" in text
    assert '--data.tokenizer one of "bytes", "bpe", "hf"' in text
    assert "--lr_scheduler.decay_ratio a finite number Share of decay steps at the end" in text
    assert "--machine.file a string" in text
    assert "--world_size an integer With dry_run: number of ranks" in text
    assert "The model to train." in text
    for module in (sections, torchtitan_sections, command_line):
        source = inspect.getsource(module)
        assert [line for line in re.findall(r"^ *# (.+)$", source, re.MULTILINE) if line in text] == []


def test_the_short_help_fits_a_screen_and_the_help_of_a_table_shows_the_recipes_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the help is 600 lines."""
    file = write(tmp_path, "[muon]\nns_steps = 17\n" + RULE + "'muon'")
    for words in (["--help", "muon"], ["--help", "muon.lr"], ["-h", "all"]):
        text = help_of(["--config", file, *words], capsys)
        assert "Newton-Schulz iterations. (default: 17)" in text
        assert ("--adamw.lr" in text) == ("all" in words)
    with pytest.raises(SystemExit):
        parse(["--config", file, "--help"])
    text = capsys.readouterr().out
    shown, known = text.splitlines(), set(schema.keys(Recipe))
    assert (len(shown) <= 80, max(map(len, shown)) <= 120) == (True, True)
    named = [line.split()[0].removeprefix("--") for line in shown if line.startswith("  --") and "." in line.split()[0]]
    assert {*named, *schema.MEANT.values()} <= known
    assert re.search(r"--muon\.ns_steps +17$", text, re.MULTILINE)
    assert f"all {len(known)} keys" in text
    assert "with their values in this recipe:" in text
    assert "A list is written `1,2` or `1 2`. The most used keys, with their defaults:" in help_of(["--help"], capsys)
    assert "not accepted" in error_of(lambda: parse(["--config", write(tmp_path, "[muon]\nlr = -1"), "--help"]))


MODULE = """
from dataclasses import dataclass
from titan_muon import registry
from titan_muon.engine.step.muon import MuonAlgorithm

@dataclass(frozen=True)
class Own:
    share: float = 0.5

class Mine(MuonAlgorithm):
    Options = Own

registry.algorithms.register("mine", Mine)
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--muon.expert.algorithm_options", "{mine = {share = 0.1}}", "--import=my_module"], ""),
        (
            ["--import", "no_module"],
            "error: imports: there is no module 'no_module'; install it, or start in the folder of",
        ),
    ],
)
def test_an_algorithm_of_an_imported_module_is_planned(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "my_module.py").write_text(MODULE)
    train = [sys.executable, str(Path(__file__).parents[4] / "train.py"), "--config", "qwen_moe_muon", "--dry-run"]
    command = [*train, "--world-size=2", "--device=cpu", "--muon.algorithm=mine", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, said in done.stderr) == (2 if said else 0, True), done.stderr[-500:]


def test_a_command_line_is_read_without_torch() -> None:
    imported = "import sys, titan_muon.trainer.recipe.command_line"
    code = f"{imported}; sys.exit('torch' in sys.modules or 'torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
