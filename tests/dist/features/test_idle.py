"""`idle = "hold"`: a gradient of zeros moves nothing, in any layout. Bits of all layouts: tests/dist/rules."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS, SLICED, full, named, parameters, placed
from titan_muon import Muon
from titan_muon.features.mask import IDLE_STEPS

LR, DECAY, STEPS = 0.02, 0.1, IDLE_STEPS + 3


def gradients(seed: int) -> dict[str, Tensor]:
    """From the second step on, a matrix and an expert are idle, and a quarter of another matrix is zero."""
    grads = {name: full(name, seed) for name in ("layers.0.weight", "layers.1.weight", "layers.2.experts")}
    if seed > 1:
        grads["layers.0.weight"].zero_()
        grads["layers.1.weight"][:6] = 0
        grads["layers.2.experts"][2] = 0
    return grads


def train(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Matrices without an update after the first step, except decay; the warnings; and the number of slices."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = parameters(mesh)
    # A tensor of rank-specific values, idle on rank 1.
    own = nn.Parameter(torch.full((4, 6), 1.0 + rank))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pairs = [*named(params), ("own", own)]
        muon = Muon(pairs, lr=LR, weight_decay=DECAY, idle="hold", replicas="redundant", **options).build()
        for seed in range(1, STEPS + 1):
            for name, grad in gradients(seed).items():
                params[name].grad = placed(grad, mesh)
            own.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            own.grad *= seed == 1 or rank == 0
            if seed == 2:
                expected = {name: param.full_tensor().clone() for name, param in params.items()}
                expected_own = own.detach().clone()
            if seed > 1:
                for tensor in (*expected.values(), expected_own):
                    tensor.mul_(1 - LR * DECAY)
            muon.step()
    after = {name: param.full_tensor() for name, param in params.items()}
    return {
        "held": {name: torch.equal(after[name], expected[name]) for name in ("layers.0.weight", "layers.1.weight")},
        "experts": [
            torch.equal(*pair) for pair in zip(after["layers.2.experts"], expected["layers.2.experts"], strict=True)
        ],
        "own": torch.equal(own, expected_own),
        "warnings": [str(w.message) for w in caught if "zero in each" in str(w.message)],
        "slices": sum(matrix.slice is not None for matrix in muon.plan.matrices),
    }


@pytest.mark.parametrize(("world", "options"), [(2, {}), (4, SLICED)])
def test_an_idle_matrix_is_only_decayed_and_named_once(world: int, options: dict[str, Any]) -> None:
    for rank, result in enumerate(run_ranks(train, world, options, timeout=3 * SECONDS)):
        assert result["held"] == {"layers.0.weight": True, "layers.1.weight": False}
        assert result["experts"] == [False, False, True, False]
        assert result["own"] == (rank > 0)
        assert (result["slices"] > 0) == (options is SLICED)
        (text,) = result["warnings"]
        assert text.startswith(f"layers.0.weight, layers.2.experts 2{', own' if rank else ''}: the gradient was zero")
