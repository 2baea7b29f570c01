"""The benchmark of orthogonalization: right figures, and early errors for wrong arguments."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_orthogonalize as bench
from tests.dist.harness import run_program
from titan_muon.orthogonalize import COEFFICIENTS, Method
from titan_muon.plan.terms.work import standard_flops

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

CPU = bench.Bench(torch.device("cpu"), 1, 1e12, ())


def run(*arguments: str) -> tuple[int, str]:
    return run_program(str(BENCHMARKS / "bench_orthogonalize.py"), *arguments, timeout=240)


def test_rows_count_the_methods_flops_and_ratios_compare_with_the_first_row() -> None:
    contenders = [bench.torchs(8, 16, 2), bench.ours(Method("standard", "float32"), 8, 16, 2)]
    first, second = bench.compare("some", (2, 8, 16), contenders, CPU)
    assert (first.name, first.shape, first.faster) == (bench.TORCH, "2 x (8 x 16)", 1)
    assert second.tflops * 1e12 * second.ms / 1e3 == pytest.approx(2 * standard_flops(8, 16, 5))
    assert second.of_matmul == pytest.approx(second.tflops)
    assert second.faster == pytest.approx(first.ms / second.ms)


def test_hard_matrices_have_the_named_spectra() -> None:
    values = torch.linalg.svdvals(bench.hard_matrix("log 1 to 1e-4", 20, 30))
    assert torch.allclose(values, torch.logspace(0, -4, 20, dtype=torch.float64))
    values = torch.linalg.svdvals(bench.hard_matrix("rank 8 + noise", 20, 30))
    assert values[7] > 100 * values[8] > 0


@pytest.mark.slow
def test_errors_cover_every_set_and_defaults_are_below_bfloat16() -> None:
    rows = list(bench.errors(CPU, [(48, 48), (40, 96)]))
    assert {row.coefficients for row in rows} == set(COEFFICIENTS)
    errors = {(row.shape, row.spectrum, row.coefficients, row.name): row.error for row in rows}
    for (*key, name), error in errors.items():
        if name.startswith("auto"):
            assert error <= errors[*key, "standard bfloat16"]


@pytest.mark.slow
def test_a_share_is_a_ranks_part_of_the_plan(tmp_path: Path) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    code, shown = run("--share", "qwen_moe:16:0", "--repeats", "1", "--json", str(file), "--picture", str(picture))
    assert code == 0, shown
    figures = json.loads(file.read_text())
    assert figures["errors"] == []
    assert next(row["name"] for row in figures["rows"]) == bench.TORCH
    # 4 layers of 4 attention matrices and 3 x 16 experts; each of 16 ranks has the same number.
    assert {row["shape"] for row in figures["rows"]} == {"13 matrices"}
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--share", "qwen3_8b:64"), "write MODEL:WORLD:RANK"),
        (("--share", "qwen3_8b:64:64"), "with RANK below WORLD"),
        (("--device", "tpu"), "tpu"),
        (("--json", "/no/such/folder/figures.json"), "there is no folder /no/such/folder"),
        pytest.param(
            ("--device", "cuda"),
            "PyTorch finds no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_a_wrong_argument_is_refused_before_the_first_measurement(arguments: tuple[str, ...], says: str) -> None:
    code, shown = run(*arguments)
    assert code != 0
    assert says in shown
    assert "Traceback" not in shown
