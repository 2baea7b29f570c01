"""A recipe has the same losses on every version of TorchTitan: those of 0.3.0 are in `losses_of_0_3_0.json`.

`make main-titan` trains on the main branch. `python -m tests.dist.titan.test_losses_of_versions` writes the file anew.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import tiny
from tests.dist.harness import run_ranks
from tests.dist.titan import test_training_layouts as layouts
from titan_muon.titan.torchtitan import compat

STORED = Path(__file__).with_name("losses_of_0_3_0.json")
TOLERANCE, STEPS = 1e-3, 20
LAYOUTS: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "one rank": (1, {}),
    "TP 2": (2, layouts.TP2),
    "EP 2, owned": (2, {**layouts.EP2, **layouts.OWNED}),
    "HSDP 2": (2, layouts.HSDP2),
}
VALUES = {"training.steps": STEPS, "training.seq_len": 64, "lr_scheduler.total_steps": STEPS, "validator.steps": 4}


def losses(rank: int, world_size: int, path: str) -> dict[int, float]:
    layouts.shrink_experts()
    folder = layouts.train(path)
    return {**tiny.records(folder, "loss"), 0: tiny.records(folder, "val_loss")[STEPS]}


def trained(folder: Path, layout: str) -> dict[str, float]:
    """Losses by step, and the loss on the held-out text as step 0."""
    ranks, values = LAYOUTS[layout]
    recipe = layouts.write_recipe(folder, layouts.EXPERTS, layout.replace(" ", "_"), {**VALUES, **values})
    found = run_ranks(losses, ranks, recipe, timeout=500)[0]
    return {str(step): round(loss, 6) for step, loss in sorted(found.items())}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.skipif(compat.recipe_version() == "v0_3", reason="these losses are stored: make main-titan compares them")
def test_losses_are_those_of_the_older_version(layout: str, tmp_path: Path) -> None:
    expected = json.loads(STORED.read_text())[layout]
    assert expected[str(STEPS)] < expected["1"] - 1, "a model that does not learn hides differences"
    assert trained(layouts.write_corpus(tmp_path), layout) == pytest.approx(expected, abs=TOLERANCE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        corpus = layouts.write_corpus(Path(folder))
        STORED.write_text(json.dumps({layout: trained(corpus, layout) for layout in LAYOUTS}, indent=1) + "\n")
