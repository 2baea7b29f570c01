"""examples/torchtitan: TorchTitan's own trainer trains, saves and continues with our optimizer under its degrees."""

import logging
import re
import runpy
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.dist.harness import run_ranks
from tests.dist.titan.test_training_layouts import shrink_experts
from titan_muon.trainer.data import files

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


def train(rank: int, world_size: int, folder: Path, data_ranks: int, options: tuple[str, ...]) -> list[str]:
    """The lines that the rank logs."""

    real = files._python_files()
    files._python_files = lambda: {name: real[name] for name in sorted(real)[:20]}
    shrink_experts()
    sequences = SEQUENCES // data_ranks
    lines: list[str] = []
    # Not a handler, because TorchTitan's start removes them.
    logging.getLogger().addFilter(lambda record: lines.append(record.getMessage()) is None)
    sys.path.insert(0, str(EXAMPLE))
    sys.argv = ["launch.py", "--module", "muon_config", "--config", "qwen3_moe", f"--dump_folder={folder}", *options]
    sys.argv += ["--training.seq_len=64", f"--training.local_batch_size={sequences}"]
    sys.argv += [f"--training.steps={STEPS}", "--training.mixed_precision_param=float32"]
    sys.argv += [f"--checkpoint.interval={HALF}", "--metrics.disable_color_printing"]
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
