"""Faults without an error of PyTorch are named on all ranks in the next step."""

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.dist.comm.test_replicas import decoder
from tests.dist.harness import on_ranks, run_ranks
from tests.dist.small_params import SECONDS, named, parameters
from tests.shared import equal, local, message, muon_keywords
from titan_muon import Hybrid, Muon, clip_grad_norm_
from titan_muon.forecast.fake_world import fake_world


class Training:
    """A small sharded model on 2 ranks, and the optimizer."""

    def __init__(self, **muon: Any) -> None:
        self.model = decoder()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        keywords = muon_keywords(**muon)
        self.optimizer = Hybrid(self.model, lr=0.02, expert=keywords.pop("expert"), muon=keywords).build()
        self.backward()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(8)).square().sum().backward()

    def weights(self) -> list[Tensor]:
        """Copies of this rank's shards, without the empty shard of the head."""
        return [local(p).clone() for p in self.model.parameters() if local(p).numel() > 0]

    def states(self) -> list[Tensor]:
        return [local(v).clone() for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


def group(training: Training, name: str) -> dict[str, Any]:
    return training.optimizer.optimizers[name].param_groups[0]


def spoil(tensor: Tensor) -> None:
    local(tensor).view(-1)[0] = torch.nan


def drop(param: Tensor) -> None:
    param.grad = None


def one_step_more(rank: int, training: Training) -> None:
    """A rank with an extra step, or with peers that skipped a step."""
    training.optimizer.optimizers["muon"].engine.rank.report.steps += rank  # type: ignore[attr-defined]


INJECTED: dict[str, tuple[Callable[[int, Training], object], str]] = {
    "learning rate": (
        lambda rank, training: group(training, "muon").update(lr=0.02 * (1 + rank)),
        "lr of muon's group of layers.0.up.weight is 0.02 on ranks [0] and 0.04 on ranks [1]",
    ),
    "betas of AdamW": (
        lambda rank, training: group(training, "adamw").update(betas=(0.9, 0.999 - 0.1 * rank)),
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
        group(training, "muon").update(lr=0.02)
        group(training, "adamw").update(betas=(0.9, 0.999))
        training.model.layers[0].norm.weight.requires_grad_(True)
        training.backward()
        before = training.weights()
        error = message(training.optimizer.step)
        assert text in error, name
        assert bool(error) == bool(text), error
        assert not error or equal(before, training.weights()), "the error comes before anything changes"
        training.backward()
        assert message(training.optimizer.step) == "", "told once"
        assert all(bool(weight.isfinite().all()) for weight in training.weights())


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"on_bad_gradient": "skip_step"}], ids=str)
def test_a_nonfinite_norm_skips_the_update_and_names_parameter_and_rank(rank: int, options: dict[str, str]) -> None:
    training = Training(**options)
    training.optimizer.step()
    training.backward()
    if rank == 1:
        spoil(training.model.embed.weight.grad)
    # Only AdamW's gradients are clipped.
    of_adamw = [training.model.embed.weight, *training.model.layers[0].norm.parameters()]
    weights, states = training.weights(), training.states()
    clip_grad_norm_(of_adamw, 1.0, optimizer=training.optimizer)
    training.optimizer.step()
    assert equal(weights, training.weights())
    assert equal(states, training.states())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = message(training.optimizer.check_last_step)
    warned = " ".join(str(warning.message) for warning in caught)
    text = "the norm of the gradients was not finite (embed.weight on rank 1)"
    assert text in (warned if options else error)
    assert bool(error) != bool(options)
    training.backward()
    assert message(training.optimizer.step) == "", "told once"
    assert not any(torch.equal(a, b) for a, b in zip(weights, training.weights(), strict=True))


def skip_a_step(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 skips a step, and rank 0 writes the notes of the error into the folder."""
    mesh = init_device_mesh("cpu", (world_size,))
    former, muon = (Muon(named(parameters(mesh))).build() for _ in range(2))
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
