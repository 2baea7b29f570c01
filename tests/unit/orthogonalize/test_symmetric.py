"""The symmetric kernel under Triton's interpreter, and the choice of kernels and tiles. `make kernels` compiles it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_muon.kernels.dispatch import MEASURED, kernels_for, measured_kernels
from titan_muon.options import OptionError

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which CPU builds of PyTorch lack: make kernels"
)
# In a separate process, because triton reads TRITON_INTERPRET at import.
PROGRAM = """
import itertools, torch
from benchmarks.accuracy import relative_error
from titan_muon.engine.orthogonalize import coefficients, iterate
from titan_muon.kernels.dispatch import product_of
from titan_muon.kernels.symmetric import Tile, symmetric_product

TILES = Tile(side=32, depth=32, specialized=True), Tile(side=16, wide=2, depth=16)

def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

def check(a, b, c, alpha, beta, tile, tolerance):
    out = torch.full((a.size(0), a.size(1), a.size(1)), float("nan"), dtype=a.dtype)
    symmetric_product(a, b, c, alpha=alpha, beta=beta, out=out, tile=tile)()
    exact = alpha * a.double() @ b.double() + (0 if c is None else beta * c.double())
    assert relative_error(out, exact).max() < tolerance, (a.shape, a.dtype, tile)
    # The mirror tiles are the tiles, also those of a diagonal square.
    assert torch.equal(out, out.mT), (a.shape, a.dtype, tile)

for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
    for tile in TILES:
        for (count, size, inner), added, tall in itertools.product(
            ((1, 16, 16), (2, 32, 64), (1, 80, 48)), (False, True), (False, True)
        ):
            x = (drawn(count, inner, size).mT if tall else drawn(count, size, inner)).to(dtype)
            c = drawn(count, size, size, seed=1).to(dtype)
            check(x, x.mT, c + c.mT if added else None, 0.5, -2.0, tile, tolerance)
        r = drawn(2, 48, 48)
        r = (r @ r.mT / 48).to(dtype)
        q = (r.double() @ r.double() - r.double()).to(dtype)
        check(q, r, q, 1.0, 1.5, tile, tolerance)
    stack, steps, triton = drawn(2, 48, 80), coefficients("you_jiacheng", 5), product_of("triton")
    exact = iterate(stack.double(), steps, 1e-7, torch.float64)
    for found in (
        iterate(stack, steps, 1e-7, dtype, (), triton),
        iterate(stack.mT.contiguous(), steps, 1e-7, dtype, (), triton).mT,
        iterate(stack, steps, 1e-7, dtype, (2, 3), triton),
    ):
        assert relative_error(found, exact).max() < 2 * tolerance
"""


@needs_triton
def test_products_approximate_float64_symmetric_bit_for_bit() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_a_gpu_uses_the_tile_of_its_architecture_with_the_earliest_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_muon.kernels.symmetric import TILES, tile_on

    # 4,096 rows on 132 processors end first in the second tile.
    for major, processors, size, place in ((9, 132, 8192, 0), (9, 132, 4096, 1), (10, 132, 4096, 1), (9, 148, 4096, 0)):
        gpu = SimpleNamespace(major=major, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        assert tile_on(torch.device("cuda"), size, 1) == TILES[major][place]
    assert tile_on(torch.device("cpu"), 4096, 1) == TILES[9][1]


def test_every_triton_kernel_is_in_a_compiled_file() -> None:
    folders = ("titan_muon", "models", "scripts")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    names = {file.name for file in files if "@triton.jit" in file.read_text(encoding="utf-8")}
    assert names == {"symmetric.py", "passes.py"}, "benchmarks/compile_kernels.py does not compile it"


def test_shipped_kernels_are_of_the_named_gpu_and_need_the_kernels_package(tmp_path: Path, monkeypatch: Any) -> None:
    kernels = [{"dtype": "float16", "rows": 256, "products": name} for name in ("plain", "triton")]
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"GPU X": {"source": "measured", "kernels": kernels}}))
    for packages in ([], ["triton"]):
        monkeypatch.setattr("titan_muon.kernels.dispatch.installed", lambda packages=packages: packages)
        assert [entry["products"] for entry in measured_kernels("GPU X", file)] == ["plain", *packages]
    assert measured_kernels("GPU Y", file) == []


def test_the_shipped_file_has_measured_entries_of_known_kernels_alone() -> None:
    document = json.loads(MEASURED.read_text())
    assert all(entry["source"] == "measured" for entry in document.values())
    assert {kernel["products"] for entry in document.values() for kernel in entry["kernels"]} <= {"plain", "triton"}


def test_a_gpu_takes_its_measured_kernels_or_refuses_them_and_a_cpu_has_plain_products(monkeypatch: Any) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert kernels_for("auto", cpu) == kernels_for("plain", cpu) == ()
    monkeypatch.setattr("titan_muon.kernels.dispatch.installed", lambda: ["triton"])
    monkeypatch.setattr("titan_muon.kernels.dispatch.product_of", lambda products: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, products in (("NVIDIA H200", {"plain", "triton"}), ("GPU Y", set())):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert {kernel.products for kernel in kernels_for("auto", cuda)} == products
    # Without a tensor memory accelerator.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(OptionError, match=r"compute capability 9 or 10 .* choose 'auto'"):
        kernels_for("triton", cuda)
