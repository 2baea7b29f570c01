"""benchmarks/bench_training.py: ratios of pairs, counts over all ranks, and equal bits."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import bench_training
from benchmarks.bench_training import Arguments, Figures, Sent, Times
from tests import tiny


def figures(overlap: str, cpu: list[float]) -> Figures:
    """All but a second of each step before the optimizers' own, and 2 seconds on the clock."""
    return Figures(overlap, tuple(Times(seconds - 1, 1.0, 2.0) for seconds in cpu), Sent(4, 1_000, 2), bitwise=True)


def test_the_time_is_the_slowest_ranks_and_cpu_time_is_a_sum_over_ranks() -> None:
    total = bench_training.together([Times(3.0, 1.0, 7.0), Times(2.0, 2.0, 9.0)])
    assert total == Times(5.0, 3.0, 9.0)
    assert total.cpu == 8.0


def test_sent_bytes_are_a_sum_over_ranks() -> None:
    assert bench_training.all_sent([Sent(2, 100, 1), Sent(3, 50, 0)]) == Sent(5, 150, 1)


def test_a_ratio_is_the_median_of_paired_ratios() -> None:
    """The machine was slow in the middle, for both: medians, 6 and 2, would have 3."""
    ratio = bench_training.ratio([1.0, 6.0, 40.0, 9.0, 4.0], [2.0, 2.0, 20.0, 10.0, 1.0])
    assert (ratio.lower, ratio.median, ratio.upper) == pytest.approx((0.9, 2.0, 3.0))


def test_the_table_has_sent_bytes_and_quartiles_of_ratios() -> None:
    rows = [figures("none", [2.0, 4.0, 2.0]), figures("backward", [2.0, 5.0, 3.0])]
    none, backward = bench_training.table(rows).splitlines()[2:]
    assert none == "| none | 2,000.0 | 1,000.0 | 1,000.0 | 2,000.0 | 4 | 2 | 1,000 | equal |"
    assert backward.startswith("| backward | 3,000.0 | 2,000.0 | 1,000.0 |")
    text = "median 1.2500 of 3 pairs, quartiles 1.1250 to 1.3750"
    assert bench_training.ratios(rows) == f"CPU time of a training step, backward / none: {text}"


def test_same_bits_detects_a_single_different_bit() -> None:
    ones = [torch.ones(2), torch.ones(3)]
    assert bench_training.same_bits(ones, [torch.ones(2), torch.ones(3)])
    assert not bench_training.same_bits(ones, [torch.ones(2), torch.tensor([1.0, 1.0, 1.0 + 2**-23])])


def test_figures_survive_a_json_round_trip() -> None:
    rows = [figures("none", [2.0, 4.0]), figures("backward", [2.0, 5.0])]
    assert bench_training.read(json.dumps([asdict(row) for row in rows])) == rows


@pytest.mark.parametrize(("values", "says"), [({"nproc": 0}, "--nproc must be at least 1"), ({"steps": 1}, "--steps")])
def test_a_wrong_number_is_refused(values: dict[str, int], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        Arguments(**values)


@pytest.mark.parametrize(
    ("keys", "says"),
    [(("--muon.lrr", "1"), "lrr"), (("--parallelism.tensor_parallel_degree", "3"), "tensor_parallel_degree")],
)
def test_a_wrong_key_is_refused_before_the_first_measurement(keys: tuple[str, ...], says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        bench_training.main(Arguments(nproc=2, steps=2), keys)


@pytest.mark.slow
def test_backward_overlap_sends_the_same_bytes_and_has_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ("--model.name", "llama3", "--model.flavor", "tiny", "--training.seq_len", "32")
    rows = bench_training.main(Arguments(nproc=2, config=tiny.write_recipe(tmp_path), steps=2), keys)
    none, backward, forward, control = rows
    assert [row.overlap for row in rows] == ["none", "backward", "forward", "none"]
    assert none.sent == control.sent
    assert none.sent.bytes_sent == backward.sent.bytes_sent == forward.sent.bytes_sent > 0
    assert none.sent.in_backward == 0 < backward.sent.in_backward < backward.sent.calls
    assert all(row.bitwise for row in rows)
    assert all(len(row.times) == 2 for row in rows)
    assert all(times.passes > 0 and times.step > 0 and times.wall > 0 for row in rows for times in row.times)
    printed = capfd.readouterr().out
    assert "training.seq_len 32, 2 ranks, medians of 2 training steps" in printed
    assert bench_training.ratios(rows) in printed
