"""The wheel has the library, types, recipes, and a command for use outside of the checkout."""

import contextlib
import importlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import titan_muon
from titan_muon import command

ROOT = Path(__file__).parents[2]
NEEDS = "needs torchtitan; install them by pip install 'titan-muon[titan]'"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of this checkout."""
    from hatchling import build

    folder = tmp_path_factory.mktemp("dist")
    with contextlib.chdir(ROOT):
        return folder / build.build_wheel(str(folder)), folder / build.build_sdist(str(folder))


@pytest.mark.slow
def test_the_wheel_has_types_models_and_recipes_and_the_sdist_tests_and_docs(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[0]).namelist())
    assert {
        "titan_muon/py.typed",
        "titan_muon/shipped/models/qwen3.py",
        "titan_muon/shipped/configs/qwen_moe_muon.toml",
        "titan_muon/trainer/commands/compare.py",
        "titan_muon/trainer/commands/saved_model.py",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/unit/test_packaging.py", "docs/frameworks.md", "README.md", "LICENSE", "Makefile"} <= names


@pytest.mark.slow
def test_the_command_plans_outside_of_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(built[0]).extractall(tmp_path / "site")
    words = ["plan", "--config", "qwen_moe_muon", "--world-size", "2"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTHONSAFEPATH": "1"}
    planned = [sys.executable, "-m", "titan_muon.command", *words]
    done = subprocess.run(planned, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Muon step:" in done.stdout


def test_the_version_equals_the_projects_version() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert titan_muon.__version__ == version


def test_a_missing_extra_is_a_single_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "torchtitan" else object())
    assert command.main(["train", "--config", "qwen_moe_muon"]) == 2
    assert capsys.readouterr().err == f"titan-muon train: {NEEDS}\n"


def test_the_integration_without_torchtitan_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "titan_muon.trainer", raising=False)
    with pytest.raises(ModuleNotFoundError, match=re.escape(NEEDS)):
        importlib.import_module("titan_muon.trainer")


def test_commands_and_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["recipes"]) == 0
    assert "qwen_moe_muon" in capsys.readouterr().out.split()
    assert command.main([]) == command.main(["--help"]) == 0
    assert capsys.readouterr().out == 2 * (command.USAGE + "\n")
    assert command.main(["fly"]) == 2
    assert "'fly' is not a command; choose from train, plan, compare" in capsys.readouterr().err
