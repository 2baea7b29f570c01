"""Offloaded states in every layout: the bits of states on the device, and checkpoints for states on host or device."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests import tiny
from tests.dist.harness import run_ranks
from tests.shared import equal
from titan_muon import Muon
from titan_muon import adam as batched
from titan_muon.state.host import Window

SHAPES = {"layers.0.weight": (16, 24), "layers.1.weight": (24, 16), "layers.2.experts": (5, 8, 12), "norm": (7,)}
PLACEMENTS = {"fsdp": Shard(0), "tensor parallel": Shard(1), "replicas": Replicate()}
EXCHANGES = ("all_to_all", "all_gather", "all_gather_reduce_scatter")


def whole(name: str, seed: int) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * seed + list(SHAPES).index(name)))


class Sharded:
    """Parameters on a mesh of one axis; AdamW has a matrix and every non-matrix."""

    def __init__(self, world_size: int, layout: str, exchange: str, offload: str) -> None:
        self.mesh, self.placement = init_device_mesh("cpu", (world_size,)), PLACEMENTS[layout]
        self.params = {name: nn.Parameter(self._placed(name, 0)) for name in SHAPES}
        matrices = {name: param for name, param in self.params.items() if param.ndim > 1}
        # One matrix is AdamW's, so that both optimizers have several loads.
        last = matrices.pop("layers.1.weight")
        rest = {"layers.1.weight": last, "norm": self.params["norm"]}
        # Small buffers, for several buckets.
        self.muon = Muon(
            matrices.items(), lr=0.02, exchange=exchange, orthogonalize="reference", buffer_bytes=4096, offload=offload
        ).build()
        self.adamw = batched.AdamW(rest.items(), lr=0.02, offload=offload)
        self.optimizers = (self.muon, self.adamw)

    def _placed(self, name: str, seed: int) -> Tensor:
        full = whole(name, seed)
        placement = Shard(0) if self.placement == Shard(1) and full.ndim != 2 else self.placement
        return distribute_tensor(full, self.mesh, [placement], src_data_rank=None)

    def train(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            for name, param in self.params.items():
                param.grad = self._placed(name, seed)
            for optimizer in self.optimizers:
                optimizer.step()

    def state(self) -> dict[str, Any]:
        """State of a checkpoint, in the optimizers' tensors."""
        states = {
            f"{fqn}.{name}": value
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for fqn, param in zip(group["param_names"], group["params"], strict=True)
            for name, value in optimizer.state[param].items()
        }
        return {"model": dict(self.params), "optimizers": states}


def tensors(of: Sharded) -> list[Tensor]:
    values = (value for part in of.state().values() for value in part.values())
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def layouts() -> Iterator[tuple[str, str]]:
    yield from (("fsdp", exchange) for exchange in EXCHANGES)
    yield from ((layout, "all_to_all") for layout in PLACEMENTS if layout != "fsdp")


def on_and_off(rank: int, world_size: int) -> dict[str, tuple[bool, ...]]:
    """By layout: whether bits are equal after steps, after a move of states, and after loads between optimizers. A
    third optimizer also has parameters and gradients on the host, and moves no state."""
    batched.BATCH_BYTES = 512
    results = {}
    for layout, exchange in layouts():
        on, off, every = (Sharded(world_size, layout, exchange, offload) for offload in ("state", "none", "parameters"))
        for run in (on, off, every):
            run.train((1, 2))
        steps = equal(tensors(on), tensors(off)) and equal(tensors(every), tensors(off))
        for optimizer, other in zip(on.optimizers, off.optimizers, strict=True):
            optimizer.reload()
            other.offload()
        for run in (on, off, every):
            run.train((3, 4))
        moved = equal(tensors(on), tensors(off))
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in on.optimizers]
        for run in (on, off, every):
            run.train((5,))
            for optimizer, state in zip(run.optimizers, saved, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
            run.train((6,))
        loaded = equal(tensors(on), tensors(off)) and equal(tensors(every), tensors(off))
        results[f"{layout} {exchange}"] = steps, moved, loaded
    return results


def test_every_layout_and_exchange_has_the_same_bits_with_states_on_the_host() -> None:
    for results in run_ranks(on_and_off, 2):
        assert results == {f"{layout} {exchange}": (True,) * 3 for layout, exchange in layouts()}


def replaced(rank: int, world_size: int) -> str:
    """The error on this rank after rank 1 replaced a momentum."""
    sharded = Sharded(world_size, "fsdp", "all_to_all", "state")
    sharded.train((1,))
    if rank == 1:
        state = sharded.muon.state[sharded.params["layers.0.weight"]]
        state["momentum_buffer"] = state["momentum_buffer"].double()
    sharded.train((2,))
    try:
        sharded.train((3,))
    except ValueError as error:
        return str(error)
    return ""


def test_a_replaced_momentum_on_a_rank_is_refused_on_every_rank() -> None:
    for text in run_ranks(replaced, 2):
        assert text.startswith("layers.0.weight: the momentum was replaced")


def train(recipe: object) -> Path:
    from titan_muon.titan import compat

    compat.install()
    from titan_muon.titan.run import job

    compat.forget_meshes()
    return Path(job.train(recipe))  # type: ignore[arg-type]


SHORT = {
    "parallelism__expert_parallel_degree": 2,
    "muon__buffer_gib": 1e-4,
    # bfloat16 products are slow on the CPU and do not matter for the comparison.
    "muon__ns_dtype": "float32",
    "muon__ns_steps": 2,
    "checkpoint__interval": 2,
    "validator__enable": "false",
}


PLACES: dict[str, dict[str, object]] = {
    "device": {},
    "states": {"optimizer__offload": "state"},
    "parameters": {"training__enable_cpu_offload": "true"},
}
WAYS = (("device", "states"), ("states", "parameters"), ("parameters", "device"))


def curves(rank: int, world_size: int, folder: Path) -> list[Path]:
    """Runs with all states on the device, and runs from each place to another, with a move halfway."""
    runs = [train(tiny.recipe(folder, name="device", training__steps=4, **SHORT))]
    for before, after in WAYS:
        name = f"{before}_{after}"
        train(tiny.recipe(folder, name=name, training__steps=2, **PLACES[before], **SHORT))
        rest = {"training__steps": 4, "checkpoint__load": "latest", **PLACES[after]}
        runs.append(train(tiny.recipe(folder, name=name, **rest, **SHORT)))
    return runs


@pytest.mark.slow
def test_every_offload_placement_trains_and_resumes_with_the_curve_of_the_device(tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    device, *others = run_ranks(curves, 2, tmp_path, timeout=400)[0]
    expected = [tiny.records(device, key) for key in ("loss", "grad_norm")]
    assert expected[0].keys() == set(range(1, 5))
    for run in others:
        assert [tiny.records(run, key) for key in ("loss", "grad_norm")] == expected


def owned_curves(rank: int, world_size: int, folder: Path) -> tuple[dict[int, float], dict[int, float], set[str]]:
    """Losses with owned matrices on the device and on the host, and the device of the window."""
    begin, opened = Window.begin, set()

    def begins(self: Window, loads: Any) -> None:
        opened.update(str(tensor.device) for load in loads for tensor in load.tensors)
        begin(self, loads)

    Window.begin = begins  # type: ignore[method-assign]
    values: dict[str, object] = {**SHORT, "placement__muon": "owned", "training__steps": 3}
    device = train(tiny.recipe(folder, name="device", **values))
    assert not opened
    host = train(tiny.recipe(folder, name="host", training__enable_cpu_offload="true", **values))
    return tiny.records(device, "loss"), tiny.records(host, "loss"), opened


def test_owned_parameters_offload_to_the_host(tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    for device, host, opened in run_ranks(owned_curves, 2, tmp_path, timeout=400):
        assert device.keys() == set(range(1, 4))
        assert host == device
        assert opened == {"cpu"}
