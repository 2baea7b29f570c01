"""Benchmarks, what they compare with, and the counters that they measure by; tests may import from here."""
