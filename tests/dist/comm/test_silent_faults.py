"""Faults without an error of PyTorch are named on all ranks in the next step, and unequal replicas when asked for.

The rows `plain` and `under DDP` of tests/parity prove the bits of replicas, and the chains of checkpoints any number.
"""

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.harness import on_all_ranks, on_ranks, run_ranks
from tests.dist.small_params import SECONDS, parameters
from tests.reference_muon import ReferenceMuon
from tests.shared import drawn, equal, local, message, muon_keywords
from tests.unit.test_hybrid import Decoder
from titan_muon import Hybrid, Muon, clip_grad_norm_
from titan_muon.engine.faults import replicas
from titan_muon.features.replica_check import tensors_of
from titan_muon.forecast.fake_world import fake_world


class Training:
    """A small model and its Hybrid: on a mesh of shards, or of replicas and shards, or with plain tensors under DDP."""

    def __init__(self, mesh: tuple[int, ...] = (2,), **muon: Any) -> None:
        self.model = Decoder()
        # Fewer rows than shards.
        self.model.lm_head = nn.Linear(16, 1)
        if mesh:
            fully_shard(
                self.model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
            )
        keywords = muon_keywords(**muon)
        self.optimizer = Hybrid(self.model, lr=0.02, expert=keywords.pop("expert"), muon=keywords).build()
        self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(8)).square().sum().backward()

    def tensors(self) -> list[Tensor]:
        """This rank's parts of weights and states, without empty ones."""
        return [local(t) for _, _, t in tensors_of(self.optimizer.optimizers) if local(t).numel() > 0]

    def copies(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.tensors()]

    def group(self, name: str) -> dict[str, Any]:
        return self.optimizer.optimizers[name].param_groups[0]


def spoil(tensor: Tensor) -> None:
    local(tensor).view(-1)[0] = torch.nan


def drop(param: Tensor) -> None:
    param.grad = None


def one_step_more(rank: int, training: Training) -> None:
    """A rank with an extra step, or with peers that skipped a step."""
    training.optimizer.optimizers["muon"].engine.rank.report.steps += rank  # type: ignore[attr-defined]


INJECTED: dict[str, tuple[Callable[[int, Training], object], str]] = {
    "learning rate": (
        lambda rank, training: training.group("muon").update(lr=0.02 * (1 + rank)),
        "lr of muon's group of layers.0.up.weight is 0.02 on ranks [0] and 0.04 on ranks [1]",
    ),
    "betas of AdamW": (
        lambda rank, training: training.group("adamw").update(betas=(0.9, 0.999 - 0.1 * rank)),
        "betas of adamw's group of embed.weight is (0.9, 0.999) on ranks [0] and (0.9, 0.899",
    ),
    "one step more": (one_step_more, "number of steps is 2 on ranks [0] and 3 on ranks [1]"),
    "no gradient of AdamW": (
        lambda rank, training: rank and drop(training.model.embed.weight),
        "no gradient for embed.weight",
    ),
    "frozen in training": (
        lambda rank, training: drop(training.model.layers[0].norm.weight.requires_grad_(False)),
        "no gradient for layers.0.norm.weight",
    ),
    "nan of AdamW": (
        lambda rank, training: rank and spoil(training.model.embed.weight.grad),
        "embed.weight: gradient or momentum was not finite",
    ),
    "nothing": (lambda rank, training: None, ""),
}
"""Faults of a step, and the texts in the errors of the next one."""


@on_ranks(2)
def test_every_rank_names_a_silent_fault_at_the_next_step(rank: int) -> None:
    for name, (fault, text) in INJECTED.items():
        training = Training()
        assert message(training.optimizer.step) == ""
        training.backward()
        with torch.no_grad():
            fault(rank, training)
        assert message(training.optimizer.step) == "", "a rank that raised alone would leave the others waiting"
        training.group("muon").update(lr=0.02)
        training.group("adamw").update(betas=(0.9, 0.999))
        training.model.layers[0].norm.weight.requires_grad_(True)
        training.backward()
        before = training.copies()
        error = message(training.optimizer.step)
        assert text in error, name
        assert bool(error) == bool(text), error
        assert not error or equal(before, training.tensors()), "the error comes before anything changes"
        training.backward()
        assert message(training.optimizer.step) == "", "told once"
        assert all(bool(tensor.isfinite().all()) for tensor in training.tensors())


@on_ranks(2)
def test_a_nonfinite_norm_skips_the_update_and_names_parameter_and_rank(rank: int) -> None:
    for options in ({}, {"on_bad_gradient": "skip_step"}):
        training = Training(**options)
        training.optimizer.step()
        training.backward()
        if rank == 1:
            spoil(training.model.embed.weight.grad)
        # Only AdamW's gradients are clipped.
        of_adamw = [training.model.embed.weight, *training.model.layers[0].norm.parameters()]
        params = [p for p in training.model.parameters() if local(p).numel() > 0]
        before, weights = training.copies(), [local(p).clone() for p in params]
        clip_grad_norm_(of_adamw, 1.0, optimizer=training.optimizer)
        training.optimizer.step()
        assert equal(before, training.tensors())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            error = message(training.optimizer.check_last_step)
        warned = " ".join(str(warning.message) for warning in caught)
        text = "the norm of the gradients was not finite (embed.weight on rank 1)"
        assert text in (warned if options else error)
        assert bool(error) != bool(options)
        training.backward()
        assert message(training.optimizer.step) == "", "told once"
        moved = [not torch.equal(local(p), before) for p, before in zip(params, weights, strict=True)]
        assert all(moved)


# --- replicas ---


SHAPE = (16, 24)


@on_ranks(2)
def test_a_rank_orthogonalizes_a_plain_tensor_with_rank_specific_values(rank: int) -> None:
    """Beside a replica, and not a plain tensor on this rank alone, as a parameter of a pipeline stage."""
    values = drawn({"own": SHAPE}, 10 + rank) | drawn({"copy": SHAPE}, 0)
    params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    with pytest.warns(UserWarning, match="own: plain tensors whose values differ between ranks"):
        muon = Muon(params.items(), **muon_keywords(orthogonalize="reference")).build()
    assert "own: plain tensors that differ between ranks; each rank orthogonalizes its own" in muon.plan.reason
    reference = ReferenceMuon(values, lr=muon.param_groups[0]["lr"])
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


CHANGES: tuple[tuple[Callable[[int, Tensor], Tensor | None], str], ...] = (
    (lambda rank, grad: grad * (1 + 0.02 * rank), "layers.3.weight: these plain tensors were equal on all"),
    (lambda rank, grad: grad * (torch.nan if rank == 1 else 1), "layers.3.weight: "),
    (lambda rank, grad: grad if rank == 0 else None, "no gradient for layers.3.weight"),
    # Rounded otherwise.
    (lambda rank, grad: grad * (1 + 1e-5 * rank), ""),
)
"""Change of one replica's gradient, and the expected error."""


@on_ranks(2)
def test_different_gradients_of_replicas_are_an_error_on_every_rank(rank: int) -> None:
    shapes = {f"layers.{i}.weight": SHAPE for i in range(8)}
    for change, text in CHANGES:
        params = {name: nn.Parameter(value) for name, value in drawn(shapes, 0).items()}
        muon, errors = Muon(params.items()).build(), []
        for seed in range(1, 4):
            for name, grad in drawn(shapes, seed).items():
                params[name].grad = change(rank, grad) if seed == 1 and name == "layers.3.weight" else grad
            errors.append(message(muon.step))
        first, second, third = errors
        assert first == "", "a rank that raised alone would leave the others waiting"
        assert second.startswith(text)
        assert bool(second) == bool(text), second
        assert third == "", "told once"
        ours, theirs = on_all_ranks([param.detach() for param in params.values()])
        assert equal(ours, theirs), "replicas are equal whatever their gradients were"


def flip_a_bit(tensor: Tensor) -> None:
    local(tensor).view(torch.int32).view(-1)[3] ^= 1


UNEQUAL: tuple[tuple[Callable[[Decoder, Hybrid], object], str], ...] = (
    (lambda model, optimizer: flip_a_bit(model.layers[1].up.weight), "layers.1.up.weight: ranks [1] differ from"),
    (lambda model, optimizer: local(model.embed.weight).mul_(1.01), "embed.weight: ranks [1] differ from ranks [0]"),
    (
        lambda model, optimizer: flip_a_bit(optimizer.state[model.layers[0].up.weight]["momentum_buffer"]),
        "layers.0.up.weight (momentum_buffer): ranks [1] differ from ranks [0]",
    ),
    (
        lambda model, optimizer: optimizer.state[model.layers[0].norm.bias]["step"].add_(1),
        "layers.0.norm.bias (step): ranks [1] differ from ranks [0]",
    ),
    (
        lambda model, optimizer: optimizer.optimizers["adamw"].param_groups[0].update(betas=(0.9, 0.95)),
        "betas of adamw's group of embed.weight is (0.9, 0.999) on ranks [0] and (0.9, 0.95) on ranks [1]",
    ),
    (lambda model, optimizer: None, ""),
)
"""Faults of rank 1, and the errors of all ranks."""


@on_ranks(2)
def test_every_rank_names_a_difference_and_the_differing_ranks(rank: int) -> None:
    for mesh in ((2, 1), ()):
        training = Training(mesh)
        model, optimizer = training.model, training.optimizer
        optimizer.step()
        kept = training.copies()
        for fault, text in UNEQUAL:
            if rank == 1:
                with torch.no_grad():
                    fault(model, optimizer)
            error = message(optimizer.check_replicas)
            assert text in error
            assert bool(error) == bool(text), error
            if text.startswith("embed") and not mesh:
                own = partial(optimizer.check_replicas, own=["embed*"])
                assert message(own) == "", "tensors of a single rank may differ"
            with torch.no_grad():
                for tensor, before in zip(training.tensors(), kept, strict=True):
                    tensor.copy_(before)
            training.group("adamw").update(betas=(0.9, 0.999))
    if rank == 1:
        replicas.bit_sum = Mock(side_effect=torch.OutOfMemoryError("no memory for the sums"))
    with pytest.raises(
        RuntimeError, match=r"^no memory|^OutOfMemoryError: no memory for the sums \(on rank 1\)"
    ) as error:
        optimizer.check_replicas()
    assert error.type is (torch.OutOfMemoryError if rank else RuntimeError)


@on_ranks(4)
def test_a_differing_shard_is_reported_with_the_ranks_of_every_replica(rank: int) -> None:
    training = Training((2, 2), state="owner")
    training.optimizer.step()
    assert message(training.optimizer.check_replicas) == ""
    if rank == 3:
        flip_a_bit(training.model.layers[1].up.weight)
    assert "layers.1.up.weight: ranks [3] differ from ranks [1]" in message(training.optimizer.check_replicas)


# --- a rank that is late, and a world that is gone ---


def skip_a_step(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 skips a step, and rank 0 writes the notes of the error into the folder."""
    mesh = init_device_mesh("cpu", (world_size,))
    former, muon = (Muon(parameters().items()).build() for _ in range(2))
    muon.step()
    if rank == 1:
        # An error of a former Muon leaves its step in the store.
        former._agreement.locate(RuntimeError(), 7)
        time.sleep(SECONDS)
    # gloo's timeout of the mesh's group (used by Muon) and of the world.
    for process_group in (mesh.get_group(), dist.group.WORLD):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), process_group)
    try:
        muon.step()
    except RuntimeError as error:
        Path(folder, "note").write_text(" ".join(error.__notes__))
        raise


def test_the_timeout_names_a_rank_without_the_step(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 failed"):
        run_ranks(skip_a_step, 2, str(tmp_path), timeout=SECONDS)
    note = (tmp_path / "note").read_text()
    assert "Muon's step 2 on rank 0 did not end. Since Muon was built: rank 0 in step 2" in note
    assert "ranks [1] do not answer" in note


def test_a_step_after_the_process_group_was_destroyed_is_refused() -> None:
    param = nn.Parameter(torch.ones(16, 24))
    param.grad = torch.ones(16, 24)
    with fake_world(2):
        muon = Muon([("w", param)]).build()
    assert "the process group of Muon was destroyed" in message(muon.step)
