"""docs/recipes.md tells every option of Muon as it is declared.

`python tests/unit/test_recipe_docs.py`, from the root of the repository, writes the table anew.
"""

import ast
import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from titan_muon.options import constraints
from titan_muon.titan.recipe import schema, sections, toml

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
START, END = "<!-- options of muon: written by tests/unit/test_recipe_docs.py -->\n", "<!-- end of options -->\n"


def meanings(table: type) -> dict[str, str]:
    """The docstring of each field of a dataclass and its bases. They are text below a field, which no object keeps."""
    found: dict[str, str] = {}
    for owner in table.__mro__[-2::-1]:
        (definition,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(definition, ast.ClassDef)
        for item, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(item, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[ast.unparse(item.target)] = ast.literal_eval(below.value)
    return found


def option_table() -> str:
    """The options of `[muon]` as a Markdown table, in the order of the help."""
    kinds, ranges, meaning = get_type_hints(sections.Muon), dict(constraints(sections.Muon)), meanings(sections.Muon)
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for item in fields(sections.Muon):
        assert item.default is not MISSING, f"a recipe need not give {item.name}"
        kind = kinds[item.name]
        takes = ranges[item.name].accepted if item.name in ranges else schema.describe(kind)
        # An absent key may have the choices too.
        choices = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
        if choices and item.name not in ranges:
            takes = ", ".join(f"`{choice}`" for choice in get_args(choices[0]))
        default = "absent" if item.default is None else f"`{toml.value_text(item.default)}`"
        cells = (f"`muon.{item.name}`", default, takes, meaning[item.name])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    """`page` with the table as it should be."""
    before, rest = page.split(START)
    return before + START + option_table() + END + rest.split(END)[1]


def test_the_page_lists_every_option_of_muon_with_default_choices_and_meaning() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "run `python tests/unit/test_recipe_docs.py`"


def test_the_table_has_a_row_for_every_option_and_no_other() -> None:
    rows = [line.split("`")[1] for line in option_table().splitlines() if line.startswith("| `")]
    assert rows == [key for key in schema.keys(sections.Recipe) if key.startswith("muon.")]


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
