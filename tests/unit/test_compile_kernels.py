"""The Triton kernels compile to what each GPU is fast by, and what does not is reported."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which CPU builds of PyTorch lack: make kernels"
)


def faults(capability: int, **changed: object) -> list[str]:
    from benchmarks.compile_kernels import ARCHITECTURES, Case, compiled
    from titan_muon.orthogonalize.symmetric_kernel import TILES, Tile

    target = next(found for found in ARCHITECTURES if found.capability == capability)
    tile = changed.pop("tile", None) or TILES[capability // 10]
    assert isinstance(tile, Tile)
    case = replace(Case(target, "X Xᵀ", "float16", tile), **changed)
    return compiled(case).faults()


@needs_triton
@pytest.mark.parametrize(
    ("variant", "ragged"), [("X Xᵀ", False), ("X Xᵀ, X transposed", True), ("polynomial", False), ("polynomial", True)]
)
def test_ampere_has_its_tensor_cores_without_spills(variant: str, ragged: bool) -> None:
    assert faults(80, variant=variant, ragged=ragged) == []


@needs_triton
@pytest.mark.parametrize("variant", ["X Xᵀ", "X Xᵀ, X transposed", "polynomial"])
@pytest.mark.parametrize("capability", [90, 100])
def test_hopper_and_blackwell_have_theirs_and_copy_by_tma(capability: int, variant: str) -> None:
    assert faults(capability, variant=variant) == []


@needs_triton
def test_a_tile_too_large_for_shared_memory_is_reported() -> None:
    from titan_muon.orthogonalize.symmetric_kernel import Tile

    (fault,) = faults(90, tile=Tile(wide=2, stages=6, tma=True))
    assert fault.endswith("bytes of shared memory of 232,448")


@needs_triton
def test_a_tile_that_spills_is_reported() -> None:
    from titan_muon.orthogonalize.symmetric_kernel import Tile

    (fault,) = faults(100, tile=Tile(wide=2, warps=4, tma=True, specialized=True))
    assert fault.endswith("bytes spilled")


@needs_triton
def test_a_kernel_without_tensor_cores_or_specialization_is_reported() -> None:
    from titan_muon.orthogonalize.symmetric_kernel import Tile

    small = Tile(side=32, depth=32, warps=4, stages=2, specialized=True)
    found = faults(90, tile=small, dtype="float32")
    assert found == ["no wgmma.mma_async", "no cp.async.bulk.tensor.3d.shared", "warps are not specialized"]


@needs_triton
def test_every_product_and_dtype_is_compiled_for_every_gpu() -> None:
    from benchmarks.compile_kernels import VARIANTS, cases
    from titan_muon.orthogonalize.symmetric import HALVES

    found = list(cases())
    whole = {(case.target.capability, case.variant, case.dtype) for case in found if not case.ragged}
    assert whole == {(gpu, variant, dtype) for gpu in (80, 90, 100) for variant in VARIANTS for dtype in HALVES}
    assert {case.variant for case in found if case.ragged} == set(VARIANTS)


def test_all_triton_kernels_are_in_the_file_that_is_compiled() -> None:
    folders = ("titan_muon", "models", "scripts", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = {file.name for file in files if "@triton.jit" in file.read_text(encoding="utf-8")}
    assert found == {"symmetric_kernel.py"}, "benchmarks/compile_kernels.py does not compile it"
