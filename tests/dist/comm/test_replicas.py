"""Replicas are orthogonalized once, unequal plain tensors stay separate, and unequal replicas are errors with names.

The rows `plain` and `under DDP` of tests/parity prove the bits, and the chains of checkpoints any number of replicas.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.harness import on_all_ranks, on_ranks
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn, equal, local, message, muon_keywords
from tests.unit.test_hybrid import Decoder
from titan_muon import Hybrid, Muon
from titan_muon.engine.faults import replicas
from titan_muon.engine.faults.replicas import tensors_of

SHAPE = (16, 24)
EVEN = {f"layers.{i}.weight": SHAPE for i in range(8)}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "orthogonalize": "reference"}


@on_ranks(2)
def test_a_rank_orthogonalizes_a_plain_tensor_with_rank_specific_values(rank: int) -> None:
    """Beside a replica, and not a plain tensor on this rank alone, as a parameter of a pipeline stage."""
    values = drawn({"own": SHAPE}, 10 + rank) | drawn({"copy": SHAPE}, 0)
    params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    with pytest.warns(UserWarning, match="own: plain tensors whose values differ between ranks"):
        muon = Muon(list(params.items()), **muon_keywords(**OPTIONS)).build()
    assert "own: plain tensors that differ between ranks; each rank orthogonalizes its own" in muon.plan.reason
    reference = ReferenceMuon(values)
    for seed in range(1, 3):
        grads = drawn({"own": SHAPE}, 20 * seed + rank) | drawn({"copy": SHAPE}, seed)
        for name, param in params.items():
            param.grad = grads[name].clone()
        muon.step()
        reference.step(grads)
    muon.check_last_step()
    assert equal(params.values(), [reference.params[name] for name in params]), "another rank's result took its place"
    alone = message(lambda: Muon([(f"stages.{rank}.weight", nn.Parameter(torch.ones(SHAPE)))]).build())
    assert "a parameter that only some ranks have must be a DTensor on their mesh" in alone


CHANGES: dict[str, tuple[Callable[[int, Tensor], Tensor | None], str]] = {
    "other": (lambda rank, grad: grad * (1 + 0.02 * rank), "layers.3.weight: these plain tensors were equal on all"),
    "nan": (lambda rank, grad: grad * (torch.nan if rank == 1 else 1), "layers.3.weight: "),
    "missing": (lambda rank, grad: grad if rank == 0 else None, "no gradient for layers.3.weight"),
    "rounded": (lambda rank, grad: grad * (1 + 1e-5 * rank), ""),
}
"""Change of one replica's gradient, and the expected error."""


@on_ranks(2)
def test_different_gradients_of_replicas_are_an_error_on_every_rank(rank: int) -> None:
    for change, text in CHANGES.values():
        params = {name: nn.Parameter(value) for name, value in drawn(EVEN, 0).items()}
        muon = Muon(list(params.items()), **muon_keywords(**OPTIONS)).build()
        errors = []
        for seed in range(1, 4):
            for name, grad in drawn(EVEN, seed).items():
                params[name].grad = change(rank, grad) if seed == 1 and name == "layers.3.weight" else grad
            errors.append(message(muon.step))
        first, second, third = errors
        assert first == "", "a rank that raised alone would leave the others waiting"
        assert second.startswith(text)
        assert bool(second) == bool(text), second
        assert third == "", "told once"
        ours, theirs = on_all_ranks([param.detach() for param in params.values()])
        assert equal(ours, theirs), "replicas are equal whatever their gradients were"


# Weights, states and hyperparameters


def decoder() -> Decoder:
    """A model whose head has fewer rows than shards."""
    model = Decoder()
    model.lm_head = nn.Linear(16, 1)
    return model


def trained(mesh: tuple[int, ...] | None, **muon: object) -> tuple[Decoder, Hybrid]:
    """A model after some steps: HSDP, or plain tensors with reduced gradients as under DDP."""
    model = decoder()
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


INJECTED: dict[str, tuple[Callable[[Decoder, Hybrid], object], str]] = {
    "weight of Muon": (
        lambda model, optimizer: flip_a_bit(model.layers[1].up.weight),
        "layers.1.up.weight: ranks [1] differ from ranks [0]",
    ),
    "weight of AdamW": (
        lambda model, optimizer: local(model.embed.weight).mul_(1.01),
        "embed.weight: ranks [1] differ from ranks [0]",
    ),
    "momentum": (
        lambda model, optimizer: flip_a_bit(optimizer.state[model.layers[0].up.weight]["momentum_buffer"]),
        "layers.0.up.weight (momentum_buffer): ranks [1] differ from ranks [0]",
    ),
    "counter of AdamW": (
        lambda model, optimizer: optimizer.state[model.layers[0].norm.bias]["step"].add_(1),
        "layers.0.norm.bias (step): ranks [1] differ from ranks [0]",
    ),
    "betas": (
        lambda model, optimizer: optimizer.optimizers["adamw"].param_groups[0].update(betas=(0.9, 0.95)),
        "betas of adamw's group of embed.weight is (0.9, 0.999) on ranks [0] and (0.9, 0.95) on ranks [1]",
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
        flip_a_bit(model.layers[1].up.weight)
    assert "layers.1.up.weight: ranks [3] differ from ranks [1]" in message(optimizer.check_replicas)
