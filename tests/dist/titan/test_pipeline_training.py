"""A recipe in pipeline stages follows the same recipe on one rank, from equal initial values."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests import tiny
from tests.dist.titan.test_training_layouts import TOLERANCES, train_on, write_corpus

pytestmark = tiny.needs_torch_for("parallelism.pipeline_parallel_degree")

STEPS = 3
DENSE, EXPERTS = "llama3/tiny", "qwen3/moe_tiny"
OWNED = {"placement.muon": "owned"}
BLOCKS, ENDS = ["tok_embeddings", *(f"layers.{index}" for index in range(6))], ["norm", "lm_head"]
LAYOUTS = {
    "pp2": (2, DENSE, {}),
    "pp2_tp2": (4, DENSE, {"tensor_parallel_degree": 2}),
    "pp2_tp2_owned": (4, DENSE, {"tensor_parallel_degree": 2, **OWNED}),
    "pp2_fsdp2": (4, DENSE, {}),
    "pp2_fsdp2_owned": (4, DENSE, OWNED),
    "pp2_ep2": (4, EXPERTS, {"expert_parallel_degree": 2}),
    # The last stage has no Muon matrix, and takes part in agreements.
    "no_matrices": (2, DENSE, {"module_fqns_per_model_part": (json.dumps(BLOCKS), json.dumps(ENDS))}),
    "interleaved": (2, DENSE, {"pipeline_parallel_schedule": "Interleaved1F1B"}),
    "zero_bubble": (2, DENSE, {"pipeline_parallel_schedule": "ZBVZeroBubble", "training.local_batch_size": 4}),
}
STAGES = {"pipeline_parallel_degree": 2, "training.local_batch_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Callable[[str], list[float]]:
    """Losses of a model on one rank, trained on first use."""
    return cache(lambda model: train_on(folder, 1, model, {"training.steps": STEPS}, model.replace("/", "_")))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pipeline_stages_train_as_a_single_rank(
    layout: str, folder: Path, one_rank: Callable[[str], list[float]]
) -> None:
    world_size, model, degrees = LAYOUTS[layout]
    expected = one_rank(model)
    assert expected[-1] < expected[0] - 0.3, "the reference must learn, or following it means nothing"
    losses = train_on(folder, world_size, model, {"training.steps": STEPS, **STAGES, **degrees}, layout)
    assert losses[0] == pytest.approx(expected[0], abs=1e-5), "the stages start as the whole model does"
    assert losses == pytest.approx(expected, abs=TOLERANCES[model])
    text, alone = (optimizer_lines(folder, name) for name in (layout, model.replace("/", "_")))
    assert assigned(text) == assigned(alone), "the counts are of the whole model"
    size = world_size // 2
    for rank in range(2):
        where = f"rank {rank}" if size == 1 else f"ranks {rank * size} to {rank * size + size - 1}"
        assert f"pipeline rank {rank} of 2, {where}: " in text


def optimizer_lines(folder: Path, name: str) -> str:
    """A run's printed lines about the optimizers."""
    (file,) = (folder / "runs" / name).glob("*/optimizers.txt")
    return file.read_text()


def assigned(text: str) -> list[str]:
    return re.findall(r"^\w+: .* of parameters$", text, re.MULTILINE)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_continues_with_a_different_number_of_stages(
    before: int, after: int, folder: Path, one_rank: Callable[[str], list[float]]
) -> None:
    kept = {"checkpoint.enable": "true", "lr_scheduler.total_steps": STEPS}
    name = f"stages_{before}_{after}"

    def train(stages: int, steps: int, **more: object) -> list[float]:
        degrees = {**STAGES, "pipeline_parallel_degree": stages, "training.steps": steps, **kept}
        return train_on(folder, stages, DENSE, {**degrees, **more}, name)

    train(before, 2)
    losses = train(after, STEPS, **{"checkpoint.load": "latest"})
    assert losses == pytest.approx(one_rank(DENSE), abs=TOLERANCES[DENSE])
