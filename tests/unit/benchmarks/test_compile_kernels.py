"""Tiles of the Triton kernels by GPU. `make kernels` compiles every kernel for every GPU and fails on a slow one."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which CPU builds of PyTorch lack: make kernels"
)


@needs_triton
def test_a_gpu_uses_the_tile_of_its_architecture_with_the_earliest_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from titan_muon.kernels.symmetric import TILES, fastest, tile_on

    wide, narrow = TILES[9]
    tiles = {shape: fastest((wide, narrow), *shape) for shape in ((8192, 1, 132), (4096, 1, 132), (4096, 1, 148))}
    assert tiles == {(8192, 1, 132): wide, (4096, 1, 132): narrow, (4096, 1, 148): wide}
    # 4,096 rows on 132 processors end first in the second tile, where there are two.
    for major, tile in {9: TILES[9][1], 10: TILES[10][1]}.items():
        gpu = SimpleNamespace(major=major, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        assert tile_on(torch.device("cuda"), 4096, 1) == tile
    assert tile_on(torch.device("cpu"), 4096, 1) == TILES[9][1]


def test_every_triton_kernel_is_in_a_compiled_file() -> None:
    folders = ("titan_muon", "models", "scripts")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    names = {file.name for file in files if "@triton.jit" in file.read_text(encoding="utf-8")}
    assert names == {"symmetric.py", "passes.py"}, "benchmarks/compile_kernels.py does not compile it"
