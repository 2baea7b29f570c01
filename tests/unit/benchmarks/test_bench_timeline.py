"""benchmarks/bench_timeline.py: a machine goes through the measured rates, and a run has figures of both clocks."""

import pytest

from benchmarks import bench_timeline
from benchmarks.bench_timeline import Rates, machine_of


@pytest.mark.parametrize(
    "flops", [(1e9, 4e9), (4e9, 5e9), (5e9, 5e9)], ids=["much slower when small", "a little slower", "alike"]
)
def test_the_machine_has_the_measured_newton_schulz_rates_of_small_and_large(flops: tuple[float, float]) -> None:
    rates = Rates((64, 512), flops, 1e10, 2e9, 1e-4, 5e-6)
    machine = machine_of(rates)
    assert machine.rate("float32", 512) == pytest.approx(flops[1])
    assert machine.rate("float32", 64) == pytest.approx(flops[0], rel=0.02)
    assert (machine.network.bandwidth, machine.node.latency, machine.memory, machine.launch) == (2e9, 1e-4, 1e10, 5e-6)


@pytest.mark.parametrize("flops", [(5e9, 1e9), (1e9, 9e9)], ids=["faster when small", "slower than any side explains"])
def test_impossible_rates_keep_the_rate_of_large_matrices(flops: tuple[float, float]) -> None:
    machine = machine_of(Rates((64, 512), flops, 1e10, 2e9, 1e-4, 5e-6))
    assert machine.rate("float32", 512) == pytest.approx(flops[1])


@pytest.mark.slow
def test_a_run_prints_the_clock_beside_the_timeline(capfd: pytest.CaptureFixture[str]) -> None:
    ratio = bench_timeline.main(nproc=2, model="tiny", repeats=1, steps=1)
    assert ratio > 0
    assert f"{ratio:.3f} |" in capfd.readouterr().out
