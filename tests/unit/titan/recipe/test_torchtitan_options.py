"""Every option of TorchTitan can be set in a recipe, or stands in docs/options.md with the reason why not."""

import re
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from torchtitan.components import quantization
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.trainer import Trainer

from titan_muon.trainer.recipe import schema
from titan_muon.trainer.recipe.sections import Recipe

PAGE = Path(__file__).parents[4] / "docs" / "options.md"
HEADING = "## TorchTitan options without a recipe key\n"
OWN = {"loss", "dump_folder", "checkpoint"}
"""Tables and keys of a recipe that are no class of options of TorchTitan's trainer."""
TABLES: dict[type, str] = {
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


@pytest.mark.parametrize(("kind", "table"), TABLES.items(), ids=lambda value: getattr(value, "__qualname__", value))
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
    options = {f"{table}.{field.name}" for kind, table in TABLES.items() for field in fields(kind)}
    assert {key.split(" = ")[0] for key in reasons if "." in key} <= options, "the page names an option that is gone"
