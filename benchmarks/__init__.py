"""Benchmarks, baselines and counters; tests may import from here."""

from collections.abc import Sequence
from statistics import median, quantiles


def spread(times: Sequence[float]) -> float:
    """Half of the range of the middle half of `times`, over their median; 0 for fewer than two times."""
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / 2 / median(times)
