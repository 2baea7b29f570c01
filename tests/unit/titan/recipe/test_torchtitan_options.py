"""Every option of TorchTitan can be set in a recipe, or stands in docs/options.md with the reason why not."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8LinearConverter,
    NVFP4LinearConverter,
)
from torchtitan.components.validate import Validator
from torchtitan.config import configs
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from titan_muon.trainer.recipe import schema
from titan_muon.trainer.recipe.sections import Recipe

PAGE = Path(__file__).parents[4] / "docs" / "options.md"
HEADING = "## TorchTitan options without a recipe key\n"

TABLES: dict[type, str] = {
    configs.TrainingConfig: "training",
    configs.ParallelismConfig: "parallelism",
    configs.CompileConfig: "compile",
    configs.CommConfig: "comm",
    configs.DebugConfig: "debug",
    LRSchedulersContainer.Config: "lr_scheduler",
    OptimizersContainer.Config: "optimizer",
    CheckpointManager.Config: "checkpoint",
    MetricsProcessor.Config: "metrics",
    Validator.Config: "validator",
    Profiler.Config: "profiler",
    SelectiveAC.Config: "activation_checkpoint",
    FullAC.Config: "activation_checkpoint",
    MemoryBudgetAC.Config: "activation_checkpoint",
    Float8LinearConverter.Config: "float8",
    Float8GroupedExpertsConverter.Config: "float8",
    MXFP8LinearConverter.Config: "mxfp8",
    MXFP8GroupedExpertsConverter.Config: "mxfp8",
    NVFP4LinearConverter.Config: "nvfp4",
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
