"""Each program in benchmarks/ runs on a small case, prints its table, and refuses wrong arguments at once."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import (
    bench_orthogonalize,
    bench_step,
    contenders,
    count_launches,
    host_cost,
)
from benchmarks.memory_use import allocated, kept
from benchmarks.rehearsal.launches import BLOCKS, CHUNK, Launches, list_launches
from tests.dist.harness import run_program

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "bench_orthogonalize": (
        "--share qwen_moe:16:0 --repeats 1 --json {folder}/json",
        # 4 layers of 4 attention matrices and 3 x 16 experts; each of 16 ranks has the same number.
        ("| share qwen_moe:16:0 | 13 matrices |",),
        (bench_orthogonalize.TORCH,),
    ),
    "bench_step": (
        "--nproc 2 --model tiny --repeats 2 --json {folder}/json",
        ("tiny, 2 ranks, medians of 2 steps", "| DistMuon |", "| 0, bitwise |"),
        tuple(contenders.contenders("cpu")),
    ),
    "bench_owned": (
        "--nproc 2 --dim 32 --blocks 2 --repeats 1 --json {folder}/json",
        ("| placement | stored | peak |", "| owned |", "| ratio |"),
        ("owned", "sharded"),
    ),
}
"""Arguments of a small run, texts in the output, and names of rows in the file of figures."""


def run(program: str, words: str) -> tuple[int, str]:
    return run_program(str(BENCHMARKS / f"{program}.py"), *words.split(), timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_a_table_and_writes_figures(program: str, tmp_path: Path) -> None:
    words, prints, names = PROGRAMS[program]
    code, shown = run(program, words.format(folder=tmp_path))
    assert code == 0, shown
    assert all(text in shown for text in prints), shown
    if names:
        found = [row["name"] for row in json.loads((tmp_path / "json").read_text())["rows"]]
        assert tuple(found[: len(names)]) == names


@pytest.mark.parametrize(
    ("program", "words", "says"),
    [
        ("bench_orthogonalize", "--share qwen3_8b:64:64", "with RANK below WORLD"),
        ("bench_step", "--device cuda --nproc 99", "--device cuda --nproc 99: PyTorch finds"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_first_measurement(program: str, words: str, says: str) -> None:
    code, shown = run(program, words)
    assert code != 0
    assert says in shown
    assert "Traceback" not in shown


def test_launches_of_a_step_are_counted_without_a_cuda_build() -> None:
    counts = count_launches.counted(count_launches.Row("llama", 4, 1))
    assert counts.collectives > 0
    # With kernels no operator takes the long lists.
    assert 0 < counts.entries < counts.operators <= counts.launches


def test_host_cost_measures_both_optimizers() -> None:
    case = host_cost.Case("llama_muon", 1, 4)
    cost = host_cost.measured(case, repeats=2, profile=False)
    assert min(cost.muon, cost.adamw) > 0
    row = host_cost.table({"dense_560": cost}).splitlines()[-1]
    assert row.startswith(f"| dense_560 @ 64 | {cost.parameters} | {cost.pieces} |")


def test_times_of_ranks_are_combined() -> None:
    """The slowest rank counts on the clock, and all ranks count in CPU time."""
    ranks = [[[(1.0, 0.5), (3.0, 2.0)]], [[(2.0, 0.25), (1.0, 1.0)]]]
    assert bench_step.combined(ranks) == ([[2.0, 3.0]], [[0.75, 3.0]])


def test_allocated_memory_is_counted_to_the_byte() -> None:
    """Tests of the step's memory use both functions."""

    def work() -> list[torch.Tensor]:
        torch.ones(250_000).add(1)
        whole, emptied = torch.ones(1000), torch.ones(5000)
        emptied.untyped_storage().resize_(0)
        return [whole, whole[10:], torch.nn.Parameter(torch.ones(500)), emptied]

    _, most, left = allocated(work)
    assert 2_000_000 <= most < 2_010_000
    assert 6000 <= left < 7000
    assert kept(work)[1] == 6000, "each living storage once"


def test_a_step_without_options_runs_through_few_files_functions_and_classes() -> None:
    """So that a reader can follow it."""
    words = [sys.executable, "-m", "benchmarks.step_counts", "--list"]
    shown = subprocess.run(words, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=True).stdout
    step = re.search(r"second step: (\d+) files, (\d+) functions, (\d+) classes", shown)
    assert step is not None, shown
    assert [int(count) <= most for count, most in zip(step.groups(), (12, 52, 13), strict=True)] == [True] * 3, shown
    for title, most in (("build()", 39), ("build() by the rule", 34)):
        build = re.search(rf"{re.escape(title)}: (\d+) files", shown)
        assert build is not None, shown
        assert int(build[1]) <= most, shown
    assert "  engine/step/step.py MuonStep.bucket" in shown
    assert "  build() planner/planner.py" in shown


# The kernel launches of a step: PyTorch's rules for lists of tensors


def empties(count: int, *shape: int) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for _ in range(count)]


def test_a_launch_takes_as_many_tensors_and_blocks_as_in_pytorch() -> None:
    assert [list_launches(empties(count, 8), 1) for count in (0, 110, 111)] == [0, 1, 2]
    assert list_launches(empties(65, 8), 2) == 2
    assert [list_launches(empties(1, BLOCKS * CHUNK + more), 2) for more in (0, 1)] == [1, 2]


def test_lists_of_unequal_strides_or_dtypes_take_a_launch_for_each_tensor() -> None:
    wide, columns, halves = empties(4, 8, 6), [t[:, :3] for t in empties(4, 8, 6)], [t.half() for t in empties(4, 8, 6)]
    counter = Launches()
    assert counter.weight("_foreach_mul_", (wide,)) == 1
    assert counter.weight("_foreach_copy_", (wide, halves)) == 1
    assert counter.weight("_foreach_add_", (wide, halves)) == 4
    assert counter.weight("_foreach_mul_", (columns,)) == 4, "not dense"
    assert counter.weight("mm", (wide[0], wide[1])) == 1
