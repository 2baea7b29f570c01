"""A rehearsal notices waits, memory and collectives, on fake GPUs with injected faults."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.rehearsal.checks import MATRIX_PRODUCTS, Expected, collective_faults, faults
from benchmarks.rehearsal.seen import Bytes, Collective, Seen
from benchmarks.rehearse import LAYOUTS, NOT_REHEARSED, REHEARSED, WORLDS, Case
from tests.tiny import write_recipe
from titan_muon.trainer.model.parallelize import with_placement
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe.command_line import parse
from titan_muon.trainer.recipe.degrees import check_layout, has_torch_for

ROOT = Path(__file__).parents[3]
needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of PyTorch, with or without a GPU: make newest"
)
PLANNED = Bytes(100 << 20, 100 << 20, 200 << 20, 50 << 20, 80 << 20, 0)
SENDS, RECEIVES = (8, 24), (8, 40)
CALLS = (
    Collective("allgather_base", (0, 1), 64),
    Collective("alltoall_base", (0, 1), None, sends=SENDS, receives=RECEIVES),
)
# Arguments of rank 1 for the same collectives.
PEER_CALLS = (CALLS[0], Collective("alltoall_base", (0, 1), None, sends=(40, 16), receives=(24, 16)))
RIGHT = Seen(
    rank=0,
    matrices=8,
    orthogonalized=4,
    operations={"bmm": 40},
    training_peak=replace(PLANNED, rest=1 << 30),
    step_start=replace(PLANNED, orthogonalization=20 << 20, rest=30 << 20),
    step_peak=replace(PLANNED, orthogonalization=20 << 20, rest=90 << 20),
    constant=30 << 20,
    at_rest=(320 << 20, 320 << 20),
    training=CALLS,
    step=CALLS[1:],
    groups_made=0,
    reads=2,
)


PEER = replace(RIGHT, rank=1, training=PEER_CALLS, step=PEER_CALLS[1:])


def test_figures_equal_to_the_dry_run_have_no_fault() -> None:
    assert list(faults(RIGHT, Expected(0, PLANNED))) == []
    assert list(collective_faults([RIGHT, PEER])) == []


STEP = RIGHT.step_peak


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (replace(RIGHT, step_peak=replace(STEP, parameters=PLANNED.parameters + 1)), "parameters take"),
        (replace(RIGHT, step_peak=replace(STEP, rest=150 << 20)), "the step takes 146,800,640 bytes"),
        (replace(RIGHT, operations={"copy_": 8}), "4 matrices are orthogonalized, and no matrix product is"),
        (replace(RIGHT, at_rest=(500 << 20, 500 << 20)), "524,288,000 bytes are alive after a step"),
        (replace(RIGHT, at_rest=(320 << 20, (320 << 20) + 1)), "1 bytes more are alive after the second step"),
        (replace(RIGHT, groups_made=1), "1 process groups were made after construction"),
    ],
)
def test_wrong_figures_are_reported(seen: Seen, message: str) -> None:
    (fault,) = faults(seen, Expected(0, PLANNED))
    assert fault.startswith(message)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (PEER_CALLS[:1], "alltoall_base of None bytes among 2 ranks on rank 0 and absent on rank 1"),
        ((replace(CALLS[0], payload=32), PEER_CALLS[1]), "64 bytes among 2 ranks on rank 0 and allgather_base of 32"),
        (
            (CALLS[0], replace(PEER_CALLS[1], sends=(44, 16))),
            "alltoall_base of 2 ranks: rank 1 sends 44 bytes to rank 0, which expects 40",
        ),
    ],
)
def test_differing_collectives_of_ranks_are_named(training: tuple[Collective, ...], message: str) -> None:
    (fault,) = collective_faults([RIGHT, replace(PEER, training=training)])
    assert message in fault


def test_a_step_loads_at_most_the_dry_runs_offloaded_states() -> None:
    def problems(states: int) -> list[str]:
        step = replace(RIGHT.step_peak, optimizer_states=states)
        seen = replace(RIGHT, step_peak=step, at_rest=(120 << 20, 120 << 20))
        return list(faults(seen, Expected(0, PLANNED, offloaded=True)))

    assert problems(200 << 20) == []
    assert problems((200 << 20) + 1) != []
    (fault,) = faults(RIGHT, Expected(0, PLANNED, offloaded=True))
    assert "bytes are alive after a step" in fault, "between steps none is on the device"


def test_every_full_size_recipe_and_every_layout_is_rehearsed() -> None:
    files = (ROOT / "configs").glob("*.toml")
    full = {file.stem.removesuffix("_muon") for file in files if "cluster.toml" in file.read_text()}
    assert {*REHEARSED, *(name for name, _ in NOT_REHEARSED)} == full
    assert {layout for layouts in REHEARSED.values() for layout in layouts} == set(LAYOUTS)


@pytest.mark.parametrize("name", REHEARSED)
def test_every_rehearsed_layout_divides_the_model(name: str) -> None:
    """A refusal would otherwise come after an hour of rehearsals."""
    for world, layout in zip(WORLDS, REHEARSED[name], strict=True):
        recipe = parse(Case(name, world, layout).arguments()).recipe
        if recipe.parallelism.pipeline_parallel_degree == 1 or has_torch_for("parallelism.pipeline_parallel_degree"):
            check_layout(recipe, world)
            model = recipe.model
            with_placement(model_spec(model.name, model.flavor, vocab_size=model.vocab_size, on_cpu=False), recipe)


FAULTS = {
    "item": "DeviceSync: aten._local_scalar_dense.default: the host waits for the device",
    "kept": "bytes are alive after a step",
    "skipped": "on rank 0 and allreduce of",
    "mixed": "mixed torch.Tensor and DTensor",
}


def rehearse(module: str, *words: str) -> str:
    """Output of a process."""
    command, environment = [sys.executable, "-m", module, *words], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_cuda_build
def test_faults_are_caught_and_correct_steps_have_none(tmp_path: Path) -> None:
    found: dict[str, list[str]] = json.loads(rehearse("tests.rehearsed_faults", str(tmp_path)).splitlines()[-1])
    for fault, message in FAULTS.items():
        assert any(message in text for text in found.pop(fault)), fault
    assert {step for step, faults in found.items() if faults} == set()
    assert len(found) == 9


@needs_cuda_build
def test_an_owner_without_the_first_matrix_computes_on_the_device(tmp_path: Path) -> None:
    """DTensor makes the local tensor of the first matrix on the CPU, for any mesh."""
    words = ["--config", str(write_recipe(tmp_path)), "--placement.muon", "owned", "--data.tokenizer", "bytes"]
    words += ["--world-size", "8", "--rank", "3", "--json", str(tmp_path / "seen.json")]
    rehearse("benchmarks.rehearsal", *words)
    seen = Seen.read(tmp_path / "seen.json")
    assert seen.orthogonalized > 0
    assert MATRIX_PRODUCTS & seen.operations.keys()
