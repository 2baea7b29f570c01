"""Offloaded states: the bits of AdamW and of recipes with states on the device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests import tiny
from tests.dist.harness import run_ranks
from tests.dist.small_params import named, parameters, placed
from tests.shared import drawn, equal, local, message
from titan_muon import Muon
from titan_muon import adam as batched
from titan_muon.state.host import Window

SHAPES = {"layers.0.weight": (16, 24), "layers.1.weight": (24, 16), "norm": (7,)}


class Adam:
    """Parameters of AdamW in rows over the ranks."""

    def __init__(self, mesh: DeviceMesh, offload: Any) -> None:
        self.mesh = mesh
        self.params = {name: nn.Parameter(placed(value, mesh)) for name, value in drawn(SHAPES, 0).items()}
        self.adamw = batched.AdamW(self.params.items(), lr=0.02, offload=offload)

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
    batched.BATCH_BYTES = 512
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
    """Muon: the rows of tests/parity."""
    assert run_ranks(on_and_off, 2) == [[True] * 5] * 2


def replaced(rank: int, world_size: int) -> str:
    """The error on this rank after rank 1 replaced a momentum."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = parameters(mesh)
    muon = Muon(named(params), offload="state").build()
    muon.step()
    if rank == 1:
        state = muon.state[params["layers.0.weight"]]
        state["momentum_buffer"] = state["momentum_buffer"].double()
    muon.step()
    return message(muon.step)


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
