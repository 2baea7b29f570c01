"""The balance of published models at scale, on TorchTitan's layouts: limits for the planner."""

from functools import cache

import pytest

from benchmarks.plan_scale import model_seconds
from benchmarks.plan_scale import plan_numbers as planned

# Shared by several tests.
plan_numbers = cache(planned)

# The hardest cases: fewest matrices per rank, longest waits between buckets, and links faster than Newton-Schulz. On
# slower links owners are even by bytes. benchmarks/plan_scale.py has all worlds.
# Limits: FLOPs of the busiest rank over their bound; the modelled step without passes over its bound; the step over the
# bound for whole matrices. Whole matrices do not divide evenly, and the first gather and the last return are exposed:
# the part above 1. It grows where the passes get shorter, because links hide behind them.
WORLDS = [
    ("qwen3_8b", 8, 1.11, 1.01, 1.01),
    ("qwen3_8b", 64, 1.11, 1.29, 1.09),
    ("qwen3_8b", 128, 1.35, None, None),
    ("llama3_8b", 64, 1.11, None, None),
    ("llama3_70b", 64, 1.11, 1.04, 1.03),
    ("llama3_70b", 128, None, 1.12, 1.08),
    ("llama3_70b", 256, 1.35, 1.42, 1.05),
    ("qwen3_30b_a3b", 64, 1.11, 1.06, 1.04),
    ("deepseek_v3", 64, 1.11, None, None),
    # 77,354 matrices, including heads of attention. No limit for FLOPs: with owners even by FLOPs and as many
    # rounds, a step would take 200 ms instead of 187, because the links take longer than Newton-Schulz.
    pytest.param("kimi_k2", 512, None, 0.97, 1.20, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "ranks", "flops_bar", "bar", "whole_bar"), WORLDS)
def test_a_plan_is_close_to_the_lower_bounds(
    model: str, ranks: int, flops_bar: float | None, bar: float | None, whole_bar: float | None
) -> None:
    numbers = plan_numbers(model, ranks)
    assert numbers.orthogonalizations == numbers.matrices, "each matrix once in the world"
    assert numbers.buffers_gib <= 4.0
    parts = numbers.newton_schulz_ms + numbers.passes_ms + numbers.waits_ms
    assert numbers.step_ms == pytest.approx(parts)
    if flops_bar is not None:
        assert numbers.flops_over_bound <= flops_bar
    if bar is not None:
        assert numbers.ratio_without_passes <= bar
    if whole_bar is not None:
        assert 1 <= numbers.step_ms / numbers.whole_ms <= whole_bar
    if ranks == 64 and model in ("qwen3_8b", "llama3_8b", "qwen3_30b_a3b"):
        assert numbers.collectives <= 8


def test_returns_hidden_in_forward_are_not_in_the_step() -> None:
    without = plan_numbers("llama3_8b", 64, replicas=8)
    overlapped = plan_numbers("llama3_8b", 64, overlap="forward", replicas=8)
    assert without.hidden_ms == 0 < overlapped.hidden_ms
    assert overlapped.link_ms < without.link_ms
    assert overlapped.step_ms < 0.65 * without.step_ms
    assert overlapped.exposed_ms <= min(overlapped.waits_ms, 0.25 * without.exposed_ms)


@pytest.mark.parametrize(
    ("model", "billions"),
    # As published: Kimi K2 activates 32 of 1,026 billion, with 1.2 billion in the embedding; Llama 3 8B has 0.5 of 8
    # there.
    [("llama3_8b", 7.50), ("kimi_k2", 31.7)],
)
def test_model_flops_count_only_activated_parameters(model: str, billions: float) -> None:
    assert model_seconds(model) == pytest.approx(8192 * 6 * billions * 1e9 / 400e12, rel=2e-3)


def test_replicas_add_return_traffic_and_no_orthogonalization() -> None:
    single, eight = (plan_numbers("llama3_8b", 64, replicas=replicas) for replicas in (1, 8))
    assert eight.orthogonalizations == single.orthogonalizations
    assert eight.link_ms > single.link_ms
