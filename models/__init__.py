"""Models by name: importing this package registers the families, a module each.

A flavor is a row of sizes. Flavors called `tiny` train on a laptop; the others have the published sizes.
"""

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from titan_muon import registry


def _family(name: str) -> Any:
    # A family imports torchtitan, so it waits for the first use: `--help` and errors in a recipe do not wait for
    # PyTorch. `titan_muon.trainer` prepares torchtitan for this machine.
    importlib.import_module("titan_muon.trainer")
    return importlib.import_module(f"models.{name}")


def _flavors(name: str) -> Sequence[str]:
    return tuple(_family(name).FLAVORS)


def _build(name: str, flavor: str, vocab_size: int | None) -> Any:
    return _family(name).build(flavor, vocab_size)


for _name in ("deepseek_v3", "gpt_oss", "kimi_k2_5", "llama3", "qwen3", "qwen3_5"):
    registry.models.register(_name, registry.ModelFamily(partial(_flavors, _name), partial(_build, _name)))
