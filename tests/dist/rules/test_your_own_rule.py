"""The rule of docs/your_own_algorithm.md equals one process on every layout."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.dist.harness import run_ranks
from tests.parity.layouts import LAYOUTS, placed
from tests.reference_muon import newton_schulz
from tests.shared import drawn
from titan_muon import Muon, own
from titan_muon.owned import gather

PAGE = Path(__file__).parents[3] / "docs" / "your_own_algorithm.md"
STEPS, LR, BETA = 3, 0.02, 0.9
MATRIX, EXPERTS = (24, 40), (4, 12, 20)
NAMES = {
    **dict.fromkeys(("fsdp", "hsdp", "fsdp x tp rows", "fsdp x tp columns"), MATRIX),
    **dict.fromkeys(("tp rows", "ep x rows", "tp x ep"), EXPERTS),
}
"""Layouts, and the shape of a parameter in each."""


def test_the_example_is_short() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(code.splitlines()) <= 40


def reference(value: Tensor, grads: list[Tensor]) -> Tensor:
    """A matrix trained in one process by the definition of the rule."""
    momentum, smoothed = torch.zeros_like(value), torch.zeros_like(value)
    for grad in grads:
        momentum.lerp_(grad, 0.05)
        smoothed.lerp_(newton_schulz(grad.lerp(momentum, 0.95)).float(), 1 - BETA)
        value = value * (1 - LR * 0.1)
        value = value.add(smoothed.bfloat16(), alpha=-LR * 0.2 * max(value.shape) ** 0.5)
    return value


def differing(rank: int, world_size: int) -> list[str]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    exec(code, {"model": nn.Linear(16, 16, bias=False)})
    params: dict[str, nn.Parameter] = {}
    for name, shape in NAMES.items():
        params[name] = nn.Parameter(placed(drawn({name: shape}, seed=0)[name], LAYOUTS[name]))
    home = nn.Module()
    for name, shape in (("owned", MATRIX), ("owned_experts", EXPERTS)):
        home.register_parameter(name, nn.Parameter(drawn({name: shape}, seed=0)[name]))
    own(home, mesh=init_device_mesh("cpu", (world_size,)), params=home.parameters())
    params |= dict(home.named_parameters())
    muon = Muon(list(params.items()), lr=LR, algorithm="smooth", beta2=BETA, orthogonalize="reference")
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    grads: list[dict[str, Tensor]] = []
    for step in range(1, STEPS + 1):
        grads.append({name: drawn({name: shape}, seed=step)[name] for name, shape in shapes.items()})
        for name, param in params.items():
            param.grad = _placed(grads[-1][name], param)
        muon.step()
    different = []
    for name, param in params.items():
        full, gradients = drawn({name: shapes[name]}, seed=0)[name], [values[name] for values in grads]
        expected = (
            torch.stack([reference(whole, [grad[i] for grad in gradients]) for i, whole in enumerate(full)])
            if full.ndim == 3
            else reference(full, gradients)
        )
        value: Any = gather(param) if name.startswith("owned") else param.full_tensor()  # type: ignore[attr-defined]
        if not torch.equal(value, expected):
            different.append(name)
    return different


def _placed(value: Tensor, param: nn.Parameter) -> Tensor | None:
    assert isinstance(param, DTensor)
    if not param.to_local().numel():
        return None
    placed = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    return torch.empty_like(param).copy_(placed)


def test_the_rule_of_the_docs_equals_a_single_process_on_every_layout() -> None:
    assert run_ranks(differing, 4) == [[]] * 4
