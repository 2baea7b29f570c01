"""The algorithm by shape: safe, cheap, equal for all callers, or refused; kernels, tiles, and the symmetric kernel.

Kernels run under Triton's interpreter. `make kernels` compiles them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.shared import Operators
from titan_muon.engine.orthogonalize import COEFFICIENTS, Method, coefficients, frobenius_norms, iteration, prepared
from titan_muon.engine.orthogonalize.newton_schulz import plain
from titan_muon.kernels.dispatch import MEASURED, Dispatch, Kernel, kernels_for, measured_kernels
from titan_muon.options import OptionError
from titan_muon.planner.machine import MACHINES

JORDAN = coefficients("keller_jordan", 5)
SHAPES = [(4096, 4096), (1024, 4096), (12288, 4096), (768, 2048), (7168, 18432), (128, 4096)]


STEEP = ((8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074))
"""CANS as published, without a margin: each step ends where the next begins to diverge."""
BY_SIZE = [(512, 1, "plain"), (512, 16, "triton"), (1024, 1, "plain"), (2048, 4, "triton"), (4096, 1, "triton")]
KERNELS = (*(Kernel("float16", rows, name, n) for rows, n, name in BY_SIZE), Kernel("bfloat16", 256, "triton"))
GPU, ON_CPU = {"device": "cuda"}, {"device": "cpu", "cpu_bfloat16": False}
WITH_KERNELS = {"device": "cuda", "kernels": KERNELS}
TEN = coefficients("keller_jordan", 10)


def at(share: float) -> Any:
    """A GPU whose float16 has a share of the FLOPs of bfloat16."""
    flops = {"bfloat16": 700e12, "float16": share * 700e12, "float32": 50e12}
    return {"device": "cuda", "gpu": replace(MACHINES["h100x8"], flops=flops)}


# fmt: off
CHOICES: list[tuple[dict[str, Any], int, int, Any, str]] = [
    # Options, rows and columns of a matrix, steps, and the method.
    (GPU, 4096, 4096, JORDAN, "standard float16"),
    (GPU, 4096, 5120, JORDAN, "standard float16"),
    (GPU, 12288, 4096, JORDAN, "gram float16 restart 2"),
    (GPU, 768, 2048, JORDAN, "gram float16 restart 2"),
    (GPU, 8, 4096, JORDAN, "standard float16"),
    (GPU, 1024, 4096, STEEP, "gram float32 restart 2"),
    # Two measurements are never equal; float16 is the more exact of the two.
    (at(0.95), 4096, 4096, JORDAN, "standard float16"),
    (at(0.5), 4096, 4096, JORDAN, "standard bfloat16"),
    # A kernel from the measured size and number of matrices on, for sides that fit.
    (WITH_KERNELS, 256, 1024, JORDAN, "gram float16 restart 2"),
    (WITH_KERNELS, 512, 2048, JORDAN, "gram float16 restart 2 triton from 16 matrices"),
    (WITH_KERNELS, 1024, 4096, JORDAN, "gram float16 restart 2 triton from 16 matrices"),
    (WITH_KERNELS, 2048, 8192, JORDAN, "gram float16 restart 2 triton from 4 matrices"),
    (WITH_KERNELS, 4096, 4096, JORDAN, "standard float16 triton"),
    (WITH_KERNELS, 4096, 4104, JORDAN, "standard float16"),
    (WITH_KERNELS, 4104, 4096, JORDAN, "standard float16"),
    (ON_CPU, 1024, 4096, STEEP, "gram float32 restart 2"),
    # Where float32 is exact enough, restarts are left out.
    (ON_CPU, 256, 1024, JORDAN, "gram float32"),
    (ON_CPU, 257, 1028, JORDAN, "gram float32 restart 2"),
    (ON_CPU, 256, 1023, JORDAN, "gram float32 restart 2"),
    (ON_CPU, 128, 4096, TEN, "gram float32 restart 2,4,6,8"),
    ({"device": "cpu", "cpu_bfloat16": True}, 1024, 4096, STEEP, "gram float32 restart 2"),
]
# fmt: on


@pytest.mark.parametrize(("options", "rows", "cols", "steps", "expected"), CHOICES, ids=range(len(CHOICES)))
def test_the_method_follows_shape_steps_and_measured_rates(
    options: dict[str, Any], rows: int, cols: int, steps: Any, expected: str
) -> None:
    method = Dispatch(**options).choose(rows, cols, steps)
    assert str(method) == expected
    assert " x as fast on " in method.reason, "an automatic choice is printed with the reason"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_dtype_on_a_cpu_follows_the_instructions(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in (("avx2", "float32"), ("avx512_bf16", "bfloat16"), ("bf16", "bfloat16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=name: {"neon": True, name: True})
        assert Dispatch().choose(*shape, JORDAN).dtype == expected


@pytest.mark.parametrize("name", ["keller_jordan", "polar_express", "deepseek_v4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_auto_is_never_slower_by_the_model_than_a_choice_by_hand(shape: tuple[int, int], name: str) -> None:
    steps = coefficients(name, 5 if len(COEFFICIENTS[name]) == 1 else len(COEFFICIENTS[name]))
    for machine in MACHINES.values():
        on_cpu = machine.name.startswith("cpu")
        device, bfloat16 = "cpu" if on_cpu else "cuda", machine.name == "cpu"
        auto = Dispatch("auto", "auto", device, cpu_bfloat16=bfloat16, gpu=machine)
        assert vars(auto.rates).items() <= vars(machine).items()
        best = auto._seconds(auto.choose(*shape, steps), *shape, steps)
        for algorithm in ("standard", "gram"):
            chosen = replace(auto, algorithm=algorithm).choose(*shape, steps)
            assert best <= auto._seconds(chosen, *shape, steps) or max(shape) < 1.5 * min(shape)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_are_bounded_and_large_matrices_are_separate(device: str) -> None:
    auto = Dispatch(device=device, cpu_bfloat16=True)
    for rows, cols in [(64, 64), (128, 512), (768, 2048), (2048, 7168)]:
        method = auto.choose(rows, cols, JORDAN)
        used = method.batch * method.work_bytes(rows, cols, device)
        assert method.batch == 1 or used <= auto.rates.batch_bytes
        assert (method.batch + 1) * method.work_bytes(rows, cols, device) > auto.rates.batch_bytes
    assert auto.choose(8192, 28672, JORDAN).batch == 1
    reference = Dispatch("reference", device=device).choose(64, 64, JORDAN)
    assert (reference.algorithm, reference.dtype, reference.batch > 1) == ("reference", "bfloat16", device == "cuda")


def test_fewer_matrices_than_measured_have_plain_products() -> None:
    made: list[int] = []
    counted = lambda a, *rest, **options: made.append(len(a)) or plain(a, *rest, **options)  # noqa: E731
    method = Method("standard", "float32", products="triton", fewest=3, product=counted)
    for count in (2, 3):
        prepared(iteration("keller_jordan", 5, 1e-7), method, count)(torch.randn(count, 16, 16))
    assert set(made) == {3}


@pytest.mark.parametrize("method", [Method("standard", "float16"), Method("gram", "float16", (2,))], ids=str)
def test_the_operators_of_a_batch_are_counted(method: Method) -> None:
    whole, chosen = torch.zeros(2, 8, 16, dtype=torch.bfloat16, device="meta"), iteration("keller_jordan", 5, 1e-7)
    with Operators() as counter:
        prepared(chosen, method, 2)(whole, norms=frobenius_norms(whole, torch.float16), out=whole)
    allocations = ("aten::empty", "aten::new_empty", "aten::promote_types")
    launched = {f: n for f, n in counter.counts.items() if not (f.is_view or f._schema.name.startswith(allocations))}
    # The last product is copied where the number of runs is even.
    assert method.operators(5) <= sum(launched.values()) <= method.operators(5) + 1


# Kernels: the symmetric kernel under Triton's interpreter, and the choice of kernels and tiles


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
