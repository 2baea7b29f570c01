"""Plain tensors on every rank, as under DDP: replicas are orthogonalized once, and unequal tensors stay separate.

The rows `plain` and `under DDP` of tests/parity prove the bits, and the chains of checkpoints any number of replicas.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.harness import on_all_ranks, on_ranks
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn, equal, message, muon_keywords
from titan_muon import Muon

SHAPE = (16, 24)
EVEN = {f"layers.{i}.weight": SHAPE for i in range(8)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "orthogonalize": "reference"}


@on_ranks(2)
def test_a_rank_orthogonalizes_a_plain_tensor_with_rank_specific_values(rank: int) -> None:
    """Beside a replica, and not a plain tensor on this rank alone, as a parameter of a pipeline stage."""
    values = drawn({"own": SHAPE}, 10 + rank) | drawn({"copy": SHAPE}, 0)
    params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    with pytest.warns(UserWarning, match="own: plain tensors whose values differ between ranks"):
        muon = Muon(list(params.items()), **muon_keywords(**OPTIONS)).build()
    assert "own: plain tensors that differ between ranks; each rank orthogonalizes its own" in muon.plan.reason
    reference = ReferenceMuon(values)
    for seed in range(1, 3):
        grads = drawn({"own": SHAPE}, 20 * seed + rank) | drawn({"copy": SHAPE}, seed)
        for name, param in params.items():
            param.grad = grads[name].clone()
        muon.step()
        reference.step(grads)
    muon.check_last_step()
    assert equal(params.values(), [reference.params[name] for name in params]), "another rank's result took its place"
    alone = message(lambda: Muon([(f"stages.{rank}.weight", nn.Parameter(torch.ones(SHAPE)))]).build())
    assert "a parameter that only some ranks have must be a DTensor on their mesh" in alone


CHANGES: dict[str, tuple[Callable[[int, Tensor], Tensor | None], str]] = {
    "other": (lambda rank, grad: grad * (1 + 0.02 * rank), "layers.3.weight: these plain tensors were equal on all"),
    "nan": (lambda rank, grad: grad * (torch.nan if rank == 1 else 1), "layers.3.weight: "),
    "missing": (lambda rank, grad: grad if rank == 0 else None, "no gradient for layers.3.weight"),
    "rounded": (lambda rank, grad: grad * (1 + 1e-5 * rank), ""),
}
"""Change of one replica's gradient, and the expected error."""


@on_ranks(2)
def test_different_gradients_of_replicas_are_an_error_on_every_rank(rank: int) -> None:
    for change, text in CHANGES.values():
        params = {name: nn.Parameter(value) for name, value in drawn(EVEN, 0).items()}
        muon = Muon(list(params.items()), **muon_keywords(**OPTIONS)).build()
        errors = []
        for seed in range(1, 4):
            for name, grad in drawn(EVEN, seed).items():
                params[name].grad = change(rank, grad) if seed == 1 and name == "layers.3.weight" else grad
            errors.append(message(muon.step))
        first, second, third = errors
        assert first == "", "a rank that raised alone would leave the others waiting"
        assert second.startswith(text)
        assert bool(second) == bool(text), second
        assert third == "", "told once"
        ours, theirs = on_all_ranks([param.detach() for param in params.values()])
        assert equal(ours, theirs), "replicas are equal whatever their gradients were"
