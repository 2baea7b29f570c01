"""Unequal replicas of weights and states, and unequal hyperparameters, are errors with names."""

from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.harness import on_ranks
from tests.shared import local, message
from titan_muon import Hybrid
from titan_muon.engine.faults import replicas
from titan_muon.engine.faults.equality import tensors_of


class Model(nn.Module):
    """Two matrices for Muon, and for AdamW an embedding, a norm, and a head with fewer rows than shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.lm_head(self.norm(hidden))


def trained(mesh: tuple[int, ...] | None, **muon: object) -> tuple[Model, Hybrid]:
    """A model after some steps: HSDP, or plain tensors with reduced gradients as under DDP."""
    torch.manual_seed(0)
    model = Model()
    if mesh is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")))
    optimizer = Hybrid(model, lr=0.02, muon=muon).build()
    for _ in range(2):
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def flip_a_bit(tensor: Tensor) -> None:
    local(tensor).view(torch.int32).view(-1)[3] ^= 1


INJECTED: dict[str, tuple[Callable[[Model, Hybrid], object], str]] = {
    "weight of Muon": (
        lambda model, optimizer: flip_a_bit(model.layers[1].weight),
        "layers.1.weight: ranks [1] differ from ranks [0]",
    ),
    "weight of AdamW": (
        lambda model, optimizer: local(model.embedding.weight).mul_(1.01),
        "embedding.weight: ranks [1] differ from ranks [0]",
    ),
    "momentum": (
        lambda model, optimizer: flip_a_bit(optimizer.state[model.layers[0].weight]["momentum_buffer"]),
        "layers.0.weight (momentum_buffer): ranks [1] differ from ranks [0]",
    ),
    "counter of AdamW": (
        lambda model, optimizer: optimizer.state[model.norm.bias]["step"].add_(1),
        "norm.bias (step): ranks [1] differ from ranks [0]",
    ),
    "betas": (
        lambda model, optimizer: optimizer.optimizers["adamw"].param_groups[0].update(betas=(0.9, 0.95)),
        "betas of adamw's group of embedding.weight is (0.9, 0.999) on ranks [0] and (0.9, 0.95) on ranks [1]",
    ),
    "nothing": (lambda model, optimizer: None, ""),
}
"""Faults of rank 1, and the errors of all ranks."""


def out_of_memory(rank: int, optimizer: Hybrid) -> str:
    """The error of a comparison in which rank 1 runs out of memory."""
    if rank == 1:
        replicas.bit_sum = Mock(side_effect=torch.OutOfMemoryError("no memory for the sums"))
    with pytest.raises(RuntimeError) as error:
        optimizer.check_replicas()
    return f"{error.type.__name__}: {error.value}"


@on_ranks(2)
def test_every_rank_names_a_difference_and_the_differing_ranks(rank: int) -> None:
    for sharded in (True, False):
        model, optimizer = trained((2, 1) if sharded else None)
        tensors = [tensor for _, _, tensor in tensors_of(optimizer.optimizers)]
        kept = [local(tensor).clone() for tensor in tensors]
        for name, (fault, text) in INJECTED.items():
            groups = [dict(group) for group in optimizer.param_groups]
            if rank == 1:
                with torch.no_grad():
                    fault(model, optimizer)
            error = message(optimizer.check_replicas)
            assert text in error, name
            assert bool(error) == bool(text), error
            if name == "weight of AdamW" and not sharded:
                own = partial(optimizer.check_replicas, own=["embed*"])
                assert message(own) == "", "tensors of a single rank may differ"
            with torch.no_grad():
                for tensor, before in zip(tensors, kept, strict=True):
                    local(tensor).copy_(before)
            for group, old in zip(optimizer.param_groups, groups, strict=True):
                group.update(old)
    ends = {0: "RuntimeError: OutOfMemoryError: no memory for the sums (on rank 1)"}
    assert out_of_memory(rank, optimizer) == ends.get(rank, "OutOfMemoryError: no memory for the sums")


@on_ranks(4)
def test_a_differing_shard_is_reported_with_the_ranks_of_every_replica(rank: int) -> None:
    model, optimizer = trained((2, 2), state="owner")
    assert message(optimizer.check_replicas) == ""
    if rank == 3:
        flip_a_bit(model.layers[1].weight)
    assert "layers.1.weight: ranks [3] differ from ranks [1]" in message(optimizer.check_replicas)
