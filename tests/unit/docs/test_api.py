"""docs/api.md is complete, and the examples of docs/frameworks.md run."""

import re
import warnings
from pathlib import Path
from typing import Any

import titan_muon
from docs.make_api import MODULES, PAGE, ROOT, page

FRAMEWORKS = Path(__file__).parents[3] / "docs" / "frameworks.md"
IMPORT = re.compile(r"from (titan_muon[\w.]*) import ([\w, ]+)")


def test_the_page_of_the_api_equals_the_docstrings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python docs/make_api.py"


def test_every_public_name_is_documented() -> None:
    text = page()
    for name in titan_muon.__all__:
        assert getattr(titan_muon, name).__doc__, f"{name} has no docstring"
        assert f"## {name}\n" in text


def test_every_name_imported_in_the_docs_is_documented() -> None:
    known = {"titan_muon": (*titan_muon.__all__, "registry"), **MODULES}
    pages = (*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.py"))
    imports = [match for path in pages for match in IMPORT.findall(path.read_text(encoding="utf-8"))]
    assert len(imports) > 10
    unknown = {(module, name) for module, names in imports for name in names.split(", ")}
    unknown -= {(module, name) for module, names in known.items() for name in names}
    assert not unknown, "add them to MODULES of docs/make_api.py"


def test_the_examples_of_the_frameworks_page_run() -> None:
    import titan_muon.titan.compat

    titan_muon.titan.compat.install()
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", FRAMEWORKS.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(block, names)
    assert {a.fqn: a.optimizer for a in names["optimizer"].assignments}["2.weight"] == "adamw"
