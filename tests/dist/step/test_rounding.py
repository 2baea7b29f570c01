"""Stochastic rounding over ranks: replicas stay equal, and sharded rows have the bits of one process."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.dist.small_params import SECONDS
from tests.shared import local
from titan_muon import Muon

SHAPES = {"wide": (8, 12), "tall": (9, 6), "experts": (2, 4, 6)}
PLACEMENTS: dict[str, Any] = {"plain": None, "copies": Replicate(), "rows": Shard(0), "columns": Shard(-1)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "orthogonalize": "reference", "ns_steps": 2}


def full(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def train_both(rank: int, world_size: int) -> list[dict[str, tuple[bool, list[list[float]]]]]:
    return [train(world_size, replicas) for replicas in ("split", "redundant")]


def train(world_size: int, replicas: str) -> dict[str, tuple[bool, list[list[float]]]]:
    """By placement, after three steps: whether weights equal the weights of one process, and this rank's weights."""
    mesh = init_device_mesh("cpu", (world_size,))

    def place(value: Tensor, kind: str) -> Tensor:
        placement = PLACEMENTS[kind]
        if placement is None:
            return value.clone()
        dim = placement if not isinstance(placement, Shard) else Shard(placement.dim % value.ndim)
        return distribute_tensor(value.clone(), mesh, [dim], src_data_rank=None)

    # Each tensor is alone in an optimizer under one name, because the draw depends on the name.
    results = {}
    alone, nearest = (
        trained(
            {name: nn.Parameter(place(value, "plain")) for name, value in full(0).items()},
            place,
            "plain",
            "redundant",
            rounding=rounding,
        )
        for rounding in ("stochastic", "nearest")
    )
    assert not any(torch.equal(alone[name], nearest[name]) for name in SHAPES), "nothing was drawn"
    for kind in PLACEMENTS:
        params = trained(
            {name: nn.Parameter(place(value, kind)) for name, value in full(0).items()}, place, kind, replicas
        )
        same = all(torch.equal(local(params[name]), local(place(alone[name].detach(), kind))) for name in SHAPES)
        results[kind] = same, [local(param).flatten().tolist() for param in params.values()]
    return results


def trained(
    params: dict[str, nn.Parameter], place: Any, kind: str, replicas: str, **options: str
) -> dict[str, nn.Parameter]:
    muon = Muon(list(params.items()), replicas=replicas, **OPTIONS, **options)
    for seed in range(1, 4):
        for name, grad in full(seed).items():
            params[name].grad = place(grad, kind)
        muon.step()
    return params


def test_replicas_round_equally_and_row_shards_equal_a_single_process() -> None:
    for first, second in zip(*run_ranks(train_both, 2, timeout=SECONDS), strict=True):
        for kind in ("plain", "copies"):
            assert first[kind][1] == second[kind][1], "copies part"
        for kind in ("plain", "copies", "rows"):
            assert first[kind][0], kind
            assert second[kind][0], kind
