"""The algorithm of docs/your_own_algorithm.md: its arithmetic in one process, and the same bits on every layout."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.harness import run_ranks
from tests.parity.references import ALGORITHM
from tests.parity.table import row
from tests.parity.training import differences
from tests.reference_muon import newton_schulz
from titan_muon import Muon, registry

PAGE = Path(__file__).parents[3] / "docs" / "your_own_algorithm.md"
LAYOUTS = ("fsdp", "hsdp", "fsdp x tp rows", "fsdp x tp columns", "tp rows", "ep x rows", "tp x ep", "owned")
LR, BETA = 0.02, 0.9


def register() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(code.splitlines()) <= 40
    if "smooth" not in registry.algorithms:
        exec(code, {"model": nn.Linear(16, 16, bias=False)})


@pytest.fixture
def _registered() -> Iterator[None]:
    register()
    yield
    # The tests of the docs register it again.
    del registry.algorithms._values["smooth"]


@pytest.mark.usefixtures("_registered")
def test_the_example_computes_its_definition_in_one_process() -> None:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(24, 40, generator=generator))
    muon = Muon([("w", param)], lr=LR, algorithm="smooth", beta2=BETA, orthogonalize="reference")
    expected, momentum, smoothed = param.detach().clone(), torch.zeros(24, 40), torch.zeros(24, 40)
    for _ in range(3):
        param.grad = torch.randn(24, 40, generator=generator)
        muon.step()
        momentum.lerp_(param.grad, 0.05)
        smoothed.lerp_(newton_schulz(param.grad.lerp(momentum, 0.95)).float(), 1 - BETA)
        expected = (expected * (1 - LR * 0.1)).add(smoothed.bfloat16(), alpha=-LR * 0.2 * 40**0.5)
    assert torch.equal(param, expected)


def differing(rank: int, world_size: int) -> list[str]:
    register()
    math = {ALGORITHM: "smooth", "beta2": BETA}
    return differences(rank, world_size, row("smooth", layouts=LAYOUTS, math=math, reference="one process", close=1e-9))


def test_the_example_has_the_same_bits_on_every_layout() -> None:
    assert run_ranks(differing, 4) == [[]] * 4
