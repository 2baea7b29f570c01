"""The symmetric kernel under Triton's interpreter, and the choice of kernels."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from titan_muon.kernels.measured import MEASURED, kernels_for, measured_kernels
from titan_muon.options import OptionError

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which CPU builds of PyTorch lack: make kernels"
)
# In a separate process, because triton reads TRITON_INTERPRET at import.
PROGRAM = """
import json, torch
from benchmarks.accuracy import relative_error
from titan_muon.engine.orthogonalize import coefficients, iterate
from titan_muon.kernels.measured import product_of
from titan_muon.kernels.symmetric import Tile, symmetric_product

TILES = {
    "one square": Tile(side=32, depth=32, specialized=True),
    "two squares": Tile(side=16, wide=2, depth=16),
}

def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

def error(count, size, inner, dtype, added, tall, tile):
    x = drawn(count, inner, size).mT if tall else drawn(count, size, inner)
    x = x.to(dtype)
    c = drawn(count, size, size, seed=1).to(dtype)
    c = (c + c.mT) if added else None
    out = torch.full((count, size, size), float("nan"), dtype=dtype)
    symmetric_product(x, x.mT, c, alpha=0.5, beta=-2.0, out=out, tile=tile)()
    exact = 0.5 * x.double() @ x.double().mT
    exact = exact - 2 * c.double() if added else exact
    return relative_error(out, exact).max().item(), torch.equal(out, out.mT)

def commuting(dtype, tile):
    r = drawn(2, 48, 48)
    r = (r @ r.mT / 48).to(dtype)
    out = torch.empty_like(r)
    q = (r.double() @ r.double() - r.double()).to(dtype)
    symmetric_product(q, r, q, beta=1.5, out=out, tile=tile)()
    error = relative_error(out, q.double() @ r.double() + 1.5 * q.double()).max().item()
    return error, torch.equal(out, out.mT)

results = {"product": {}, "commuting": {}, "iteration": {}}
for dtype in (torch.float32, torch.float16):
    for name, tile in TILES.items():
        for shape in ((1, 16, 16), (2, 32, 64), (1, 80, 48)):
            for added in (False, True):
                for tall in (False, True):
                    case = f"{dtype} {name} {shape} {added} {tall}"
                    results["product"][case] = error(*shape, dtype, added, tall, tile)
        results["commuting"][f"{dtype} {name}"] = commuting(dtype, tile)
    stack, steps, triton = drawn(2, 48, 80), coefficients("you_jiacheng", 5), product_of("triton")
    exact = iterate(stack.double(), steps, 1e-7, torch.float64)
    for name, found in (
        ("standard", iterate(stack, steps, 1e-7, dtype, (), triton)),
        ("tall", iterate(stack.mT.contiguous(), steps, 1e-7, dtype, (), triton).mT),
        ("gram", iterate(stack, steps, 1e-7, dtype, (2, 3), triton)),
    ):
        results["iteration"][f"{dtype} {name}"] = relative_error(found, exact).max().item()
refused = []
one, wide, square = torch.ones(1, 16, 16), torch.ones(1, 16, 40), torch.empty(1, 16, 16)
for a, b, c, out in (
    (one, torch.ones(1, 32, 16), None, square),
    (one, torch.ones(2, 16, 16), None, square),
    (wide, wide.mT, None, square),
    (wide[:, :, :16], wide[:, :, :16].mT, None, square),
    (wide[:, :, ::2][:, :, :16], one, None, square),
    (one, one, one.mT, square),
    (one, one, one, square.mT),
):
    try:
        symmetric_product(a, b, c, out=out)()
    except ValueError as problem:
        refused.append(str(problem))
print(json.dumps({**results, "refused": refused}))
"""
TOLERANCES = {"torch.float32": 1e-5, "torch.float16": 2e-3}


@cache
def interpreted() -> dict:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@needs_triton
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_products_of_the_kernel_approximate_float64_and_are_symmetric_bit_for_bit(dtype: str) -> None:
    results = {k: r for kind in ("product", "commuting") for k, r in interpreted()[kind].items() if k.startswith(dtype)}
    assert len(results) == 24 + 2
    for case, (error, symmetric) in results.items():
        assert error < TOLERANCES[dtype], case
        assert symmetric, f"{case}: the mirror tiles are the tiles, also those of a diagonal square"
    for algorithm in ("standard", "tall", "gram"):
        assert interpreted()["iteration"][f"{dtype} {algorithm}"] < 2 * TOLERANCES[dtype], algorithm


@needs_triton
def test_unfit_shapes_are_refused() -> None:
    messages = interpreted()["refused"]
    assert ["(count, m, k)" in problem for problem in messages] == [True] * 2 + [False] * 5
    assert ["multiples of 16" in problem for problem in messages] == [False] * 2 + [True] * 5


def test_shipped_kernels_are_of_the_named_gpu_and_need_the_kernels_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [{"dtype": "float16", "rows": 256, "products": name} for name in ("plain", "triton")]
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"GPU X": {"source": "measured", "kernels": kernels}}))
    for packages in ([], ["triton"]):
        monkeypatch.setattr("titan_muon.kernels.measured.installed", lambda packages=packages: packages)
        assert [entry["products"] for entry in measured_kernels("GPU X", file)] == ["plain", *packages]
    assert measured_kernels("GPU Y", file) == []


def test_the_shipped_file_has_measured_entries_of_known_kernels_alone() -> None:
    document = json.loads(MEASURED.read_text())
    assert all(entry["source"] == "measured" for entry in document.values())
    assert {kernel["products"] for entry in document.values() for kernel in entry["kernels"]} <= {"plain", "triton"}


def test_the_cpu_has_plain_products() -> None:
    assert kernels_for("auto", torch.device("cpu")) == kernels_for("plain", torch.device("cpu")) == ()


def test_a_gpu_without_a_tensor_memory_accelerator_refuses_the_symmetric_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("titan_muon.kernels.measured.installed", lambda: ["triton"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(OptionError, match=r"compute capability 9 or 10 .* choose 'auto'"):
        kernels_for("triton", torch.device("cuda"))
