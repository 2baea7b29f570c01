"""The run folder and checkpoint continued by a recipe, with complete, torn and exported checkpoints. No processes."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import tiny
from titan_muon import Expert
from titan_muon.trainer import run_folder
from titan_muon.trainer.data.tokenizers import tokenizer_config
from titan_muon.trainer.recipe import Recipe, RecipeError, load
from titan_muon.trainer.recipe.schema import keys
from titan_muon.trainer.run.checkpoints import RunCheckpoints, flaw
from titan_muon.trainer.run.runs import Run, agree, begin, changed_keys, discard, open_run
from titan_muon.trainer.run.trainer_config import trainer_config
from titan_muon.trainer.run_folder import FolderLock, RunFolder, run_name, runs_in, saved_steps, short_key
from titan_muon.trainer.storage.checksums import SummingWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)


def save(folder: Path, *steps: int, full: bool = True) -> None:
    for step in steps:
        state = {"layer.weight": torch.ones(1000)} | ({"train_state": {"step": step}} if full else {})
        writer = SummingWriter(folder / "checkpoint" / f"step-{step}", step, RunFolder(folder).id)
        dcp.save(state, storage_writer=writer, no_dist=True)


def start(recipe: Recipe, keys: tuple[str, ...] = ()) -> Run:
    run = open_run(recipe, keys)
    begin(run, recipe, keys)
    return run


def finished_run(folder: Path, *steps: int) -> Path:
    """A run folder of the tiny recipe with checkpoints and a metrics file of 9 steps."""
    run = Path(start(tiny.recipe(folder)).folder)
    save(run, *steps)
    lines = [json.dumps({"step": step, "loss": 1.0, "seconds": 2.0 * step}) for step in range(1, 10)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 10, "lo')
    return run


def shard(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.distcp"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: (path / ".metadata").unlink(), ".metadata"),
        (lambda path: (path / ".metadata").write_bytes(b"garbage"), ".metadata cannot be read"),
        (lambda path: shard(path).unlink(), "__0_0.distcp is missing"),
        (lambda path: shard(path).write_bytes(shard(path).read_bytes()[:-1]), "__0_0.distcp has"),
    ],
)
def test_a_torn_checkpoint_is_detected(tmp_path: Path, damage: Callable[[Path], object], named: str) -> None:
    save(tmp_path, 3)
    save(tmp_path, 4, full=False)
    checkpoint = tmp_path / "checkpoint" / "step-3"
    assert flaw(checkpoint) is None
    assert "last_save_model_only" in (flaw(checkpoint.with_name("step-4")) or ""), "an export continues no run"
    damage(checkpoint)
    assert named in (flaw(checkpoint) or "no flaw")


def test_new_runs_never_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    runs = [start(tiny.recipe(tmp_path)), start(tiny.recipe(tmp_path)), start(tiny.recipe(tmp_path), ("muon.lr",))]
    names = ["20260101-000000", "20260101-000000-2", "20260101-000000-3_muon.lr=0.001"]
    assert [Path(run.folder).name for run in runs] == names
    assert open_run(tiny.recipe(tmp_path, checkpoint__load="latest")).step == 0
    # The first start of a job with `latest` is a new run.
    assert "so this is its first start" in capsys.readouterr().out
    for run in runs:
        assert load(Path(run.folder) / "recipe.toml").name == "tiny"
        assert (run.checkpoint, run.step) == (None, 0)


def test_latest_continues_after_the_newest_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, 3, 6, 9)
    open_run(tiny.recipe(tmp_path))
    shard(run / "checkpoint" / "step-9").unlink()
    (run / "checkpoint" / "step-11.bak").mkdir()
    changed = tiny.recipe(tmp_path, checkpoint__load="latest", training__steps=5)
    opened = start(changed)
    assert opened == Run(str(run), str(run), str(run / "checkpoint" / "step-6"), 6, 12.0)
    assert "step-9 is passed over: __0_0.distcp is missing\n" in capsys.readouterr().out
    folders = {path.name for path in (run / "checkpoint").iterdir()}
    assert folders == {"aside-9", "step-11.bak", "step-3", "step-6"}
    assert list(tiny.records(run, "loss")) == [1, 2, 3, 4, 5, 6]
    assert load(run / "recipe.toml") == changed
    assert load(run / "recipe-until-step-6.toml") == tiny.recipe(tmp_path)


def test_an_earlier_step_continues_in_a_new_folder(tmp_path: Path) -> None:
    run = finished_run(tmp_path, 3, 6, 9)
    continued = start(tiny.recipe(tmp_path, checkpoint__load=str(run), checkpoint__load_step=3))
    assert continued.folder != str(run)
    assert (continued.checkpoint, continued.step, continued.seconds) == (str(run / "checkpoint" / "step-3"), 3, 6.0)
    assert list(tiny.records(continued.folder, "loss")) == [1, 2, 3]
    assert saved_steps(run / "checkpoint") == [9, 6, 3]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 10


LAYOUT = {"training__steps": 9, "checkpoint__freq": 7, "parallelism__tensor_parallel_degree": 2}
LAYOUT |= {"placement__muon": "owned", "muon__expert__exchange": "all_gather", "lr_scheduler__total_steps": 9}
BATCH, LOCAL = {"training__global_batch_size": 8}, {"training__local_batch_size": 4}


@pytest.mark.parametrize(
    ("values", "changed", "refused"),
    [
        ({}, LAYOUT, None),
        ({}, {"muon__expert__release_grads": True, "muon__expert__keep_buffers": True}, None),
        ({}, {"debug__detect_anomaly": True, "debug__check_replicas_freq": 3, "qk_clip__mode": "log"}, None),
        ({}, {"checkpoint__load_only": True, "metrics__disable_color_printing": True}, None),
        ({}, {"qk_clip__mode": "clip"}, 'qk_clip.mode = "clip"'),
        ({}, {"muon__lr": 0.25}, "muon.lr = 0.25"),
        ({}, {"data__seed": 3}, "data.seed = 3"),
        # The local batch size is a layout if the global batch is fixed, and otherwise the batch.
        (BATCH, {**BATCH, **LOCAL}, None),
        ({}, LOCAL, "training.local_batch_size = 4"),
    ],
)
def test_latest_refuses_another_value_of_a_run_with_both_ways_out(
    tmp_path: Path, values: dict[str, object], changed: dict[str, object], refused: str | None
) -> None:
    """The value is the file's, so that the name is the same. Speed and layout of a run may change."""
    run = Path(start(tiny.recipe(tmp_path, **values)).folder)
    save(run, 3)
    latest = tiny.recipe(tmp_path, checkpoint__load="latest", **changed)
    if refused is not None:
        problem = f"{re.escape(refused)} differs from {run}, which has .* to continue the run, or write checkpoint.load"
        with pytest.raises(RecipeError, match=f'^{problem} = "none" or another --name'):
            open_run(latest)
        latest = tiny.recipe(tmp_path, checkpoint__load=str(run), **changed)
    opened = open_run(latest)
    assert (opened.folder, opened.step) == (str(run), 3)


def test_latest_is_the_newest_run_with_the_typed_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep with `latest` has as many runs as values; `--name` names alone."""
    lower = tiny.recipe(tmp_path, muon__lr=0.001)
    higher = tiny.recipe(tmp_path, muon__lr=0.25)
    first, second = (start(recipe, ("muon.lr", "training.steps")) for recipe in (lower, higher))
    save(Path(first.folder), 3)
    save(Path(second.folder), 3)
    latest = tiny.recipe(tmp_path, muon__lr=0.001, training__steps=5, checkpoint__load="latest")
    assert open_run(latest, ("muon.lr", "checkpoint.load", "muon.expert.release_grads")).folder == first.folder
    capsys.readouterr()
    third = tiny.recipe(tmp_path, muon__lr=0.5, checkpoint__load="latest")
    assert open_run(third, ("muon.lr", "checkpoint.load")).source is None
    shown = capsys.readouterr().out
    assert "no run muon.lr=0.5 has a whole checkpoint" in shown
    assert Path(first.folder).name in shown
    with pytest.raises(RecipeError, match=r"muon\.lr = 0\.5 differs from"):
        open_run(third, ("muon.lr", "name"))


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "not UTF-8"])
def test_a_run_without_a_readable_recipe_is_passed_over_by_latest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    run = finished_run(tmp_path, 3)
    (run / "recipe.toml").unlink() if content is None else (run / "recipe.toml").write_bytes(content)
    assert open_run(tiny.recipe(tmp_path, checkpoint__load="latest")).step == 0
    assert f"{run.name}, which cannot be read ({run}/recipe.toml" in capsys.readouterr().out
    recipe = tiny.recipe(tmp_path, checkpoint__load=str(run))
    named = open_run(recipe)
    assert (named.folder, named.step) == (str(run), 3)
    assert changed_keys(named, recipe) == []
    assert f"warning: changes since the checkpoint are unknown: {run}/recipe.toml" in capsys.readouterr().out
    begin(named, recipe)
    assert load(run / "recipe.toml") == recipe


def test_a_resume_lists_changed_keys(tmp_path: Path) -> None:
    """The loaded states list those of the optimizers."""
    run = finished_run(tmp_path, 3)
    continued = open_run(tiny.recipe(tmp_path, checkpoint__load="latest"))
    other = tiny.recipe(tmp_path, checkpoint__load=str(run), training__steps=5, muon__lr=0.5, data__seed=3)
    assert sorted(changed_keys(continued, other)) == ["data.seed = 0, here 3", "training.steps = 6, here 5"]
    assert changed_keys(continued, tiny.recipe(tmp_path)) == []
    assert changed_keys(Run(str(tmp_path)), other) == []


def test_a_crash_in_any_write_of_a_run_leaves_its_recipe_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path, 3)
    files = (run / "recipe.toml", run.parent / "latest")
    before = [file.read_bytes() for file in files]
    changed = tiny.recipe(tmp_path, checkpoint__load="latest", training__steps=5)
    opened = open_run(changed)
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError("power loss")))
    with pytest.raises(OSError, match="power loss"):
        begin(opened, changed)
    assert [file.read_bytes() for file in files] == before


def test_a_damaged_line_of_the_metrics_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, 3)
    file = run / "metrics.jsonl"
    lines = file.read_bytes().splitlines()
    # A record of another tool, without a step, must not end a resume.
    file.write_bytes(b"\n".join([lines[0], b"\xff\xfe", b'{"event": "preempted"}', *lines[1:], b'{"step": null}', b""]))
    opened = start(tiny.recipe(tmp_path, checkpoint__load="latest"))
    assert (opened.step, opened.seconds) == (3, 6.0)
    shown = capsys.readouterr().out
    assert f"warning: {file}: left out the damaged line 2\n" in shown
    assert f"warning: {file}: left out the damaged line {len(lines) + 3}\n" in shown
    assert [record["step"] for record in RunFolder(run).records(9)] == [1, 2, 3]
    assert RunFolder(tmp_path / "absent").records(2) == []


def test_the_file_latest_means_the_newest_run(tmp_path: Path) -> None:
    """The path has no special character for a shell, and no changing name."""
    run = finished_run(tmp_path, 3)
    latest = run.parent / "latest"
    recipe = tiny.recipe(tmp_path, checkpoint__load=str(latest))
    assert open_run(recipe).folder == str(run)
    for damage in (b"", b"\xff", b"a\0b", b"../a"):
        latest.write_bytes(damage)
        problem = r"checkpoint\.load = '.*/latest': .* is damaged or names a removed folder; name a run's folder"
        with pytest.raises(RecipeError, match=problem):
            open_run(recipe)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"checkpoint__load": "nowhere"}, "no such folder"),
        ({"checkpoint__load": "RUN", "checkpoint__load_step": 5}, "saved steps: 9, 6, 3"),
        ({"checkpoint__load": "RUN", "checkpoint__load_step": 9}, "step-9 cannot be used: __0_0.distcp is missing"),
        ({"checkpoint__load": "latest", "checkpoint__load_step": 5}, "no run in"),
        ({"checkpoint__load_step": 5}, 'needs checkpoint.load = "latest"'),
        ({"checkpoint__load": "latest", "checkpoint__enable": "false"}, "needs checkpoint.enable = true"),
        ({"checkpoint__load": "CORPUS"}, "has no whole checkpoint"),
    ],
)
def test_an_impossible_continuation_is_refused_with_the_key(
    tmp_path: Path, values: dict[str, object], named: str
) -> None:
    run = finished_run(tmp_path, 3, 6, 9)
    shard(run / "checkpoint" / "step-9").unlink()
    real = {"RUN": str(run), "CORPUS": str(tmp_path / "corpus")}
    values = {key: real.get(str(value), value) for key, value in values.items()}
    with pytest.raises(RecipeError, match=r"checkpoint\.load") as error:
        open_run(tiny.recipe(tmp_path, **values))
    assert named in str(error.value)
    assert (run / "checkpoint" / "step-9").is_dir(), "an error must leave the run as it was"


def test_a_restart_continues_the_run_of_the_job(tmp_path: Path) -> None:
    """The next attempt continues the job's folder, for any `checkpoint.load`. Without a checkpoint it begins there."""
    run = finished_run(tmp_path, 3, 6)
    asked = tiny.recipe(tmp_path, checkpoint__exclude_from_loading="train_state")
    with FolderLock() as lock:
        continued = agree(asked, None, lock, interrupted=str(run))
    assert continued == Run(str(run), str(run), str(run / "checkpoint" / "step-6"), 6, 12.0, restarted=True)
    assert trainer_config(asked, continued, 1).checkpoint.excluded == ()
    other = Path(start(tiny.recipe(tmp_path)).folder)
    (other / "checkpoint" / "step-5").mkdir(parents=True)
    (other / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    anew = open_run(asked, interrupted=str(other))
    assert anew == Run(str(other)), "nothing was saved there"
    begin(anew, asked)
    assert (other / "metrics.jsonl").read_text() == ""
    assert [path.name for path in (other / "checkpoint").iterdir()] == ["aside-5"]


@pytest.mark.parametrize("file", ["metrics.jsonl", "running.lock"])
def test_a_file_that_this_user_may_not_use_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Tests may run as root, who may use each file."""
    run = finished_run(tmp_path, 3)
    locked, opened = run / file, os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path) == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    reason = f"[Errno 13] Permission denied: {str(locked)!r}. Free space, give this user the right to read"
    text = f"dump_folder = {str(tmp_path / 'runs')!r}: {reason}"
    with FolderLock() as lock, pytest.raises(RecipeError, match="^" + re.escape(text)):
        agree(tiny.recipe(tmp_path, checkpoint__load="latest"), None, lock)


def test_only_a_new_folder_is_discarded(tmp_path: Path) -> None:
    run = finished_run(tmp_path, 3)
    kept = (run / "metrics.jsonl").read_text()
    discard(open_run(tiny.recipe(tmp_path, checkpoint__load="latest", training__steps=5)))
    assert (run / "metrics.jsonl").read_text() == kept
    assert load(run / "recipe.toml") == tiny.recipe(tmp_path)
    new = open_run(tiny.recipe(tmp_path))
    discard(new)
    assert not Path(new.folder).exists()
    discard(open_run(tiny.recipe(tmp_path, dump_folder=str(tmp_path / "none yet"))))
    assert not (tmp_path / "none yet").exists(), "folders that are empty then go too"
    assert run.is_dir()


def test_a_runs_name_is_what_was_typed_with_optimizer_keys_first(tmp_path: Path) -> None:
    values = {"placement__muon": "owned", "training__global_batch_size": -1, "data__files": '["a/*", "ü"]'}
    recipe = tiny.recipe(tmp_path, dump_folder=str(tmp_path / "other"), **values)
    typed = ("dump_folder", "data.files", "placement.muon", "training.global_batch_size", "muon.lr", "checkpoint.load")
    assert run_name(recipe, typed) == "muon.lr=0.001,batch=-1,placement=owned"
    assert run_name(recipe, ("muon.lr", "adamw.lr")) == "muon.lr=0.001,adamw.lr=0.001"
    steps = ("training.steps", "validator.steps", "training.seq_len")
    assert run_name(recipe, steps) == "seq_len=64,training.steps=6,validator.steps=2"
    assert len({short_key(key) for key in keys(Recipe)}) == len(keys(Recipe)), "every key has a name of its own"
    many = ("checkpoint.folder", "validator.freq", "training.seq_len", "training.max_norm", "data.vocab_size")
    many += ("data.validation_fraction", "training.dtype", "lr_scheduler.decay_type", "adamw.weight_decay")
    long, longer = run_name(recipe, many), run_name(recipe, (*many, "debug.deterministic"))
    assert re.search(r"adamw\.weight_decay=0\.1.*\+", long), "an optimizer's key is never lost"
    assert (len(long) <= 160, long != longer) == (True, True)


def test_the_newest_run_is_selected_by_time_not_by_name(tmp_path: Path) -> None:
    names = ["20260101-000000-3_a=a", "20260101-000000-2", "20260101-000000_a=z", "20250101-000000_z=z"]
    for name in sorted(names):
        (tmp_path / name).mkdir()
    assert [run.path.name for run in runs_in(tmp_path)] == names


def test_a_removed_key_without_effect_is_left_out_of_a_saved_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("[muon.expert]\nsplit_over = 1\neps = 1e-9\n")
    assert load(file, saved=True).muon.expert == Expert(eps=1e-9)
    with pytest.raises(RecipeError, match=r"recipe.toml: muon.expert.split_over was removed"):
        load(file)


def test_nothing_in_a_run_folder_is_opened_through_a_link(tmp_path: Path) -> None:
    """Others may write to a shared folder of runs."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    for name in ("running.lock", "recipe-until-step-3.toml", "tokenizer.json", "recipe.toml", "latest", "run.json"):
        run = finished_run(tmp_path, 3)
        changed = tiny.recipe(tmp_path, checkpoint__load=str(run), training__steps=5)
        opened = open_run(changed)
        file = run.parent / name if name == "latest" else run / name
        file.unlink(missing_ok=True)
        file.symlink_to(victim)
        if name != "latest":
            with FolderLock() as lock, pytest.raises(RecipeError, match=f"{name} is a symbolic link"):
                lock.take(str(run))
        if name == "run.json":
            with pytest.raises(OSError, match="symbolic link"):
                assert RunFolder(run).id
        if name != "running.lock":
            begin(opened, changed, tokenizer="{}")
        assert victim.read_text() == "untouched", name
    for name in ("tb", "checkpoint/step-9"):
        (run / name).symlink_to(tmp_path)
        with FolderLock() as lock, pytest.raises(RecipeError, match=f"{name} is a symbolic link"):
            lock.take(str(run))
        (run / name).unlink()


def test_a_step_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    run, other = finished_run(tmp_path, 3), finished_run(tmp_path, 6)
    (other / "checkpoint" / "step-6").rename(run / "checkpoint" / "step-6")
    assert run_folder.damage(run / "checkpoint" / "step-6", RunFolder(run).id) == "the files are of another run"
    with FolderLock() as lock:
        opened = agree(tiny.recipe(tmp_path, checkpoint__load=str(run)), None, lock)
    assert opened.step == 3
    with pytest.raises(RecipeError, match="the files are of another run"):
        RunFolder(run).checkpoint(6)


def test_a_run_of_version_0_2_has_no_typed_keys_and_continues(tmp_path: Path) -> None:
    run = Path(start(tiny.recipe(tmp_path)).folder)
    (run / "run.json").unlink()
    save(run, 3)
    folder = RunFolder(run)
    assert (folder.id, folder.typed, folder.world_size, folder.tokenizer) == (None, (), None, None)
    assert open_run(tiny.recipe(tmp_path, checkpoint__load="latest")).folder == str(run)


def test_the_tokenizer_of_a_run_is_read_when_its_text_is_gone(tmp_path: Path) -> None:
    """Otherwise an export after new text would have another tokenizer than the weights."""
    recipe = tiny.recipe(tmp_path, data__tokenizer="bpe", data__vocab_size=300)
    trained = tokenizer_config(recipe.data).build(tokenizer_path="")
    run = open_run(recipe)
    begin(run, recipe, tokenizer=trained.text)
    for file in (tmp_path / "corpus").iterdir():
        file.unlink()
    read = trainer_config(recipe, run, 1).tokenizer.build(tokenizer_path="")
    assert (read.text, read.fingerprint) == (trained.text, trained.fingerprint)
    (Path(run.folder) / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match=r"tokenizer\.json is missing"):
        _ = RunFolder(run.folder).tokenizer


@pytest.mark.parametrize("step", ["abc", float("nan"), -5, 17])
def test_a_forged_state_of_the_trainer_is_refused(tmp_path: Path, step: object) -> None:
    loaded = {"step": 20, "ntokens_seen": 1, "data_start": 0}
    checkpoints = mock.Mock(states={"train_state": SimpleNamespace(state_dict=lambda: loaded)})
    RunCheckpoints._check_train_state(checkpoints, tmp_path / "step-20")
    loaded["step"] = step
    with pytest.raises(RecipeError, match="is not the state of this step"):
        RunCheckpoints._check_train_state(checkpoints, tmp_path / "step-20")
