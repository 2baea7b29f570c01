"""`idle = "hold"`: a matrix with a gradient of zeros is only decayed, and named once. Bits: tests/parity."""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, full, parameters, placed
from titan_muon import Expert, Muon
from titan_muon.features.mask import IDLE_STEPS


def train(rank: int, world_size: int) -> tuple[bool, list[str]]:
    """Whether a tensor of rank-specific values, idle on rank 1, is only decayed there; and the warnings.

    From the second step on, a matrix and an expert are idle, and a quarter of another matrix is zero.
    """
    mesh = init_device_mesh("cpu", (world_size,))
    params, own = parameters(mesh), nn.Parameter(torch.full((4, 6), 1.0 + rank))
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
                params[name].grad = placed(grad, mesh)
            own.grad = torch.ones(4, 6) * (seed == 1 or rank == 0)
            muon.step()
            expected = own.detach().clone() if seed == 1 else expected * (1 - 0.02 * 0.1)
    return torch.equal(own, expected), [str(w.message) for w in caught if "zero in each" in str(w.message)]


def test_an_idle_matrix_is_only_decayed_and_named_once() -> None:
    for rank, (decayed, (text,)) in enumerate(run_ranks(train, 2, timeout=3 * SECONDS)):
        assert decayed == (rank > 0)
        assert text.startswith(f"layers.0.weight, layers.2.experts 2{', own' if rank else ''}: the gradient was zero")
