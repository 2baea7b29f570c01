"""Writes the tree of docs/architecture.md: a line for each folder, and for each file of DESCRIBED, from docstrings.

    python docs/make_architecture.py

`tests/unit/test_architecture.py` fails if page and folders differ.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = ("titan_muon", "models", "scripts")
DESCRIBED = ("titan_muon", "engine")
"""Folders with a line for each file."""
BEGIN, END = "<!-- tree: written by docs/make_architecture.py -->", "<!-- end of tree -->"


def summary(file: Path) -> str:
    """First sentence of a module's docstring."""
    documented = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert documented, f"{file} has no docstring"
    paragraph = " ".join(documented.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


def lines(folder: Path, depth: int = 0) -> list[str]:
    """A folder with its contents: first its own files, then its folders."""
    init = folder / "__init__.py"
    sentence = summary(init) if init.exists() else "commands that a user runs"
    rows = [f"{'  ' * depth}{folder.name}/  {sentence}"]
    if folder.name in DESCRIBED:
        files = [file for file in sorted(folder.glob("*.py")) if file != init]
        rows += [f"{'  ' * (depth + 1)}{file.name}  {summary(file)}" for file in files]
    for child in sorted(file.parent for file in folder.glob("*/__init__.py")):
        rows += lines(child, depth + 1)
    return rows


def tree() -> str:
    """Tree of all code."""
    rows = [f"train.py  {summary(ROOT / 'train.py')}"]
    for folder in FOLDERS:
        rows += lines(ROOT / folder)
    return "\n".join(rows)


def written(page: str) -> str:
    """The page with the current tree. Raises ValueError if the page has no place for the tree."""
    before, opening, rest = page.partition(BEGIN)
    _, closing, after = rest.partition(END)
    if not (opening and closing):
        raise ValueError(f"{PAGE}: needs the lines {BEGIN!r} and {END!r}, between which the tree is written")
    return f"{before}{BEGIN}\n```\n{tree()}\n```\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
