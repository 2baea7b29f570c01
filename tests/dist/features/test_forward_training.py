"""Forward overlap keeps the digits of training, in checkpoints too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests import tiny
from tests.dist.harness import run_ranks
from tests.dist.titan.test_trainer_resume import train
from titan_muon.engine import Engine
from titan_muon.features.forward import ForwardUpdates

STEPS = 6
# On slow links a plan defers many updates; two passes per step, and experts on both ranks.
SHARED: dict[str, Any] = {
    "parallelism__expert_parallel_degree": 2,
    "training__local_batch_size": 1,
    "training__global_batch_size": 4,
    "checkpoint__interval": 2,
    "checkpoint__last_save_model_only": "true",
    "muon__orthogonalize": "reference",
    "machine__node_gb": 1e-6,
    "machine__tflops": 1.0,
    "machine__tflops_float32": 1.0,
    "machine__node_latency_us": 0.0,
}


def trained(rank: int, world_size: int, folder: Path, variant: dict[str, Any]) -> tuple[str, str, int]:
    """Folders of a run without deferred updates and of a continued run with deferred updates; number of deferred
    updates."""
    count = 0
    run = Engine.run

    def counted(self: Engine, *args: Any) -> None:
        nonlocal count
        run(self, *args)
        count += isinstance(self.overlap, ForwardUpdates) and self.overlap.left

    Engine.run = counted  # type: ignore[method-assign]
    keys = SHARED | variant
    straight = train(tiny.recipe(folder, name="whole", **keys))
    assert count == 0
    forward = keys | {"name": "halves", "muon__overlap": "forward"}
    first = train(
        tiny.recipe(folder, training__steps=STEPS // 2, **(forward | {"checkpoint__last_save_model_only": "false"}))
    )
    second = train(tiny.recipe(folder, checkpoint__load="latest", **forward))
    assert first == second, "a continued run must stay in its folder"
    return straight, second, count


def weights(run: str, step: int, to: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    dcp_to_torch_save(Path(run) / "checkpoint" / f"step-{step}", to)
    state = torch.load(to, weights_only=False)
    return {name: value for name, value in flat(state).items() if isinstance(value, torch.Tensor)}


def flat(state: dict[str, Any], before: str = "") -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in state.items():
        named |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return named


VARIANTS = {
    "disabled": {},
    "async, compiled": {
        "checkpoint__async_mode": "async",
        "compile__enable": "true",
        "compile__backend": "aot_eager",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_overlap_keeps_the_curves_and_checkpoints_of_a_recipe(variant: str, tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    straight, resumed, left = run_ranks(trained, 2, tmp_path, VARIANTS[variant])[0]
    assert left == STEPS, "every step leaves some updates"
    for key in ("loss", "grad_norm", "val_loss"):
        losses, expected = (tiny.records(folder, key) for folder in (resumed, straight))
        assert len(expected) >= STEPS // 2
        # The first half ends with a validation.
        assert {step: losses[step] for step in expected} == expected, key
    for step in (4, STEPS):
        these, those = (weights(run, step, tmp_path / "weights.pt") for run in (straight, resumed))
        assert these.keys() == those.keys()
        assert len(these) > 10
        assert [name for name in these if not torch.equal(these[name], those[name])] == []
