"""A recipe whose gradients are reduce-scattered over replicas trains as with an all-reduce, and says what it sends."""

from pathlib import Path

import pytest

from tests import tiny
from tests.dist.harness import run_ranks
from tests.dist.titan.test_training_layouts import RECIPE, train, write_corpus
from titan_muon.titan.recipe.degrees import PIPELINE_TORCH, has_torch

STEPS = 3
OWNER = {"muon.state": "owner", "muon.orthogonalize": "reference"}
# A norm that cuts every gradient down: the clipped one has to be of sums, not of parts.
CLIPPED = {"optimizer.clip": "all", "training.max_norm": 0.05}
PIPELINE = {"pipeline_parallel_degree": 2, "training.local_batch_size": 2}
LAYOUTS = {
    "two passes, clipped": ("llama3/tiny", CLIPPED | {"training.global_batch_size": 8}),
    "tensor parallel": ("llama3/tiny", {"tensor_parallel_degree": 2}),
    "expert parallel": ("qwen3/moe_tiny", {"expert_parallel_degree": 2}),
    "stages": ("llama3/tiny", PIPELINE),
}


def curves(rank: int, world_size: int, path: str, overrides: list[str]) -> tuple[list[float], list[float], str]:
    """Losses and gradient norms by step, and what the run says of its optimizers."""
    folder = train(path, overrides)
    found = [list(tiny.records(folder, key).values()) for key in ("loss", "grad_norm")]
    return found[0], found[1], (folder / "optimizers.txt").read_text()


def run(folder: Path, layout: str, how: str) -> tuple[list[float], list[float], str]:
    (family, flavor), degrees = LAYOUTS[layout][0].split("/"), LAYOUTS[layout][1]
    path = folder / f"{how}.toml"
    path.write_text(RECIPE.format(family=family, flavor=flavor, corpus=folder, steps=STEPS))
    keys = {"data_parallel_replicate_degree": 2, "muon.replica_gradients": how, **OWNER, **degrees}
    overrides = ["--dump_folder", str(folder / "runs" / layout)]
    for key, value in keys.items():
        overrides += [f"--{key}" if "." in key else f"--parallelism.{key}", str(value)]
    return max(run_ranks(curves, 4, str(path), overrides), key=lambda each: len(each[0]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recipe_trains_as_with_an_all_reduce(layout: str, tmp_path: Path) -> None:
    if layout == "stages" and not has_torch(*PIPELINE_TORCH):
        pytest.skip("pipeline parallelism needs torch 2.14, as TorchTitan 0.3.0 does")
    write_corpus(tmp_path)
    summed, everywhere = (run(tmp_path, layout, how) for how in ("reduce_scatter", "all_reduce"))
    assert len(summed[0]) == STEPS
    assert summed[0] == everywhere[0], "two replicas' sums have the same digits in either order"
    assert summed[1] == pytest.approx(everywhere[1], rel=1e-6), "gradients that are nowhere else count once"
    assert "reduce-scattered to where the momentum is" in summed[2]
    assert "all-reduced; muon.state" in everywhere[2]
