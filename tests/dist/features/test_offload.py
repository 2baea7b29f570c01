"""Offloaded states keep the bits of AdamW. Muon: the rows of tests/parity."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.dist.harness import run_ranks
from tests.dist.small_params import placed
from tests.shared import drawn, equal, local
from titan_muon import adam

SHAPES = {"layers.0.weight": (16, 24), "layers.1.weight": (24, 16), "norm": (7,)}


class Adam:
    """Parameters of AdamW in rows over the ranks."""

    def __init__(self, mesh: DeviceMesh, offload: Any) -> None:
        self.mesh = mesh
        self.params = {name: nn.Parameter(placed(value, mesh)) for name, value in drawn(SHAPES, 0).items()}
        self.adamw = adam.AdamW(self.params.items(), lr=0.02, offload=offload)

    def train(self, *seeds: int) -> None:
        for seed in seeds:
            for name, grad in drawn(SHAPES, seed).items():
                self.params[name].grad = placed(grad, self.mesh)
            self.adamw.step()

    def tensors(self) -> list[Tensor]:
        states = [value for param in self.params.values() for value in self.adamw.state[param].values()]
        return [local(tensor).clone() for tensor in (*self.params.values(), *states)]


def on_and_off(rank: int, world_size: int) -> list[bool]:
    """Whether bits are equal after steps, after a move of states, and after loads between optimizers."""
    adam.BATCH_BYTES = 512
    mesh = init_device_mesh("cpu", (world_size,))
    on, off, every = runs = [Adam(mesh, offload) for offload in ("state", "none", "parameters")]
    for run in runs:
        run.train(1, 2)
    results = [equal(on.tensors(), off.tensors()), equal(every.tensors(), off.tensors())]
    on.adamw.reload()
    off.adamw.offload()
    for run in runs:
        run.train(3)
    results.append(equal(on.tensors(), off.tensors()))
    saved = copy.deepcopy(on.adamw.state_dict())
    for run in runs:
        run.train(5)
        run.adamw.load_state_dict(copy.deepcopy(saved))
        run.train(6)
    return [*results, equal(on.tensors(), off.tensors()), equal(every.tensors(), off.tensors())]


def test_adamw_has_the_same_bits_with_states_on_the_host() -> None:
    assert run_ranks(on_and_off, 2) == [[True] * 5] * 2
