"""A continued run equals an uninterrupted run, and validation does not change training."""

import gzip
import json
from pathlib import Path
from unittest import mock

import pytest

from tests import tiny
from tests.dist.harness import run_ranks
from titan_muon.engine.tensors.process_groups import forget_meshes
from titan_muon.muon import Muon
from titan_muon.trainer.recipe import RecipeError, load
from titan_muon.trainer.run_folder import Checksum


def train(recipe: object) -> str:
    from titan_muon.trainer.torchtitan import compat

    compat.install()
    from titan_muon.trainer.run import job

    forget_meshes()
    return job.train(recipe)


def uninterrupted_and_resumed(rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    def run(name: str, **values: object) -> str:
        warmup = {"muon__momentum_warmup_steps": 5}
        return train(tiny.recipe(folder, name=name, parallelism__expert_parallel_degree=2, **warmup, **values))

    straight, first = run("whole"), run("halves", training__steps=3)
    second = run("halves", checkpoint__load="latest")
    assert first == second, "a continued run must stay in its folder"
    return straight, second


def test_resumed_run_has_the_same_losses_to_the_last_digit(tmp_path: Path) -> None:
    """Three steps, a checkpoint and three more steps log the losses of six steps, with experts on 2 ranks and
    validation."""
    tiny.write_recipe(tmp_path)
    straight, resumed = run_ranks(uninterrupted_and_resumed, 2, tmp_path)[0]
    for key in ("loss", "grad_norm", "tokens", "lr"):
        assert tiny.records(straight, key) == tiny.records(resumed, key)
    assert tiny.records(straight, "loss").keys() == set(range(1, 7))
    shared = {2, 4, 6}
    validated = [tiny.records(folder, "val_loss") for folder in (straight, resumed)]
    assert shared <= validated[0].keys()
    assert {s: validated[0][s] for s in shared} == {s: validated[1][s] for s in shared}


def resumed_on_one_rank(rank: int, world_size: int, folder: Path) -> str:
    batch = {"training__local_batch_size": 4 // world_size, "training__global_batch_size": 4}
    steps = {2: 3, 1: 6}[world_size]
    return train(tiny.recipe(folder, checkpoint__load="latest", training__steps=steps, **batch))


@pytest.mark.slow
def test_run_is_continued_on_another_number_of_ranks(tmp_path: Path) -> None:
    """A checkpoint of 2 ranks must go on in 1 process with the next batch, and follow the run of 1 process."""
    tiny.write_recipe(tmp_path)
    folder = run_ranks(resumed_on_one_rank, 2, tmp_path)[0]
    assert run_ranks(resumed_on_one_rank, 1, tmp_path)[0] == folder
    (tmp_path / "runs").rename(tmp_path / "first_runs")
    straight = run_ranks(resumed_on_one_rank, 1, tmp_path)[0]
    resumed = tmp_path / "first_runs" / "tiny" / Path(folder).name
    assert tiny.records(resumed, "loss") == pytest.approx(tiny.records(straight, "loss"), abs=2e-3)
    assert tiny.records(resumed, "tokens") == tiny.records(straight, "tokens")


def runs_of_one_rank(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    batch = {"training__steps": 3, "training__global_batch_size": 4, "validator__enable": "false"}
    validation = {"training__steps": 4, "lr_scheduler__warmup_steps": 0}
    recipes: dict[str, dict[str, object]] = {
        "validated": {**validation, "validator__freq": 1},
        "plain": {**validation, "validator__enable": "false"},
        "at_once": {**batch, "training__local_batch_size": 4},
        "accumulated": {**batch, "training__local_batch_size": 1},
    }
    muons, check = [], Muon.check_last_step

    def counted(muon: Muon) -> None:
        muons.append(muon)
        check(muon)

    with mock.patch.object(Muon, "check_last_step", counted):
        shared = {"checkpoint__enable": "false"}
        runs = {name: train(tiny.recipe(folder, name=name, **shared, **values)) for name, values in recipes.items()}
    assert len(muons) == len(recipes), "no later step would check the last step, and without checkpoints no save does"
    return runs


def test_validation_does_not_influence_training_and_accumulation_equals_a_large_batch(tmp_path: Path) -> None:
    """MoE routers count tokens in training and in validation. Accumulated gradients differ in the order of sums."""
    tiny.write_recipe(tmp_path)
    runs = run_ranks(runs_of_one_rank, 1, tmp_path)[0]
    assert tiny.records(runs["validated"], "loss") == tiny.records(runs["plain"], "loss")
    assert tiny.records(runs["validated"], "val_loss").keys() == {1, 2, 3, 4}
    assert not tiny.records(runs["plain"], "val_loss")
    assert not list(Path(runs["plain"]).glob("checkpoint*"))
    for key in ("loss", "grad_norm"):
        assert tiny.records(runs["accumulated"], key) == pytest.approx(tiny.records(runs["at_once"], key), rel=1e-3)
    assert tiny.records(runs["accumulated"], "tokens") == tiny.records(runs["at_once"], "tokens")


def garbled(rank: int, world_size: int, folder: Path) -> str:
    run = Path(train(tiny.recipe(folder, training__steps=3, validator__enable="false")))
    damaged = next((run / "checkpoint" / "step-3").glob("*.distcp"))
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    # With its own checksum, which would show the damage before the load.
    sums, checksum = json.loads(damaged.with_name("checksums.json").read_text()), Checksum.of(damaged)
    sums["files"][damaged.name] = {"bytes": checksum.bytes, "crc32": f"{checksum.crc32:08x}"}
    damaged.with_name("checksums.json").write_text(json.dumps(sums))
    with pytest.raises(RecipeError) as error:
        train(tiny.recipe(folder, checkpoint__load=str(run)))
    return str(error.value)


def test_a_garbled_checkpoint_with_matching_checksums_is_named(tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    message = run_ranks(garbled, 1, tmp_path)[0]
    for part in ("step-3", "cannot be loaded", "checkpoint.load_step"):
        assert part in message


SHORT = {"training__steps": 2, "metrics__log_freq": 2}


def run_once(rank: int, world_size: int, folder: Path) -> str:
    profiler = {"enable_profiling": True, "profile_freq": 2, "profiler_warmup": 1}
    return train(tiny.recipe(folder, **SHORT, **{f"profiler__{key}": value for key, value in profiler.items()}))


def test_the_run_folder_has_every_file_of_a_run(tmp_path: Path) -> None:
    """The resolved recipe, metrics, TensorBoard and a checkpoint of the last step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny.write_recipe(tmp_path)
    folder = Path(run_ranks(run_once, 2, tmp_path)[0])
    assert load(folder / "recipe.toml").training == tiny.recipe(tmp_path, **SHORT).training
    assert (tmp_path / "runs" / "tiny" / "latest").read_text().strip() == folder.name
    assert (folder / "checkpoint" / "step-2" / ".metadata").is_file()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    step, validation = lines[1], lines[2]
    assert {"data", "forward_backward", "clip", "optimizer", "step"} <= step["time"].keys()
    assert sum(step["time"].values()) <= 2 * step["time"]["step"] + 1e-9
    assert step["tokens"] == 2 * 2 * 2 * 64
    assert validation["bits_per_byte"] == pytest.approx(validation["val_loss"] / 0.6931472 * 1.0, rel=0.02)
    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"loss/train", "loss/validation", "loss/bits_per_byte"} <= tags
    assert {"step/tokens_per_second", "time/optimizer", "step/memory_gib"} <= tags
    assert any(tag.startswith("lr/") for tag in tags)
    assert (folder / "optimizers.txt").read_text().count("\nMuon step: ") == 1
    assert_ranges(folder / "profiling" / "traces")


def assert_ranges(traces: Path) -> None:
    """Check that the trace of each rank has a range for every stage of the second step, with the bucket."""
    files = sorted(traces.rglob("rank*_trace.json*"))
    assert [file.name.partition("_")[0] for file in files] == ["rank0", "rank1"]
    for file in files:
        packed = file.read_bytes()
        events = json.loads(gzip.decompress(packed) if file.suffix == ".gz" else packed)["traceEvents"]
        names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        stages = ("advance", "gather", "orthogonalize", "send_back", "apply")
        assert {"Muon.check", "Muon.tell", *(f"Muon.{stage} bucket 0" for stage in stages)} <= names
