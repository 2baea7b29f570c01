"""The trainer's replacements in TorchTitan's step and loop are still called there, and are undone."""

import inspect
import math
import re
import time
from unittest import mock

import pytest
import torch

from titan_muon.trainer.torchtitan import compat

compat.install()

import torchtitan.trainer  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402

from titan_muon.trainer.run.trainer import MuonTrainer  # noqa: E402


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


def test_a_diverged_step_is_reported_before_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchTitan raises without reporting; the record of where the run diverged must be there all the same."""
    source = inspect.getsource(torchtitan.trainer.Trainer.train_step)
    check = re.search(r"\n( +)if (not math\.isfinite\(global_avg_loss\)):", source)
    on_device = re.search(r"torch\._assert_async\(\s+step_is_finite,\s+\"(.*)\"", source)
    assert (check is None) != (on_device is None), "the check before the report"

    def diverge(self: object, batches: object) -> None:
        if check and eval(check[2], vars(torchtitan.trainer), {"global_avg_loss": math.nan}):
            raise RuntimeError("the loss is not finite, in other words")
        if on_device:
            torchtitan.trainer.torch._assert_async(torch.tensor(False), on_device[1])
        trainer.metrics_processor.log(3, math.nan, math.nan, 7.0)

    monkeypatch.setattr(torchtitan.trainer.Trainer, "train_step", diverge)
    trainer = MuonTrainer.__new__(MuonTrainer)
    trainer.stop, trainer.metrics_processor, trainer.checks, trainer.dataloader = (mock.Mock() for _ in range(4))
    trainer.metrics_processor.log.side_effect = ZeroDivisionError
    trainer.step, trainer.monitor = 3, None
    with pytest.raises(ZeroDivisionError):
        trainer.train_step(iter(()))
    assert getattr(torchtitan.trainer, "math", math) is math
