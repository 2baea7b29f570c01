"""The trainer's replacements in TorchTitan's step and loop are still called there, and are undone."""

import inspect
import math
import re
import time
from unittest import mock

import pytest
import torch

from titan_muon.comm.faults import Fault, check_faults
from titan_muon.titan import compat

compat.install()

import torchtitan.trainer  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

from titan_muon.titan.run.trainer import MuonTrainer  # noqa: E402


def test_clipping_by_replaces_the_clip_of_the_trainers_step() -> None:
    assert "dist_utils.clip_grad_norm_(" in inspect.getsource(torchtitan.trainer.Trainer.train_step)
    before = dist_utils.clip_grad_norm_
    with compat.clipping_by(lambda: torch.tensor(3.0)):
        assert torchtitan.trainer.dist_utils.clip_grad_norm_([], 1.0, foreach=True).item() == 3.0
    assert dist_utils.clip_grad_norm_ is before


def test_the_training_loop_does_not_sleep_at_the_end() -> None:
    assert "time.sleep(2)" in inspect.getsource(torchtitan.trainer.Trainer.train)
    with compat.ending_at_once():
        torchtitan.trainer.time.sleep(1e9)
    assert torchtitan.trainer.time is time


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_diverged_step_is_reported_before_the_run_ends(loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchTitan raises without reporting; the record of where the run diverged must be there all the same."""
    source = inspect.getsource(torchtitan.trainer.Trainer.train_step)
    check = re.search(r"\n( +)if (not math\.isfinite\(global_avg_loss\)):", source)
    assert check, "the check before the report"

    def diverge(self: object, batches: object) -> None:
        if eval(check[2], vars(torchtitan.trainer), {"global_avg_loss": loss}):
            raise RuntimeError("the loss is not finite, in other words")
        trainer.metrics_processor.log(3, loss, loss, 7.0)

    monkeypatch.setattr(torchtitan.trainer.Trainer, "train_step", diverge)
    trainer = MuonTrainer.__new__(MuonTrainer)
    trainer.stop, trainer.metrics_processor, trainer.checks, trainer.dataloader = (mock.Mock() for _ in range(4))
    trainer.metrics_processor.log.side_effect = ZeroDivisionError
    trainer.step, trainer.monitor = 3, None
    with pytest.raises(ZeroDivisionError):
        trainer.train_step(iter(()))
    assert torchtitan.trainer.math is math


def test_a_fault_of_muon_ends_a_run_as_a_recorded_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever raises in the loop, for example the state dict of a checkpoint. The error names the recipe's key."""
    monkeypatch.setattr(
        torchtitan.trainer.Trainer, "train", lambda self: check_faults(["w"], [Fault.NOT_FINITE], allowed=())
    )
    monkeypatch.setattr(MuonTrainer, "_begin_checks", lambda self: None)
    trainer = MuonTrainer.__new__(MuonTrainer)
    trainer.metrics_processor, trainer.step = mock.Mock(), 3
    with pytest.raises(FloatingPointError, match=r"^w: gradient or momentum .* \(muon\.nonfinite = 'skip'\)") as caught:
        trainer.train()
    trainer.metrics_processor.logger.log.assert_called_once_with({"diverged": str(caught.value)}, 3)


@pytest.mark.parametrize(("local", "elsewhere"), [(math.inf, 0.0), (2e6, 0.0), (1.0, math.inf), (1.0, 0.0)])
def test_impossible_weights_on_any_rank_are_not_saved(
    local: float, elsewhere: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda flag, op: flag.clamp_(min=elsewhere))
    trainer = MuonTrainer.__new__(MuonTrainer)
    trainer.checks, trainer.optimizers, trainer.device, trainer.compared = mock.Mock(), mock.Mock(), "cpu", 3
    trainer.checks.check_norm.return_value = []
    trainer.model_parts = [torch.nn.Linear(2, 2)]
    torch.nn.init.constant_(trainer.model_parts[0].bias, local)
    if local + elsewhere == 1.0:
        trainer._check_weights(3)
        return
    with pytest.raises(
        FloatingPointError, match=r"step 3: weights are not finite or larger than 1e\+06 .* nothing is saved"
    ):
        trainer._check_weights(3)


def test_a_model_is_checked_before_every_save_and_not_saved_after_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchTitan's loop saves after the step, so that an error of the step is one before the save."""
    monkeypatch.setattr(torchtitan.trainer.Trainer, "train_step", lambda self, batches: None)
    checked: list[int] = []

    def check(step: int) -> None:
        checked.append(step)
        if step == 4:
            raise FloatingPointError("some weights are not finite")

    trainer = MuonTrainer.__new__(MuonTrainer)
    trainer.stop, trainer.metrics_processor, trainer.checks, trainer.dataloader = (mock.Mock() for _ in range(4))
    trainer.config, trainer.checkpointer, trainer.validator, trainer.optimizers = (mock.Mock() for _ in range(4))
    trainer.config.check_replicas, trainer.config.comm.train_timeout_seconds = 0, 1
    trainer.metrics_processor.take_step.return_value = None
    trainer.monitor, trainer.is_first_step = None, False
    trainer.checkpointer.will_save = lambda step, last_step: step % 2 == 0
    monkeypatch.setattr(trainer, "_check_weights", check)
    for trainer.step in (1, 2, 3):
        trainer.train_step(iter(()))
    trainer.step = 4
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.train_step(iter(()))
    assert checked == [2, 4]
