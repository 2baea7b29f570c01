"""examples/rl_loop.py: a policy learns while its optimizer's states move to the host and back."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples.rl_loop import train
from tests.dist.harness import run_ranks


def learn(
    _rank: int, _size: int, iterations: int, offload: bool, coefficients: str
) -> tuple[list[float], list[Tensor]]:
    """Rewards and whole weights of a run."""
    policy, rewards = train(iterations, offload=offload, coefficients=coefficients)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in policy.parameters()]
    return rewards, [weight.detach() for weight in weights]


def test_the_policy_learns_and_offload_between_phases_changes_no_bit() -> None:
    offloaded, kept = (run_ranks(learn, 2, 40, offload, "keller_jordan") for offload in (True, False))
    for (rewards, weights), (expected_rewards, expected) in zip(offloaded, kept, strict=True):
        assert sum(rewards[-5:]) / 5 > 0.5 > 0.1 > sum(rewards[:5]) / 5
        assert rewards == expected_rewards
        assert all(torch.equal(weight, other) for weight, other in zip(weights, expected, strict=True))


def test_the_coefficients_of_the_example_reach_muon() -> None:
    plain, filtered = (learn(0, 1, 3, True, coefficients)[1] for coefficients in ("keller_jordan", "pion"))
    assert not all(torch.equal(weight, other) for weight, other in zip(plain, filtered, strict=True))
