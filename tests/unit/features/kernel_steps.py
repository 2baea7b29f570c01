"""Steps of Muon on small matrices, for kernels under Triton's interpreter."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, distribute_tensor

from tests.shared import local, muon_keywords
from titan_muon import Muon, Split
from titan_muon.kernels.tables import BLOCK

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1: make kernels")
SHAPES = {
    "aligned": (48, 64),
    "wide": (24, 40),
    "same": (24, 40),
    "tall": (33, 20),
    "long": (3, BLOCK + 3),
    "one": (1, 1),
    "experts": (3, 16, 32),
    "odd": (4, 5, 7),
    "qkv": (24, 12),
    "columns": (16, 48),
}
SPLITS = (
    # Interleaved rows, and columns of a weight.
    Split(match="qkv", dims="(g p h) d -> p | (g h) d", lengths={"p": (2, 1, 1), "h": 3}),
    Split(match="columns", dims="d (g f) -> g | f d", lengths={"g": 3}),
)

Change = Callable[[Any, dict[str, nn.Parameter], int], None]
"""Before a step: of the optimizer, of its parameters, in a step."""
Where = tuple[DeviceMesh, Sequence[Placement]] | None


def trained(
    names: Sequence[str],
    change: Change | None = None,
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]] | None = None,
    where: Where = None,
    seed: int = 0,
    steps: int = 3,
    signs: bool = False,
    **options: Any,
) -> list[list[Tensor]]:
    """Traffic, weights and states after each step. Gradients of all steps are kept, so that no address returns.

    Args:
        dtypes: of weights and gradients, by parameter.
        signs: gradients of signs and a momentum of 0.5, so that every sum of squares is exact: kernels add in another
            order.
    """
    generator, kept, results = torch.Generator().manual_seed(seed), [], []
    dtypes = [(torch.float32, torch.float32)] * len(names) if dtypes is None else dtypes

    def drawn(name: str, dtype: torch.dtype, signs: bool = False) -> Tensor:
        values = torch.randn(SHAPES[name], generator=generator)
        values = (values.sign() if signs else values).to(dtype)
        return values if where is None else distribute_tensor(values, *where)

    params = {name: nn.Parameter(drawn(name, dtype)) for name, (dtype, _) in zip(names, dtypes, strict=True)}
    for param, (_, dtype) in zip(params.values(), dtypes, strict=True):
        param.grad_dtype = dtype
    options = {"lr": 0.02, "split": tuple(split for split in SPLITS if split.match in names), **options}
    muon = Muon(list(params.items()), **muon_keywords(**options, **({"momentum": 0.5} if signs else {})))
    for step in range(steps):
        for (name, param), (_, dtype) in zip(params.items(), dtypes, strict=True):
            param.grad = drawn(name, dtype, signs)
            kept.append(param.grad)
        if change is not None:
            change(muon, params, step)
        muon.step()
        traffic = torch.tensor([muon.exchange.traffic.calls, muon.exchange.traffic.bytes_sent])
        states = (local(s) for p in params.values() for s in (p, *muon.state[p].values()) if isinstance(s, Tensor))
        results.append([traffic, *(state.clone() for state in states)])
    return results


def first_difference(one: list[list[Tensor]], other: list[list[Tensor]]) -> int | None:
    """The first step after which two trainings differ. A NaN equals a NaN."""
    for step, pairs in enumerate(zip(one, other, strict=True)):
        if not all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*pairs, strict=True)):
            return step
    return None
