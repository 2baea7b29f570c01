"""docs/options.md lists every option of Muon and of the machine as declared.

`python tests/unit/titan/recipe/test_recipe_docs.py`, from the root of the repository, writes the tables again.
"""

import ast
import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from titan_muon.options import constraints
from titan_muon.trainer.recipe import schema, sections, toml

PAGE = Path(__file__).parents[4] / "docs" / "options.md"
TABLES = {"muon": sections.Muon, "muon.expert": sections.Expert, "machine": sections.Machine}
START, END = (
    "<!-- options of {}: written by tests/unit/titan/recipe/test_recipe_docs.py -->\n",
    "<!-- end of options -->\n",
)


def meanings(table: type) -> dict[str, str]:
    """Docstrings of the fields of a dataclass and the bases, from the source: no object has field docstrings."""
    texts: dict[str, str] = {}
    for owner in table.__mro__[-2::-1]:
        (definition,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(definition, ast.ClassDef)
        for item, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(item, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[ast.unparse(item.target)] = ast.literal_eval(below.value)
    return texts


def option_table(name: str) -> str:
    """The options of a table as Markdown, in the order of the help."""
    table = TABLES[name]
    kinds, meaning = get_type_hints(table), meanings(table)
    # A constraint without words marks a key, and is beside the key's range.
    ranges = {name: constraint for name, constraint, _ in constraints(table) if constraint.accepted}
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for item in fields(table):
        if f"{name}.{item.name}" in TABLES:
            continue
        value = item.default if item.default_factory is MISSING else item.default_factory()
        assert value is not MISSING, f"a recipe need not give {item.name}"
        kind = kinds[item.name]
        takes = ranges[item.name].accepted if item.name in ranges else schema.describe(kind)
        # An absent key may have the choices too.
        choices = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
        if choices and item.name not in ranges:
            takes = ", ".join(f"`{choice}`" for choice in get_args(choices[0]))
        default = "not given" if value is None else f"`{toml.value_text(value)}`"
        # A row of Markdown is one line, for any number of docstring lines.
        cells = (f"`{name}.{item.name}`", default, takes, " ".join(meaning[item.name].split()))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    """`page` with the generated tables."""
    for name in TABLES:
        before, rest = page.split(START.format(name))
        page = before + START.format(name) + option_table(name) + END + rest.split(END, 1)[1]
    return page


def test_the_page_lists_every_option_with_default_choices_and_meaning() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "run `python tests/unit/titan/recipe/test_recipe_docs.py`"
    for name in TABLES:
        rows = [line.split("`")[1] for line in option_table(name).splitlines() if line.startswith("| `")]
        assert rows == [key for key in schema.keys(sections.Recipe) if key.rpartition(".")[0] == name]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
