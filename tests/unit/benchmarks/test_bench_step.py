"""benchmarks/bench_step.py measures right figures on a tiny model, and refuses wrong arguments."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks import bench_step, contenders
from tests.dist.harness import run_program

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

RANKS = 2
MODEL = contenders.MODELS["tiny"]
ELEMENTS = sum(rows * cols for rows, cols in MODEL.shapes.values()) * MODEL.layers
MATRICES = len(MODEL.shapes) * MODEL.layers
OURS = ("all_gather", "all_to_all", "all_gather_reduce_scatter")


def bench(*arguments: str) -> tuple[int, str]:
    return run_program(str(BENCHMARKS / "bench_step.py"), *arguments, timeout=240)


@cache
def result(folder: Path) -> tuple[str, dict]:
    path = folder / "figures.json"
    code, shown = bench("--nproc", str(RANKS), "--model", "tiny", "--repeats", "2", "--json", str(path))
    assert code == 0, shown
    return shown, json.loads(path.read_text())


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    return result(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def rows(output: tuple[str, dict]) -> dict[str, dict]:
    return {row["name"]: row for row in output[1]["rows"]}


@pytest.mark.slow
def test_every_optimizer_is_compared_in_table_and_file(output: tuple[str, dict], rows: dict[str, dict]) -> None:
    text, figures = output
    assert list(rows) == list(contenders.contenders("cpu"))
    assert {key: figures[key] for key in ("model", "nproc", "repeats")} == {
        "model": "tiny",
        "nproc": RANKS,
        "repeats": 2,
    }
    for row in rows.values():
        line = next(line for line in text.splitlines() if line.startswith(f"| {row['name']} |"))
        assert f"| {row['ms']:.1f} | {row['ratios'][0]:.3f} | {row['ratios'][1]:.3f} |" in line
        assert f"| {row['cpu_ms']:.1f} | {row['cpu_ratios'][0]:.3f} | {row['cpu_ratios'][1]:.3f} |" in line


@pytest.mark.slow
def test_ratios_compare_with_all_gather_and_dist_muon(rows: dict[str, dict]) -> None:
    assert rows["all_gather"]["ratios"][0] == rows["DistMuon"]["ratios"][1] == 1
    assert rows["all_gather"]["cpu_ratios"][0] == rows["DistMuon"]["cpu_ratios"][1] == 1
    assert all(row["ms"] > 0 and row["cpu_ms"] > 0 for row in rows.values())


def test_the_time_is_the_slowest_ranks_and_cpu_time_is_a_sum_over_ranks() -> None:
    """Two ranks, one turn, two contenders."""
    ranks = [[[(1.0, 0.5), (3.0, 2.0)]], [[(2.0, 0.25), (1.0, 1.0)]]]
    assert bench_step.combined(ranks) == ([[2.0, 3.0]], [[0.75, 3.0]])


@pytest.mark.slow
def test_every_contender_with_torchs_arithmetic_is_bitwise_equal(rows: dict[str, dict]) -> None:
    same = [name for name in rows if name not in contenders.OTHER_ARITHMETIC]
    assert {name: (rows[name]["bitwise"], rows[name]["error"]) for name in same} == dict.fromkeys(same, (True, 0.0))
    assert 0 < rows["all_to_all, auto"]["error"] < 0.05


@pytest.mark.slow
def test_adamw_sends_no_byte_and_multiplies_no_matrix(rows: dict[str, dict]) -> None:
    counts = rows["AdamW"]["counts"]
    assert (counts["bytes_sent"], counts["calls"], counts["agreements"], counts["ns_flops"]) == (0, 0, 0, 0)


@pytest.mark.slow
def test_every_scheme_has_the_expected_bytes_and_calls(rows: dict[str, dict]) -> None:
    others = RANKS - 1
    share = ELEMENTS // RANKS
    counted = {name: (row["counts"]["bytes_sent"], row["counts"]["calls"]) for name, row in rows.items()}
    assert counted["torch.optim.Muon, gathered"] == (share * others * 4, MATRICES)
    assert counted["all_gather"] == (share * others * 2, 1)
    assert counted["all_gather_reduce_scatter"] == (2 * share * others * 2, 2)
    # Two ranks send equal bytes: shards of the peer's matrices, and updates of local matrices.
    assert counted["all_to_all"] == (share * others * 2, 2)
    assert counted["DistMuon"] == (share * others * 4, 2 * MODEL.layers)
    assert {name: row["counts"]["agreements"] for name, row in rows.items()} == {
        name: int(name in (*OURS, "all_to_all, auto")) for name in rows
    }


@pytest.mark.slow
def test_redundant_schemes_count_the_flops_of_every_matrix(rows: dict[str, dict]) -> None:
    flops = {name: row["counts"]["ns_flops"] for name, row in rows.items()}
    every = sum(5 * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3) for shape in MODEL.shapes.values())
    assert flops["torch.optim.Muon, gathered"] == flops["all_gather"] == every * MODEL.layers
    for name in ("all_to_all", "all_gather_reduce_scatter", "DistMuon"):
        assert every / RANKS <= flops[name] < every


@pytest.mark.slow
def test_bytes_kept_include_gathered_parameters_and_momentum(rows: dict[str, dict]) -> None:
    counts = {name: row["counts"] for name, row in rows.items()}
    # Whole copies of the parameters and the momentum.
    assert counts["torch.optim.Muon, gathered"]["bytes_kept"] >= 4 * (2 * ELEMENTS - ELEMENTS // RANKS)
    for name in OURS:
        assert counts[name]["bytes_kept"] < 1024, "buffers take memory in the step"
        assert counts[name]["bytes_new"] > 2 * ELEMENTS // RANKS


def test_allocated_counts_freed_and_remaining_bytes() -> None:
    def work() -> torch.Tensor:
        torch.ones(250_000).add(1)
        return torch.ones(1000)

    returned, most, left = bench_step.allocated(work)
    assert returned.numel() == 1000
    assert 2_000_000 <= most < 2_010_000
    assert 4000 <= left < 5000


def test_kept_counts_every_live_storage_once() -> None:
    def work() -> list[torch.Tensor]:
        torch.ones(250_000).add(1)
        whole, emptied = torch.ones(1000), torch.ones(5000)
        emptied.untyped_storage().resize_(0)
        return [whole, whole[10:], torch.nn.Parameter(torch.ones(500)), emptied]

    _, left = bench_step.kept(work)
    assert left == 6000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--nproc", "0"), "--nproc must be at least 1"),
        (("--repeats", "0"), "--repeats must be at least 1"),
        (("--model", "gpt5"), "gpt5"),
        (("--device", "cuda", "--nproc", "99"), "--device cuda --nproc 99: PyTorch finds"),
        (("--json", "/no/such/folder/figures.json"), "/no/such/folder"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_first_measurement(arguments: tuple[str, ...], says: str) -> None:
    code, shown = bench(*arguments)
    assert code != 0
    assert says in shown
    assert "Traceback" not in shown
