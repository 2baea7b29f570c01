"""docs/options.md lists every option of Muon and of the machine as declared, and TorchTitan's options without a key.

`python tests/unit/titan/recipe/test_recipe_docs.py`, from the root of the repository, writes the tables again.
"""

import ast
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from torchtitan.components import quantization
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.trainer import Trainer

from titan_muon.options import constraints
from titan_muon.trainer.recipe import schema, sections, toml
from titan_muon.trainer.recipe.sections import Recipe

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


# Every option of TorchTitan can be set in a recipe, or stands on the page with the reason why not

HEADING = "## TorchTitan options without a recipe key\n"
OWN = {"loss", "dump_folder", "checkpoint"}
"""Tables and keys of a recipe that are no class of options of TorchTitan's trainer."""
CLASSES: dict[type, str] = {
    **{
        kind: name
        for name, hint in get_type_hints(Trainer.Config).items()
        for kind in get_args(hint) or (hint,)
        if name in get_type_hints(Recipe) and name not in OWN and kind is not NoneType
    },
    CheckpointManager.Config: "checkpoint",
    **{
        kind.Config: re.split("Linear|Grouped", name)[0].lower()
        for name, kind in vars(quantization).items()
        if re.match(r"[A-Z]+\w*\d(Linear|Grouped)\w*Converter", name)
    },
}
"""TorchTitan's classes and the recipe's table of the options."""

RENAMED = {"checkpoint.interval": "checkpoint.freq"}
"""Keys of a recipe with another name than TorchTitan's, so that all periods have one word."""
MADE_OF = {"model_spec": "model", "hf_assets_path": "model", "tokenizer": "data", "dataloader": "data"}
"""Parts of TorchTitan's trainer made from a recipe's table with another name."""


def left_out() -> set[str]:
    """Keys, or keys with a value, listed on the page as left out."""
    rows = PAGE.read_text(encoding="utf-8").split(HEADING)[1].split("\n## ")[0]
    return {
        name
        for line in rows.splitlines()
        if line.startswith("| `")
        for name in re.findall("`([^`]+)`", line.split("|")[1])
    }


def choices(kind: Any) -> set[object]:
    return {choice for part in (kind, *get_args(kind)) if get_origin(part) is Literal for choice in get_args(part)}


@pytest.mark.parametrize(("kind", "table"), CLASSES.items(), ids=lambda value: getattr(value, "__qualname__", value))
def test_every_trainer_option_can_be_set_or_has_a_reason_on_the_page(kind: type, table: str) -> None:
    known, reasons = schema.keys(Recipe), left_out()
    for field in fields(kind):
        key = RENAMED.get(f"{table}.{field.name}", f"{table}.{field.name}")
        assert (key in known) != (key in reasons), key
        if key in known and (missing := choices(get_type_hints(kind)[field.name]) - choices(known[key])):
            assert {f'{key} = "{choice}"' for choice in missing} <= reasons


def test_every_part_of_the_trainer_has_a_table_or_a_reason_on_the_page() -> None:
    tables = {field.name for field in fields(Recipe)}
    parts = {MADE_OF.get(field.name, field.name) for field in fields(Trainer.Config)}
    reasons = left_out()
    assert parts - tables == {key for key in reasons if "." not in key and not key.endswith("Converter")}
    options = {f"{table}.{field.name}" for kind, table in CLASSES.items() for field in fields(kind)}
    assert {key.split(" = ")[0] for key in reasons if "." in key} <= options, "the page names an option that is gone"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
