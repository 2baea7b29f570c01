"""Options of communication and memory change no digit of a recipe, also in a run that continues with the option."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests import tiny
from tests.dist.harness import run_ranks
from tests.dist.titan.test_trainer_resume import train
from tests.machines import machine_file

STEPS = 4
# Experts on both ranks, two passes to a step, and slow links, so that a plan defers many updates.
SHARED: dict[str, Any] = {
    "parallelism__expert_parallel_degree": 2,
    "training__local_batch_size": 1,
    "training__global_batch_size": 4,
    "training__steps": STEPS,
    "checkpoint__freq": 2,
    "muon__expert__ns_dtype": "float32",
    "muon__expert__wire_dtype": "float32",
    "muon__ns_steps": 2,
    "muon__expert__buffer_gib": 2e-4,
    "machine__file": machine_file(node_gb=1e-6, tflops=1.0, tflops_float32=1.0, node_latency_us=0.0).file,
}
ASYNC = {"checkpoint__async_mode": "async", "compile__enable": "true", "compile__backend": "aot_eager"}
ON_HOST = {"optimizer__offload": "state"}
ALL_ON_HOST = {"training__enable_cpu_offload": "true"}
Values = dict[str, Any]
CASES: dict[str, tuple[Values, list[tuple[Values, Values]]]] = {
    # The compiler refuses activations that are computed anew.
    "sharded": (
        {"activation_checkpoint__mode": "full"},
        [
            ({"muon__overlap": "forward"}, {"muon__overlap": "forward"}),
            (ON_HOST, ALL_ON_HOST),
            (ALL_ON_HOST, ON_HOST),
            (ON_HOST, {}),
        ],
    ),
    "async, compiled": (ASYNC, [({"muon__overlap": "forward"}, {"muon__overlap": "forward"})]),
    "owned": ({"placement__muon": "owned"}, [(ALL_ON_HOST, {})]),
}
"""Keys of all runs, and further keys of the first and of the second half of each run."""


def trained(rank: int, world_size: int, folder: Path, case: str) -> tuple[str, list[str]]:
    """Folders of a run without options and of the runs in halves."""
    base, halves = CASES[case]
    straight = train(tiny.recipe(folder, name="whole", **SHARED, **base))
    runs = []
    for number, (first, second) in enumerate(halves):
        shared = {**SHARED, **base, "name": f"halves{number}"}
        begun = train(tiny.recipe(folder, **{**shared, **first, "training__steps": STEPS // 2}))
        runs.append(train(tiny.recipe(folder, checkpoint__load="latest", **{**shared, **second})))
        assert begun == runs[-1], "a continued run must stay in its folder"
    return straight, runs


def tensors(run: str, to: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint."""
    dcp_to_torch_save(Path(run) / "checkpoint" / f"step-{STEPS}", to)
    return dict(flat(torch.load(to, weights_only=False)))


def flat(state: dict[str, Any], before: str = "") -> list[tuple[str, torch.Tensor]]:
    nested = [flat(v, f"{before}{n}.") if isinstance(v, dict) else [(before + n, v)] for n, v in state.items()]
    return [pair for pairs in nested for pair in pairs if isinstance(pair[1], torch.Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_options_keep_the_curves_and_checkpoints_of_a_recipe(case: str, tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    straight, runs = run_ranks(trained, 2, tmp_path, case, timeout=600)[0]
    expected = tensors(straight, tmp_path / "weights.pt")
    assert len(expected) > 10
    for number, run in enumerate(runs):
        for key in ("loss", "grad_norm", "val_loss"):
            curve, straight_curve = tiny.records(run, key), tiny.records(straight, key)
            assert len(straight_curve) >= STEPS // 2
            assert {step: curve[step] for step in straight_curve} == straight_curve, (number, key)
        saved = tensors(run, tmp_path / "weights.pt")
        assert saved.keys() == expected.keys()
        assert [name for name in saved if not torch.equal(saved[name], expected[name])] == [], number
