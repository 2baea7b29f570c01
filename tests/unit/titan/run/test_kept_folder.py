"""A removed run folder, a folder of an earlier attempt or another recipe, and changed assignments."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from titan_muon.titan import compat

compat.install()

from titan_muon.assignment.table import HEADER  # noqa: E402
from titan_muon.titan.checks.assignments import assigned_optimizers, changed_assignments  # noqa: E402
from titan_muon.titan.launch.folder_lock import FolderLock  # noqa: E402
from titan_muon.titan.recipe import Recipe, to_toml  # noqa: E402
from titan_muon.titan.run import checkpoints  # noqa: E402
from titan_muon.titan.run.runs import (  # noqa: E402
    Run,
    _opened,
    begin,
    changed_keys,
    earlier_optimizers,
    keep_folder,
)

TITLES = f"{HEADER.name}         {HEADER.shape}  {HEADER.optimizer}  {HEADER.matrices}     {HEADER.placement}"
TABLE = f"""{TITLES}  {HEADER.reason}
embedding.weight  8x4    adamw      -            whole      embedding
layers.0.wq       8x8    muon       1 of 8x8     whole      hidden matrix

Muon step: 1 matrix
"""


def test_assignments_are_read_from_the_table_and_changes_are_listed() -> None:
    before = assigned_optimizers(TABLE)
    assert before == {"embedding.weight": "adamw", "layers.0.wq": "muon"}
    assert changed_assignments(before, before) == []
    after = {"embedding.weight": "adamw", "layers.0.w_q": "adamw"}
    assert changed_assignments(before, after) == [
        "layers.0.wq is not trained, and was by muon in the run before",
        "layers.0.w_q is trained by adamw, and was not trained in the run before",
    ]
    assert "is trained by adamw, and was by muon" in changed_assignments(before, {**before, "layers.0.wq": "adamw"})[0]
    assert changed_assignments(before, {"other": "muon"}) == [], "another model"
    many = changed_assignments({f"w{i}": "muon" for i in range(20)}, {f"w{i}": "adamw" for i in range(20)})
    assert len(many) == 9
    assert many[-1] == "12 more parameters differ from the run before"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return replace(Recipe(), dump_folder=str(tmp_path), name="kept")


def test_a_resume_lists_changed_keys_of_the_curve(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    run = Run(str(tmp_path), source=str(tmp_path), checkpoint="step-1", step=1)
    training = replace(recipe.training, global_batch_size=16, steps=77)
    other = replace(recipe, training=training, muon=replace(recipe.muon, lr=0.5), data=replace(recipe.data, seed=3))
    lines = changed_keys(run, other)
    assert any("training.global_batch_size" in line for line in lines)
    assert "data.seed = 0, here 3" in lines
    assert not any("muon.lr" in line or "training.steps" in line for line in lines)
    assert changed_keys(run, recipe) == []
    assert changed_keys(Run(str(tmp_path)), other) == []


def test_a_removed_folder_is_reported_rewritten_and_locked(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept" / "run"
    folder.mkdir(parents=True)
    run = Run(str(folder))
    with FolderLock() as lock:
        lock.take(run.folder)
        begin(run, recipe)
        keep_folder(run, recipe, lock)
        assert capsys.readouterr().out == ""
        shutil.rmtree(folder)
        keep_folder(run, recipe, lock)
        assert f"warning: {folder} was removed or moved" in capsys.readouterr().out
        assert (folder / "recipe.toml").read_text() == to_toml(recipe)
        assert (folder / "running.lock").is_file()
        shutil.rmtree(folder)
        folder.symlink_to("/no/where")
        keep_folder(run, recipe, lock)
        assert f"warning: {folder} was removed or moved, and cannot be made again: " in capsys.readouterr().out


def test_an_attempt_without_a_checkpoint_reuses_the_folder_in_the_next_attempt(recipe: Recipe, tmp_path: Path) -> None:
    """Torn checkpoints and metrics of repeated steps are set aside."""
    folder = tmp_path / "kept" / "first"
    (folder / "checkpoint" / "step-5").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    run = _opened(recipe, (), str(folder), {})
    assert run == Run(str(folder))
    begin(run, recipe)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["first"]
    assert (folder / "metrics.jsonl").read_text() == ""
    assert [path.name for path in (folder / "checkpoint").iterdir()] == ["aside-5"]


def test_optimizers_are_compared_with_the_last_run_of_the_same_model(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, flavor in (("1", "moe_tiny"), ("2", "other")):
        folder = tmp_path / "kept" / name
        folder.mkdir(parents=True)
        written = replace(recipe, model=replace(recipe.model, flavor=flavor))
        (folder / "recipe.toml").write_text(to_toml(written))
        (folder / "optimizers.txt").write_text(name)
    assert earlier_optimizers(Run(str(tmp_path / "kept" / "3")), recipe) == "1"
    continued = Run(str(tmp_path / "kept" / "2"), str(tmp_path / "kept" / "2"))
    assert earlier_optimizers(continued, recipe) == "2"
    (tmp_path / "kept" / "2" / "optimizers.txt").write_bytes(b"\xff")
    assert earlier_optimizers(continued, recipe) is None
    assert f"warning: {tmp_path}/kept/2/optimizers.txt cannot be read" in capsys.readouterr().out


def test_folders_set_aside_are_purged_when_every_kept_checkpoint_is_newer(tmp_path: Path) -> None:
    for name in ("step-2", "step-4", "step-6", "step-8", "aside-3", "aside-7", "aside-7-2"):
        (tmp_path / name).mkdir()
    queue = mock.Mock()
    manager = SimpleNamespace(
        _should_purge=lambda: True, folder=str(tmp_path), keep_latest_k=2, protected_until=4, purge_queue=queue
    )
    checkpoints.RunCheckpoints._purge_stale_checkpoints(manager)  # type: ignore[arg-type]
    assert {Path(call.args[0]).name for call in queue.put.call_args_list} == {"step-2", "aside-3"}
