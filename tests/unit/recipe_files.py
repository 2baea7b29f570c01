"""Shared by the recipe tests: files to load, and the message of a failed load."""

from collections.abc import Callable
from pathlib import Path

import pytest

from titan_muon.trainer.recipe import RecipeError

RULE = "[[optimizer.rule]]\nmatch = '*'\noptimizer = "
"""Start of a rule for every parameter; the optimizer's name in quotes follows."""


def write(folder: Path, text: str, name: str = "run.toml") -> str:
    """The path of a new TOML file in `folder`."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(call: Callable[[], object]) -> str:
    """The message of the expected RecipeError of `call`."""
    with pytest.raises(RecipeError) as caught:
        call()
    return str(caught.value)
