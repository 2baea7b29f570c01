"""Benchmarks, baselines and counters; tests may import from here."""
