"""Commands and recipes of the docs: each command line is accepted by its program, and each recipe loads."""

import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

import pytest

from titan_muon.options import Machine
from titan_muon.planner.machine import machine_of
from titan_muon.trainer.commands import start, sweep
from titan_muon.trainer.recipe import load
from titan_muon.trainer.recipe.command_line import parse

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
OTHER_PROGRAMS = {"cp", "grep", "lm_eval", "mkdir", "pip", "podman", "source", "tee", "tensorboard", "export"}
"""Not this project's. `make lm-eval` runs `lm_eval`; the container needs a GPU."""
ELSEWHERE = ("titan-muon audit", "titan_muon.audit", "titan-muon plan", "torchtitan.train", "$PYTHONPATH/launch.py")
"""Run by tests/audit, tests/recipes/test_published_models.py and tests/dist/titan/test_examples.py."""


def commands(page: Path) -> list[str]:
    """Command lines of fenced shell blocks, and of indented blocks."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S)
    found += re.findall(r"((?:^    (?:python|make|torchrun|podman) .*\n)(?:^     .*\n)*)", text, re.M)
    lines = "\n".join(found).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in re.split(r" && | \| ", line.split("  #")[0])]
    return [part for part in parts if part and not part.startswith("#")]


COMMANDS = [pytest.param(c, id=f"{page.stem}: {c[:60]}") for page in PAGES for c in dict.fromkeys(commands(page))]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_accepted_by_its_program(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(name in command for name in ELSEWHERE):
        return
    words = shlex.split(command.replace("2>&1", ""))
    program = words[0]
    if program in ("torchrun", "python"):
        # The launcher's own flags come first.
        words = list(dropwhile(lambda word: word.startswith("--") or word == program, words))
    if program == "sbatch":
        words = ["train.py", "--config", *words[words.index("scripts/slurm.sh") + 1 :]]
    script = Path(words[0])
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{re.escape(words[1])}:", makefile, re.M)
    elif words[0] == "-m":
        assert find_spec(words[1]) is not None
    elif script.name == "train.py":
        monkeypatch.chdir(ROOT)
        with pytest.raises(SystemExit, match="0") if "--help" in words else nullcontext():
            assert parse(words[1:]).config is not None
    elif script.parent.name == "scripts" or words[0] == "titan-muon":
        name, arguments = (script.stem, words[1:]) if script.suffix else (words[1], words[2:])
        # Without runs of a developer.
        monkeypatch.chdir(ROOT if name == "sweep" else tmp_path)
        accepts(name.removesuffix("_runs"), arguments, capsys)
    elif script.suffix == ".py":
        assert (ROOT / script).is_file()
    else:
        assert program in OTHER_PROGRAMS, "a program that no test knows"


def accepts(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The other commands read runs, which are not here: the error names the run, and not a flag."""
    if name == "sweep":
        recipe, *grid = [word for word in arguments if "=" in word or word.endswith(".toml")]
        assert len(sweep.plan([recipe], grid, (), 2)) == 12
        return
    assert start(name, arguments) == 2
    assert "runs/" in capsys.readouterr().err


DRY_RUNS = [c for page in PAGES for c in commands(page) if "--dry-run" in c and not c.startswith("#")]


@pytest.mark.slow
@pytest.mark.parametrize("command", list(dict.fromkeys(DRY_RUNS)))
def test_a_dry_run_of_the_docs_plans_or_shows_its_error(command: str, tmp_path: Path) -> None:
    words = [sys.executable, *shlex.split(command)[1:], "--dump_folder", str(tmp_path)]
    words = [str(tmp_path / word) if word == "plan.json" else word for word in words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    errors = re.findall(r"# (error: .*)", (ROOT / "docs" / "compatibility.md").read_text())
    assert done.returncode == 0 or done.stderr.strip() in errors, done.stderr


RECIPES = [
    pytest.param(block, id=f"{page.stem}-{index}")
    for page in PAGES
    for index, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
]


@pytest.mark.parametrize("block", RECIPES)
def test_a_recipe_loads_on_top_of_a_shipped_one(block: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    if block.startswith("[project"):
        assert tomllib.loads(block), "a pyproject.toml"
        return
    path.write_text(f'base = "{ROOT / "configs/qwen_moe_muon.toml"}"\n{block}')
    load(path)


def test_the_rates_of_a_machine_are_read() -> None:
    (rates,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), re.S)
    machine = machine_of(Machine(file="machine.json"), measured=rates)
    assert (machine.network.bandwidth, machine.flops["float32"]) == (22e9, 5e13)
