"""Device-dependent choices are in one file, and a recipe can override each choice on any device."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_muon.trainer import device

TITAN = Path(device.__file__).parent
# Gaps of the CPU and gloo until a later TorchTitan; and a CPU-only kernel.
ALLOWED = {TITAN / "device.py", TITAN / "torchtitan" / "compat.py", TITAN / "model" / "logits.py"}


def branches(path: Path) -> Iterator[str]:
    """Places in a file with a query of a device, or a comparison of a device with a name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "is_available":
            yield f"{path.name}:{node.lineno}"
        if isinstance(node, ast.Compare):
            compared = [item.value for item in (node.left, *node.comparators) if isinstance(item, ast.Constant)]
            if {"cpu", "cuda"} & {value for value in compared if isinstance(value, str)}:
                yield f"{path.name}:{node.lineno}"


def test_only_device_py_branches_on_the_device() -> None:
    assert list(branches(TITAN / "device.py")), "the search finds what it looks for"
    assert [place for path in TITAN.rglob("*.py") if path not in ALLOWED for place in branches(path)] == []


@pytest.mark.parametrize("gpu", [False, True])
def test_auto_follows_the_device_and_explicit_values_follow_the_recipe(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(device, "on_accelerator", lambda: gpu)
    monkeypatch.setattr(device, "has_torch_for", lambda key: True)
    assert device.loss_chunks("auto", 2048) == (8 if gpu else 1)
    assert device.loss_chunks("auto", 2050) == 1, "8 does not divide it"
    assert device.adamw_implementation("auto") == ("fused" if gpu else "foreach")
    assert device.loss_chunks(4, 2048) == 4
    assert device.adamw_implementation("for-loop") == "for-loop"
    monkeypatch.setattr(device, "has_torch_for", lambda key: key != "loss.chunks")
    assert device.loss_chunks("auto", 2048) == 1, "torch is too old"


@pytest.mark.parametrize("instructions", [False, True])
def test_passes_are_in_float32_on_a_cpu_without_instructions_for_bfloat16(
    monkeypatch: pytest.MonkeyPatch, instructions: bool
) -> None:
    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: instructions)
    assert device.passes_dtype("auto", "cpu") == ("bfloat16" if instructions else "float32")
    assert device.passes_dtype("auto", "cuda") == "bfloat16"
    assert device.passes_dtype("bfloat16", "cpu") == "bfloat16"
