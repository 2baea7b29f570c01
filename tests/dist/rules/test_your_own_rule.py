"""The algorithms of docs/your_own_algorithm.md: their arithmetic in one process, and the same bits on every layout."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.harness import on_ranks
from tests.parity.references import ALGORITHM
from tests.parity.table import row
from tests.parity.training import differences
from tests.reference_muon import newton_schulz
from titan_muon import Expert, Muon, registry

PAGE = Path(__file__).parents[3] / "docs" / "your_own_algorithm.md"
LAYOUTS = ("fsdp", "hsdp", "fsdp x tp rows", "fsdp x tp columns", "tp rows", "ep x rows", "tp x ep", "owned")
BETA = 0.9
NAMES = ("smooth", "columns", "polar")


def register() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert all(len(code.splitlines()) <= 40 for code in blocks)
    if "smooth" not in registry.algorithms:
        names = {"model": nn.Linear(16, 16, bias=False)}
        for code in blocks:
            exec(code, names)


@pytest.fixture
def _registered() -> Iterator[None]:
    register()
    yield
    # The tests of the docs register them again.
    for name in NAMES:
        del registry.algorithms._values[name]


@pytest.mark.usefixtures("_registered")
def test_the_examples_compute_their_definitions_in_one_process() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(24, 40, generator=generator) for _ in range(2))
    blended = (0.05 * grad).lerp(grad, 0.05)
    rounded = blended.bfloat16().float()
    left, _, right = torch.linalg.svd(blended, full_matrices=False)
    normalized = (rounded / (rounded.norm(dim=0) + 1e-8)).bfloat16()
    updates = {
        "smooth": (1 - BETA) * newton_schulz(blended).float(),
        "columns": newton_schulz(normalized).float(),
        "polar": left @ right,
    }
    for name, expected in updates.items():
        param = nn.Parameter(weight.clone())
        muon = Muon([("w", param)], lr=1.0, algorithm=name, expert=Expert(orthogonalize="reference"), weight_decay=0.0)
        param.grad = grad.clone()
        muon.step()
        torch.testing.assert_close((weight - param.detach()) / (0.2 * 40**0.5), expected, rtol=4e-3, atol=1e-3)


@on_ranks(4)
@pytest.mark.parametrize("name", NAMES)
def test_the_examples_have_the_same_bits_on_every_layout(rank: int, name: str) -> None:
    register()
    fields = {"math": {ALGORITHM: name}, "reference": "one process", "shapes": ("wide", "tall", "experts")}
    assert differences(rank, 4, row(name, layouts=LAYOUTS, close=1e-9, **fields)) == []
