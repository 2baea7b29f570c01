"""`idle = "hold"`: a matrix with a gradient of zeros is only decayed, and named once. Bits: tests/parity."""

import warnings

import torch
from torch import nn

from tests.dist.harness import on_ranks
from tests.dist.small_params import full, parameters, placed
from titan_muon import Expert, Muon
from titan_muon.features.mask import IDLE_STEPS


@on_ranks(2)
def test_an_idle_matrix_is_only_decayed_and_named_once(rank: int) -> None:
    """Also a tensor of rank-specific values, idle on rank 1.

    From the second step on, a matrix and an expert are idle, and a quarter of another matrix is zero.
    """
    params, own = parameters(), nn.Parameter(torch.full((4, 6), 1.0 + rank))
    expected = own.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        muon = Muon([*params.items(), ("own", own)], lr=0.02, expert=Expert(idle="hold", replicas="redundant")).build()
        for seed in range(1, IDLE_STEPS + 4):
            grads = {name: full(name, seed) for name in params}
            if seed > 1:
                grads["layers.0.weight"].zero_()
                grads["layers.1.weight"][:6] = 0
                grads["layers.2.experts"][2] = 0
            for name, grad in grads.items():
                params[name].grad = placed(grad)
            own.grad = torch.ones(4, 6) * (seed == 1 or rank == 0)
            muon.step()
            expected = own.detach().clone() if seed == 1 else expected * (1 - 0.02 * 0.1)
    assert torch.equal(own, expected) == (rank > 0)
    (text,) = (str(w.message) for w in caught if "zero in each" in str(w.message))
    assert text.startswith(f"layers.0.weight, layers.2.experts 2{', own' if rank else ''}: the gradient was zero")
