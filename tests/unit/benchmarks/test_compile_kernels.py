"""Triton kernels compile to each GPU's fast instructions; the report names slow kernels."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from benchmarks.compile_kernels import Case

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which CPU builds of PyTorch lack: make kernels"
)


def case(capability: int, index: int = 0, **changed: object) -> "Case":
    from benchmarks.compile_kernels import ARCHITECTURES, Case
    from titan_muon.kernels.symmetric import TILES

    target = next(gpu for gpu in ARCHITECTURES if gpu.capability == capability)
    return replace(Case(target, "X Xᵀ", "float16", TILES[capability // 10][index]), **changed)


def faults(capability: int, index: int = 0, **changed: object) -> list[str]:
    from benchmarks.compile_kernels import compiled

    return compiled(case(capability, index, **changed)).faults()


CASES = [(80, {"variant": "X Xᵀ, X transposed", "ragged": True}), (80, {"variant": "polynomial"})]
CASES += [(gpu, {"index": index, "variant": "polynomial"}) for gpu in (90, 100) for index in (0, 1)]


@needs_triton
@pytest.mark.parametrize(("capability", "kernel"), CASES, ids=str)
def test_the_kernel_uses_tensor_cores_and_tma_without_spills(capability: int, kernel: dict[str, Any]) -> None:
    """On Ampere without TMA."""
    assert faults(capability, **kernel) == []


@needs_triton
def test_a_tile_too_large_for_shared_memory_fails_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import compile_kernels
    from titan_muon.kernels.symmetric import Tile

    large = case(90, tile=Tile(wide=2, stages=6, tma=True))
    monkeypatch.setattr(compile_kernels, "cases", lambda: [large])
    monkeypatch.setattr(compile_kernels, "ARCHITECTURES", ())
    assert compile_kernels.main() == 1
    printed = capsys.readouterr()
    assert "bytes of shared memory of 232,448 |\n" in printed.out
    assert "not to be used as they are: 1" in printed.err


@needs_triton
def test_every_product_and_dtype_is_compiled_for_every_gpu() -> None:
    from benchmarks.compile_kernels import VARIANTS, cases
    from titan_muon.engine.orthogonalize.dispatch import HALVES
    from titan_muon.kernels.symmetric import TILES

    compiled = list(cases())
    whole = {(case.target.capability, case.tile, case.variant, case.dtype) for case in compiled if not case.ragged}
    tiles = [(10 * major, tile) for major, tiles in TILES.items() for tile in tiles]
    assert whole == {(*tile, variant, dtype) for tile in tiles for variant in VARIANTS for dtype in HALVES}
    assert {gpu for gpu, *_ in whole} == {80, 90, 100}
    assert {kernel.variant for kernel in compiled if kernel.ragged} == set(VARIANTS)


@needs_triton
def test_a_gpu_uses_the_tile_with_the_earliest_end_of_its_or_the_oldest_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from titan_muon.kernels.symmetric import TILES, fastest, tile_on

    wide, narrow = TILES[9]
    tiles = {shape: fastest((wide, narrow), *shape) for shape in ((8192, 1, 132), (4096, 1, 132), (4096, 1, 148))}
    assert tiles == {(8192, 1, 132): wide, (4096, 1, 132): narrow, (4096, 1, 148): wide}
    # 4,096 rows on 132 processors end first in the second tile, where there are two.
    expected = {8: TILES[8][0], 9: TILES[9][1], 10: TILES[10][1], 12: TILES[8][0]}
    for major, tile in expected.items():
        gpu = SimpleNamespace(major=major, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        assert tile_on(torch.device("cuda"), 4096, 1) == tile
    assert tile_on(torch.device("cpu"), 4096, 1) == TILES[8][0]


@needs_triton
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_a_pass_reads_16_bytes_at_once_without_spills(capability: int, aligned: bool) -> None:
    from benchmarks.compile_kernels import OPERANDS, VECTOR, CompiledPass, compiled_pass, pass_cases

    def compiled_as(flat: bool, kernel: str) -> CompiledPass:
        cases = (case for case in pass_cases() if case.target.capability == capability and case.kernel == kernel)
        return compiled_pass(next(case for case in cases if (case.flat, case.aligned) == (flat, aligned)))

    for kernel in OPERANDS:
        # Rows with strides need the most registers.
        for result in (compiled_as(True, kernel), compiled_as(False, kernel)):
            assert result.faults() == []
            assert all(VECTOR in name for name in result.accesses) == aligned


def test_every_triton_kernel_is_in_a_compiled_file() -> None:
    folders = ("titan_muon", "models", "scripts")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    names = {file.name for file in files if "@triton.jit" in file.read_text(encoding="utf-8")}
    assert names == {"symmetric.py", "passes.py"}, "benchmarks/compile_kernels.py does not compile it"
