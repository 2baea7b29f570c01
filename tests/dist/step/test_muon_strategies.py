"""With any exchange, owners, buckets, dtypes and meshes the update equals the reference's."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from tests.dist.harness import run_ranks
from tests.reference_muon import ReferenceMuon
from titan_muon import Muon
from titan_muon.plan import summarize

SHAPES = {f"layers.{i}.{name}": shape for i in range(4) for name, shape in (("wide", (12, 20)), ("tall", (21, 10)))}
WORLD: tuple[list[Any], tuple[Placement, ...]] = ([0, 1, 2, 3], (Shard(0),))
MESHES: dict[str, list[tuple[list[Any], tuple[Placement, ...]]]] = {
    "fsdp": [WORLD],
    "hsdp": [([[0, 1], [2, 3]], (Replicate(), Shard(0)))],
    "two towers": [([0, 1], (Shard(0),)), ([2, 3], (Shard(0),))],
    "overlapping": [WORLD, ([1, 2, 3], (Shard(0),)), ([0, 2], (Shard(1),))],
    "one rank's": [WORLD, ([2], (Replicate(),))],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "many buckets": {"buffer_bytes": 1_500},
    "many buckets gathered": {"buffer_bytes": 3_000, "exchange": "all_gather"},
    "many buckets reduced": {"buffer_bytes": 5_500, "exchange": "all_gather_reduce_scatter"},
    "redundant": {"replicas": "redundant"},
    "float32 wire": {"wire_dtype": "float32"},
    "released": {"release_grads": True, "buffer_bytes": 1_500},
}


def full_tensors(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Sharded:
    """The parameters of SHAPES dealt out to several meshes in turn."""

    def __init__(self, meshes: str) -> None:
        made = [(DeviceMesh("cpu", ranks), placements) for ranks, placements in MESHES[meshes]]
        self.places = {name: made[index % len(made)] for index, name in enumerate(SHAPES)}
        self.parameters = {name: nn.Parameter(self.place(name, full)) for name, full in full_tensors(0).items()}

    def place(self, name: str, full: torch.Tensor) -> torch.Tensor:
        mesh, placements = self.places[name]
        return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)

    def local(self, name: str, full: torch.Tensor) -> torch.Tensor:
        return self.place(name, full).to_local()


def check(rank: int, world_size: int, meshes: str, options: dict[str, Any]) -> list[str]:
    """Names with a difference from the reference after three steps."""
    sharded = Sharded(meshes)
    optimizer = Muon(list(sharded.parameters.items()), lr=0.02, orthogonalize="reference", **options).build()
    reference = ReferenceMuon(full_tensors(0))
    for step in range(3):
        grads = full_tensors(step + 1)
        for name, parameter in sharded.parameters.items():
            parameter.grad = sharded.place(name, grads[name])
        optimizer.step()
        reference.step(grads)
        released = options.get("release_grads", False)
        local_grads = [p.grad for name, p in sharded.parameters.items() if rank in sharded.places[name][0].mesh]
        assert all((grad is None) == released for grad in local_grads)
    if "buffer_bytes" in options:
        assert optimizer.plan.rounds > 1, "the case is about several buckets"
        assert summarize(optimizer.plan).buffer_bytes_max <= options["buffer_bytes"]
    different = []
    for name, parameter in sharded.parameters.items():
        average = optimizer.state[parameter]["momentum_buffer"].to_local()
        if not torch.equal(parameter.to_local(), sharded.local(name, reference.params[name])):
            different.append(f"{name}: parameter")
        if not torch.equal(average, sharded.local(name, reference.average[name])):
            different.append(f"{name}: momentum")
    return different


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("meshes", ["fsdp", "hsdp"])
def test_every_strategy_equals_the_reference_bit_for_bit(meshes: str, options: str) -> None:
    assert run_ranks(check, 4, meshes, OPTIONS[options]) == [[]] * 4


@pytest.mark.parametrize("options", ["defaults", "many buckets"])
@pytest.mark.parametrize("meshes", ["two towers", "overlapping", "one rank's"])
def test_parameters_on_different_meshes_equal_the_reference_bit_for_bit(meshes: str, options: str) -> None:
    """Parameters on sub-meshes: some ranks take no part in a group."""
    chosen = {key: value for key, value in OPTIONS[options].items() if key != "buffer_bytes" or meshes == "overlapping"}
    assert run_ranks(check, 4, meshes, chosen) == [[]] * 4


def check_skip(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a parameter without a gradient on one rank stayed, and whether the remaining parameters moved."""
    sharded = Sharded("fsdp")
    optimizer = Muon(
        list(sharded.parameters.items()), lr=0.02, missing_grad="skip", buffer_bytes=1_500, orthogonalize="reference"
    ).build()
    grads, before = full_tensors(1), full_tensors(0)
    missing = next(iter(SHAPES))
    for name, parameter in sharded.parameters.items():
        parameter.grad = None if name == missing and rank == 1 else sharded.place(name, grads[name])
    optimizer.step()
    moved = {
        name: not torch.equal(p.to_local(), sharded.local(name, before[name])) for name, p in sharded.parameters.items()
    }
    average = optimizer.state[sharded.parameters[missing]]["momentum_buffer"].to_local()
    return not moved.pop(missing) and not average.any(), all(moved.values())


def test_skip_leaves_a_parameter_unchanged_on_every_rank() -> None:
    assert run_ranks(check_skip, 4) == [(True, True)] * 4


def check_bf16(rank: int, world_size: int, state_dtype: str) -> tuple[torch.dtype, float]:
    """Dtype of the momentum of bf16 parameters, and the error after 300 equal gradients of 1."""
    sharded = Sharded("fsdp")
    parameters = {name: nn.Parameter(p.detach().bfloat16()) for name, p in sharded.parameters.items()}
    optimizer = Muon(list(parameters.items()), lr=0.0, state_dtype=state_dtype).build()
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(300):
        optimizer.step()
    again = Muon(list(parameters.items()), lr=0.0, state_dtype=state_dtype).build()
    again.load_state_dict(optimizer.state_dict())
    averages = [again.state[p]["momentum_buffer"].to_local() for p in parameters.values()]
    assert all(
        torch.equal(a, optimizer.state[p]["momentum_buffer"].to_local())
        for a, p in zip(averages, parameters.values(), strict=True)
    )
    return averages[0].dtype, max(float((average - 1).abs().max()) for average in averages)


def test_a_float32_momentum_of_bf16_gradients_has_float32_precision() -> None:
    """In bfloat16 an average of ones stalls at 0.96; in float32 the average reaches 1. State dicts keep it."""
    for dtype, error in run_ranks(check_bf16, 4, "float32"):
        assert dtype == torch.float32
        assert error < 1e-5
    for dtype, _ in run_ranks(check_bf16, 4, "bfloat16"):
        assert dtype == torch.bfloat16


def build_with_a_frozen_rank(rank: int, world_size: int) -> str:
    sharded = Sharded("fsdp")
    for parameter in sharded.parameters.values():
        parameter.requires_grad_(rank != 1)
    try:
        Muon(list(sharded.parameters.items())).build()
    except ValueError as error:
        return str(error)
    return "built"


def test_options_impossible_on_a_rank_are_refused_on_every_rank() -> None:
    messages = run_ranks(build_with_a_frozen_rank, 4)
    assert set(messages) == {messages[0]}
    assert "no parameter to train" in messages[0]
    assert "on ranks [1]" in messages[0]
