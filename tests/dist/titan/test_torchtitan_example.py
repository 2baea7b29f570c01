"""examples/torchtitan: TorchTitan's own trainer trains, saves and continues with our optimizer under its degrees."""

import importlib
import logging
import re
import runpy
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import run_ranks
from tests.dist.titan.test_training_layouts import shrink_experts
from titan_muon.trainer.data import files
from titan_muon.trainer.recipe.sections import Data

EXAMPLE = Path(__file__).parents[3] / "examples" / "torchtitan"
SEQUENCES, STEPS, HALF = 4, 4, 2
TOLERANCE = 1e-3
LAYOUTS: Mapping[str, tuple[int, int, tuple[str, ...]]] = {
    "FSDP 2": (2, 2, ()),
    "TP 2": (2, 1, ("--parallelism.tensor_parallel_degree=2",)),
    "EP 2": (2, 2, ("--parallelism.expert_parallel_degree=2",)),
    "HSDP 2": (2, 2, ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")),
    "FSDP 2, TP 2, EP 2": (4, 2, ("--parallelism.tensor_parallel_degree=2", "--parallelism.expert_parallel_degree=2")),
}
"""Ranks, data-parallel ranks and options of the command line."""


def small_config() -> Any:
    """A TorchTitan configuration in place of the debug model, whose text is in TorchTitan's repository."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config import TrainingConfig
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.trainer import Trainer

    from models import qwen3
    from titan_muon.trainer.data.loader import dataloader_config
    from titan_muon.trainer.data.tokenizers import tokenizer_config

    spec, data = qwen3.build("moe_tiny", vocab_size=None), Data(source="python", tokenizer="bytes")
    return Trainer.Config(
        model_spec=spec,
        tokenizer=tokenizer_config(data),
        dataloader=dataloader_config(data),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(steps=STEPS, seq_len=64),
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=HALF, last_save_model_only=False),
    )


def train(rank: int, world_size: int, folder: Path, data_ranks: int, options: tuple[str, ...]) -> list[str]:
    """The lines that the rank logs."""

    real = files._python_files()
    files._python_files = lambda: {name: real[name] for name in sorted(real)[:20]}
    shrink_experts()
    sequences = SEQUENCES // data_ranks
    lines: list[str] = []
    # Not a handler, because TorchTitan's start removes them.
    for name in (None, "titan_muon.trainer.assign.container"):
        logging.getLogger(name).addFilter(lambda record: lines.append(record.getMessage()) is None)
    sys.path.insert(0, str(EXAMPLE))
    vars(importlib.import_module("muon_config"))["qwen3_moe_debug"] = small_config
    sys.argv = ["launch.py", "--module", "muon_config", "--config", "qwen3_moe", f"--dump_folder={folder}", *options]
    sys.argv += [f"--training.local_batch_size={sequences}", "--training.mixed_precision_param=float32"]
    sys.argv += ["--metrics.disable_color_printing"]
    runpy.run_path(str(EXAMPLE / "launch.py"), run_name="__main__")
    return lines


def losses(lines: list[str]) -> dict[int, float]:
    found = (re.search(r"step: +(\d+) +loss: +([\d.]+)", line) for line in lines)
    return {int(match[1]): float(match[2]) for match in found if match}


def trained(layout: str, folder: Path) -> list[str]:
    ranks, data_ranks, options = LAYOUTS[layout]
    return run_ranks(train, ranks, folder, data_ranks, options, timeout=500)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one rank."""
    return losses(run_ranks(train, 1, tmp_path_factory.mktemp("one"), 1, (), timeout=500)[0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchtitans_trainer_trains_saves_and_continues(
    layout: str, expected: dict[int, float], tmp_path: Path
) -> None:
    lines = trained(layout, tmp_path)
    assert expected[STEPS] < expected[1] - 0.05, "a model that does not learn hides differences"
    assert losses(lines) == pytest.approx(expected, abs=TOLERANCE)
    text = "\n".join(lines)
    assert re.search(r"^layers\.\*\.attention\.wo\.weight .* muon ", text, re.MULTILINE), "the table of parameters"
    assert re.search(r"^Muon step: \d+ matrices", text, re.MULTILINE), "the plan"
    shutil.rmtree(tmp_path / "checkpoint" / f"step-{STEPS}")
    continued = trained(layout, tmp_path)
    assert losses(continued) == {step: loss for step, loss in losses(lines).items() if step > HALF}
