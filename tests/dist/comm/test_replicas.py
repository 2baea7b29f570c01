"""Plain tensors on every rank, as under DDP: replicas are orthogonalized once, and unequal tensors stay separate.

The rows `plain` and `under DDP` of tests/parity prove the bits, and the chains of checkpoints any number of replicas.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn, message, muon_keywords
from titan_muon import Muon

BF16 = 2
SHAPE = (16, 24)
EVEN = {f"layers.{i}.weight": SHAPE for i in range(8)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "orthogonalize": "reference"}


def plain(shapes: dict[str, tuple[int, int]] = EVEN, seed: int = 0) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value) for name, value in drawn(shapes, seed).items()}


def in_float64(rank: int, world_size: int) -> str:
    param = nn.Parameter(torch.ones(16, 24, dtype=torch.float64))
    muon = Muon([("w", param)])
    param.grad = torch.ones_like(param)
    muon.step()
    return message(muon.check_last_step)


def test_replicas_in_float64_train_and_report_no_fault() -> None:
    assert run_ranks(in_float64, 2, timeout=SECONDS) == ["", ""]


def rank_specific_tensor(rank: int, world_size: int) -> tuple[list[bool], str, list[str], str]:
    """A plain tensor with rank-specific values beside a replica: correctness of both, and the warning.

    Also the error of a plain tensor on this rank alone, as a parameter of a pipeline stage.
    """
    values = drawn({"own": SHAPE}, 10 + rank) | drawn({"copy": SHAPE}, 0)
    params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        muon = Muon(list(params.items()), **muon_keywords(**OPTIONS)).build()
    reference = ReferenceMuon(values)
    for seed in range(1, 3):
        grads = drawn({"own": SHAPE}, 20 * seed + rank) | drawn({"copy": SHAPE}, seed)
        for name, param in params.items():
            param.grad = grads[name].clone()
        muon.step()
        reference.step(grads)
    muon.check_last_step()
    right = [torch.equal(params[name], reference.params[name]) for name in values]
    alone = message(lambda: Muon([(f"stages.{rank}.weight", nn.Parameter(torch.ones(SHAPE)))]).build())
    return right, muon.plan.reason, [str(warning.message) for warning in caught], alone


def test_a_rank_orthogonalizes_a_plain_tensor_with_rank_specific_values() -> None:
    for right, reason, warned, alone in run_ranks(rank_specific_tensor, 2, timeout=SECONDS):
        assert right == [True, True], "another rank's result took its place"
        assert "own: plain tensors that differ between ranks; each rank orthogonalizes its own" in reason
        assert any("own: plain tensors whose values differ between ranks" in text for text in warned)
        assert "a parameter that only some ranks have must be a DTensor on their mesh" in alone


CHANGES: dict[str, tuple[Callable[[int, Tensor], Tensor | None], str]] = {
    "other": (
        lambda rank, grad: grad * (1 + 0.02 * rank),
        "layers.3.weight: these plain tensors were equal on all ranks when Muon was built, but their",
    ),
    "nan": (lambda rank, grad: grad * (torch.nan if rank == 1 else 1), "layers.3.weight: "),
    "missing": (lambda rank, grad: grad if rank == 0 else None, "no gradient for layers.3.weight"),
    "rounded": (lambda rank, grad: grad * (1 + 1e-5 * rank), ""),
}
"""Change of one replica's gradient, and the expected error."""


def spoil_each(rank: int, world_size: int) -> dict[str, tuple[list[str], bytes]]:
    """Errors of a step with a changed gradient and of the next two steps; and the weights."""
    found = {}
    for kind, (change, _) in CHANGES.items():
        params, errors = plain(), []
        muon = Muon(list(params.items()), **muon_keywords(**OPTIONS)).build()
        for seed in range(1, 4):
            for name, grad in drawn(EVEN, seed).items():
                params[name].grad = change(rank, grad) if seed == 1 and name == "layers.3.weight" else grad
            errors.append(message(muon.step))
        found[kind] = errors, torch.stack([p.detach() for p in params.values()]).numpy().tobytes()
    return found


def test_different_gradients_of_replicas_are_an_error_on_every_rank() -> None:
    results = run_ranks(spoil_each, 2, timeout=SECONDS)
    for kind, (_, text) in CHANGES.items():
        assert len({rank[kind][1] for rank in results}) == 1, "copies are equal whatever their gradients were"
        for rank in results:
            first, second, third = rank[kind][0]
            assert first == "", "a rank that raised alone would leave the others waiting"
            assert second.startswith(text)
            assert bool(second) == bool(text)
            assert third == "", "told once"
