"""The host's part of a step is measured without Newton-Schulz, beside AdamW, on the plan of a real model."""

import torch

from benchmarks import host_cost


def test_a_small_model_is_measured() -> None:
    """Many of its parameters are experts, and every step of the fake world stays finite."""
    threads = torch.get_num_threads()
    cost = host_cost.measured(host_cost.Case("qwen3_0.6b_muon", 1, 8), repeats=2, profile=False)
    assert cost.parameters > 100
    assert cost.pieces >= cost.parameters
    assert cost.muon > 0
    assert cost.adamw > 0
    assert host_cost.table({"dense_560": cost}).count("\n") == 2
    torch.set_num_threads(threads)
