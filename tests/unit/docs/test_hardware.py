"""docs/hardware.md says of each hardware what the code decides."""

import importlib.util
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_muon.engine.tensors.storage import missing_streams
from titan_muon.kernels import fused
from titan_muon.options import MuonOptions
from titan_muon.trainer import device
from titan_muon.trainer.torchtitan import compat

ROOT = Path(__file__).parents[3]
KINDS = {"NVIDIA": "cuda", "AMD": "cuda", "Intel": "xpu", "Ascend": "npu", "Apple": "mps"}
"""Device type by the name's start, if it is not the CPU."""


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "hardware.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return table[2:]


def refusal(call: Callable[[], object]) -> str:
    """The words of an error, or empty."""
    try:
        call()
    except (ValueError, ImportError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_table_of_hardware_says_what_the_code_decides(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, library, recipes, kernels, words = row
    kind, windows = KINDS.get(name.split()[0], "cpu"), name == "Windows"
    compat.install()
    where = SimpleNamespace(type=kind)
    accelerator = None if kind == "cpu" else where
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
    monkeypatch.setattr(torch, "mps", SimpleNamespace())
    found = importlib.util.find_spec
    with monkeypatch.context() as system:
        missing = ("fcntl", "triton") if windows else ()
        system.setattr(importlib.util, "find_spec", lambda module: None if module in missing else found("torch"))
        system.setattr(fused, "find_spec", importlib.util.find_spec)
        system.delenv("TRITON_INTERPRET", raising=False)
        recipe_errors = refusal(lambda: runpy.run_path(str(ROOT / "titan_muon" / "trainer" / "__init__.py")))
        context: Any = SimpleNamespace(options=MuonOptions(fused=True), device=kind, named=())
        fused_errors = refusal(lambda: fused.FusedFeature().check(context))
    works = {"CPU": "works", "NVIDIA 9.0 (Hopper)": "one GPU"}.get(name, "untested")
    trains = works if device.this_device() == kind else "on the CPU"
    assert library == ("refused" if missing_streams(kind) else works)
    assert recipes == ("refused" if recipe_errors else trains)
    assert kernels == ("refused" if fused_errors else works)
    said = " ".join([missing_streams(kind), recipe_errors, fused_errors])
    for quoted in re.findall(r'"([^"]+)"', words):
        assert quoted in said
    assert bool(words) == ("refused" in row)
