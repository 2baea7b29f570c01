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

from titan_muon.algorithms import fused
from titan_muon.options import MuonOptions
from titan_muon.tensors.storage import missing_streams
from titan_muon.titan import device
from titan_muon.titan.recipe.sections import Float8
from titan_muon.titan.torchtitan import compat

ROOT = Path(__file__).parents[3]
# By the name's start: the device type, AMD or not, and the compute capabilities in the name.
KINDS = {
    "CPU": "cpu",
    "NVIDIA": "cuda",
    "AMD": "cuda",
    "Intel": "xpu",
    "Ascend": "npu",
    "Apple": "mps",
    "Windows": "cpu",
}
CAPABILITIES = {"gfx90a": (9, 0), "gfx942": (9, 4), "gfx950": (9, 5)}


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


def capabilities(name: str) -> list[tuple[int, int] | None]:
    numbers = [(int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d)(?= |,)", name)]
    return numbers + [CAPABILITIES[chip] for chip in re.findall(r"gfx\w+", name)] or [None]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_table_of_hardware_says_what_the_code_decides(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, library, recipes, kernels, float8, words = row
    kind, windows = KINDS[name.split()[0]], name == "Windows"
    compat.install()
    from titan_muon.titan.model.quantization import check_float8

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
        recipe_errors = refusal(lambda: runpy.run_path(str(ROOT / "titan_muon" / "titan" / "__init__.py")))
        context: Any = SimpleNamespace(options=MuonOptions(fused=True), device=kind, named=())
        fused_errors = refusal(lambda: fused.FusedFeature().check(context))
    float8_errors = [
        refusal(lambda c=capability: check_float8(Float8(linear=True), c, amd=name.startswith("AMD"), torchao=True))
        for capability in capabilities(name)
    ]
    assert len({bool(error) for error in float8_errors}) == 1, "a row has hardware of one kind"

    works = {"CPU": "works", "NVIDIA 9.0 (Hopper)": "one GPU"}.get(name, "untested")
    trains = works if device.this_device() == kind else "on the CPU"
    assert library == ("refused" if missing_streams(kind) else works)
    assert recipes == ("refused" if recipe_errors else trains)
    assert kernels == ("refused" if fused_errors else works)
    assert windows or float8 == ("refused" if float8_errors[0] else "untested")
    said = " ".join([missing_streams(kind), recipe_errors, fused_errors, *float8_errors])
    for quoted in re.findall(r'"([^"]+)"', words):
        assert quoted in said
    assert bool(words) == ("refused" in row)
