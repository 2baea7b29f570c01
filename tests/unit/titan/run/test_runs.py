"""The run folder and checkpoint continued by a recipe, with complete, torn and exported checkpoints. No processes."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests import tiny
from titan_muon.titan import compat
from titan_muon.titan.recipe import Recipe, RecipeError, load, sections, to_toml
from titan_muon.titan.recipe.files import keys_of_the_command_line

compat.install()

from titan_muon.titan.checks.curve import reports_of  # noqa: E402
from titan_muon.titan.launch.folder_lock import FolderLock  # noqa: E402
from titan_muon.titan.run.checkpoints import RunCheckpoints, flaw, saved_steps  # noqa: E402
from titan_muon.titan.run.metrics import read_until  # noqa: E402
from titan_muon.titan.run.runs import (  # noqa: E402
    Run,
    agree,
    begin,
    changed_keys,
    changes_text,
    discard,
    note_divergence,
    open_run,
    run_folders,
)
from titan_muon.titan.run.trainer_config import trainer_config  # noqa: E402
from titan_muon.titan.run_name import distinguishing_keys  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path, *steps: int, full: bool = True) -> None:
    for step in steps:
        state = {"layer.weight": torch.ones(1000)} | ({"train_state": {"step": step}} if full else {})
        dcp.save(state, checkpoint_id=folder / "checkpoint" / f"step-{step}", no_dist=True)


def start(recipe: Recipe, keys: tuple[str, ...] = ()) -> Run:
    run = open_run(recipe, keys)
    begin(run, recipe)
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
        (lambda path: (path / ".metadata").write_bytes(b""), ".metadata cannot be read"),
        (lambda path: (path / ".metadata").write_bytes(b"garbage"), ".metadata cannot be read"),
        (lambda path: shard(path).unlink(), "__0_0.distcp is missing"),
        (lambda path: shard(path).write_bytes(shard(path).read_bytes()[:-1]), "__0_0.distcp has"),
    ],
)
def test_a_torn_checkpoint_is_detected(tmp_path: Path, damage: object, named: str) -> None:
    """For a save cut off at any file; the error names the file."""
    save(tmp_path, 3)
    save(tmp_path, 4, full=False)
    checkpoint = tmp_path / "checkpoint" / "step-3"
    assert flaw(checkpoint) is None
    assert "last_save_model_only" in (flaw(checkpoint.with_name("step-4")) or ""), "an export continues no run"
    damage(checkpoint)  # type: ignore[operator]
    assert named in (flaw(checkpoint) or "no flaw")


def test_only_step_folders_are_checkpoints(tmp_path: Path) -> None:
    """Folders set aside and other entries are ignored."""
    save(tmp_path, 3, 10)
    (tmp_path / "checkpoint" / "aside-12").mkdir()
    (tmp_path / "checkpoint" / "step-11.bak").mkdir()
    (tmp_path / "checkpoint" / "step-13").write_text("a file")
    assert saved_steps(tmp_path / "checkpoint") == [10, 3]
    assert saved_steps(tmp_path / "nothing") == []


def test_new_runs_never_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs begun in the same second must get numbered folders, each with the recipe."""
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    recipe = tiny.recipe(tmp_path, checkpoint__load="latest")
    runs = [start(tiny.recipe(tmp_path)), start(tiny.recipe(tmp_path)), start(tiny.recipe(tmp_path, muon__lr=0.5))]
    names = ["20260101-000000", "20260101-000000-2", "20260101-000000-3_muon.lr=0.5"]
    assert [Path(run.folder).name for run in runs] == names
    assert open_run(recipe).step == 0
    assert "starting anew" in capsys.readouterr().out, "the first start of a job with `latest` is a new run"
    for run in runs:
        assert load(Path(run.folder) / "recipe.toml").name == "tiny"
        assert (run.checkpoint, run.step) == (None, 0)


@pytest.mark.parametrize(
    ("saved", "seeds", "asked", "step"),
    [
        ((3, 6), (0,), {}, 6),
        ((3, 6), (0, 0), {}, 3),
        ((3, 6), (0, 1), {}, 6),
        ((3, 6), (0, 0), {"checkpoint__load_step": 6}, 6),
        ((6,), (0, 0), {}, 6),
    ],
    ids=["once", "twice", "two recipes", "asked", "no other"],
)
def test_a_checkpoint_from_which_training_diverged_twice_is_passed_over(
    tmp_path: Path,
    saved: tuple[int, ...],
    seeds: tuple[int, ...],
    asked: dict[str, int],
    step: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A poisoned checkpoint must not end every restart."""
    run = finished_run(tmp_path, *saved)
    recipe = tiny.recipe(tmp_path, checkpoint__load="latest", **asked)
    for seed in seeds:
        continued = Run(str(run), str(run), str(run / "checkpoint" / "step-6"), 6)
        note_divergence(continued, tiny.recipe(tmp_path, data__seed=seed, checkpoint__load=str(run)))
    opened = open_run(recipe)
    assert (opened.step, opened.folder) == (step, str(run))
    text = "training diverged twice from there; checkpoint.load_step = 6 takes it nevertheless; using step 3 instead"
    assert (text in capsys.readouterr().out) == (step == 3)


def test_latest_continues_after_the_newest_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The torn newest must be named, set aside and passed over, and metrics after the step taken out."""
    run = finished_run(tmp_path, 3, 6, 9)
    open_run(tiny.recipe(tmp_path))
    shard(run / "checkpoint" / "step-9").unlink()
    opened = start(tiny.recipe(tmp_path, checkpoint__load="latest"))
    assert opened == Run(str(run), str(run), str(run / "checkpoint" / "step-6"), 6, 12.0)
    assert "step-9 is passed over: __0_0.distcp is missing; using step 6 instead" in capsys.readouterr().out
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["aside-9", "step-3", "step-6"]
    assert list(tiny.records(run, "loss")) == [1, 2, 3, 4, 5, 6]


def test_the_metrics_of_every_rank_continue_after_the_checkpoint(tmp_path: Path) -> None:
    """Under metrics.save_for_all_ranks each rank has a file, and no step may be recorded twice."""
    run = finished_run(tmp_path, 3)
    (run / "rank-1").mkdir()
    (run / "rank-1" / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    start(tiny.recipe(tmp_path, checkpoint__load="latest"))
    assert list(tiny.records(run / "rank-1", "loss")) == [1, 2, 3]
    beside = start(tiny.recipe(tmp_path, checkpoint__load=str(run), checkpoint__load_step=3)).folder
    assert beside == str(run)


def test_any_error_of_rank_0_is_raised_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on rank 0 alone would leave the remaining ranks in the broadcast."""
    sent: list[object] = []
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda objects, **_: sent.extend(objects))
    monkeypatch.setattr("titan_muon.titan.run.runs.open_run", lambda *_: {}["step"])
    with FolderLock() as lock, pytest.raises(KeyError):
        agree(tiny.recipe(tmp_path), object(), lock)  # type: ignore[arg-type]
    assert isinstance(sent[0], KeyError)


SAME = {"training__steps": 9, "checkpoint__interval": 7, "metrics__log_freq": 3, "comm__train_timeout_seconds": 9}
SAME |= {"parallelism__tensor_parallel_degree": 2, "placement__muon": "owned", "muon__exchange": "all_gather"}


@pytest.mark.parametrize(("key", "value"), [("muon__lr", 0.25), ("debug__seed", 7), ("data__seed", 3)])
def test_latest_continues_only_the_same_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: float
) -> None:
    """A sweep with `latest` has as many runs as values; steps and layouts are no experiment."""
    run = finished_run(tmp_path, 3)
    capsys.readouterr()
    new = start(tiny.recipe(tmp_path, checkpoint__load="latest", **{key: value}))
    assert (new.step, new.source) == (0, None)
    shown = capsys.readouterr().out
    assert f"{run} is another experiment ({key.replace('__', '.')} = " in shown
    assert f", here {value}" in shown
    assert len(shown.splitlines()) == 1
    again = open_run(tiny.recipe(tmp_path, checkpoint__load="latest", lr_scheduler__total_steps=9, **SAME))
    assert (again.folder, again.step) == (str(run), 3), "the newest run is another experiment's"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:200]),
    "not UTF-8": lambda file: file.write_bytes(b"\xff\xfe" + file.read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_without_a_readable_recipe_is_not_the_same_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """`latest` passes over the run in a line, and the named folder continues with a warning."""
    run = finished_run(tmp_path, 3)
    DAMAGE[damage](run / "recipe.toml")
    assert open_run(tiny.recipe(tmp_path, checkpoint__load="latest")).step == 0
    assert f"{run} may be another experiment ({run}/recipe.toml" in capsys.readouterr().out
    recipe = tiny.recipe(tmp_path, checkpoint__load=str(run))
    named = open_run(recipe)
    assert (named.folder, named.step) == (str(run), 3)
    assert "recipe.toml" in changes_text(named, recipe)
    assert changed_keys(named, recipe) == []
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert "warning: changes since the checkpoint are unknown: " in line
    assert "recipe.toml" in line
    begin(named, recipe)
    assert load(run / "recipe.toml") == recipe


def test_a_crash_in_any_write_of_a_run_leaves_its_recipe_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished_run(tmp_path, 3)
    files = (run / "recipe.toml", run.parent / "latest")
    before = [file.read_bytes() for file in files]
    changed = tiny.recipe(tmp_path, checkpoint__load="latest", training__steps=5)
    opened = open_run(changed)

    def torn(path: Path, *arguments: object, **_: object) -> None:
        raise OSError("power loss")

    monkeypatch.setattr(os, "replace", torn)
    with pytest.raises(OSError, match="power loss"):
        begin(opened, changed)
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"step": 2, "loss": null, "grad_norm": 1.0}'])
def test_a_damaged_line_of_the_metrics_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    run = finished_run(tmp_path, 3)
    file = run / "metrics.jsonl"
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([lines[0], line, *lines[1:]]))
    opened = start(tiny.recipe(tmp_path, checkpoint__load="latest"))
    assert (opened.step, opened.seconds) == (3, 6.0)
    assert f"warning: {file}: left out the damaged line 2\n" in capsys.readouterr().out
    assert reports_of(map(json.loads, read_until(file, 9)[0])) == []
    assert list(tiny.records(run, "loss")) == [1, 2, 3]


def test_the_file_latest_or_a_damaged_one_means_the_newest_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path has no special character for a shell, and no changing name."""
    run = finished_run(tmp_path, 3)
    latest = run.parent / "latest"
    for content in (latest.read_bytes(), b"", b"../../../etc", b"\xff", b"a\0b"):
        damaged = content != latest.read_bytes()
        latest.write_bytes(content)
        assert open_run(tiny.recipe(tmp_path, checkpoint__load=str(latest))).folder == str(run)
        warning = f"warning: {latest} is damaged; the newest run with checkpoints is {run}"
        assert (warning in capsys.readouterr().out) == damaged


def test_a_fixed_global_batch_may_be_divided_differently(tmp_path: Path) -> None:
    """The local batch size is a layout if the global batch is fixed, and otherwise the batch."""
    fixed = {"training__global_batch_size": 8}
    run = Path(start(tiny.recipe(tmp_path, **fixed)).folder)
    save(run, 3)
    more = {"checkpoint__load": "latest", "training__local_batch_size": 4}
    assert open_run(tiny.recipe(tmp_path, **fixed, **more)).folder == str(run)
    loose = Path(start(tiny.recipe(tmp_path)).folder)
    save(loose, 3)
    assert open_run(tiny.recipe(tmp_path, **more)).step == 0


def test_an_earlier_step_continues_in_a_new_folder(tmp_path: Path) -> None:
    """Later results are not overwritten."""
    run = finished_run(tmp_path, 3, 6, 9)
    continued = start(tiny.recipe(tmp_path, checkpoint__load=str(run), checkpoint__load_step=3))
    assert continued.folder != str(run)
    assert (continued.checkpoint, continued.step, continued.seconds) == (str(run / "checkpoint" / "step-3"), 3, 6.0)
    assert list(tiny.records(continued.folder, "loss")) == [1, 2, 3]
    assert saved_steps(run / "checkpoint") == [9, 6, 3]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 10


def test_the_previous_recipe_is_kept_beside_the_changed_recipe(tmp_path: Path) -> None:
    run = finished_run(tmp_path, 3)
    changed = tiny.recipe(tmp_path, checkpoint__load="latest", training__steps=5)
    start(changed)
    assert load(run / "recipe.toml") == changed
    assert load(run / "recipe-until-step-3.toml") == tiny.recipe(tmp_path)


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
    """A missing or torn folder or step is refused with the key."""
    run = finished_run(tmp_path, 3, 6, 9)
    shard(run / "checkpoint" / "step-9").unlink()
    real = {"RUN": str(run), "CORPUS": str(tmp_path / "corpus")}
    values = {key: real.get(str(value), value) for key, value in values.items()}
    with pytest.raises(RecipeError, match=r"checkpoint\.load") as error:
        open_run(tiny.recipe(tmp_path, **values))
    assert named in str(error.value)
    assert (run / "checkpoint" / "step-9").is_dir(), "an error must leave the run as it was"


def test_a_restart_continues_the_run_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt continues the job's folder, for any `checkpoint.load`."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    run = finished_run(tmp_path, 3, 6)
    other = start(tiny.recipe(tmp_path))
    asked = tiny.recipe(tmp_path, checkpoint__exclude_from_loading="train_state")
    with FolderLock() as lock:
        continued = agree(asked, None, lock, interrupted=str(run))
    assert continued == Run(str(run), str(run), str(run / "checkpoint" / "step-6"), 6, 12.0, restarted=True)
    assert trainer_config(asked, continued, 1).checkpoint.exclude_from_loading == []
    with FolderLock() as lock:
        assert agree(asked, None, lock, interrupted=other.folder).step == 0, "nothing was saved there"


def test_a_folder_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs with `load = "latest"` must not share a folder."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    run = finished_run(tmp_path, 3)

    def in_use(*_: object) -> None:
        raise BlockingIOError

    (run / "running.lock").write_text("process 7 on node-a")
    monkeypatch.setattr("fcntl.lockf", in_use)
    with FolderLock() as lock, pytest.raises(RecipeError, match="in use by process 7 on node-a"):
        agree(tiny.recipe(tmp_path, checkpoint__load="latest"), None, lock)


@pytest.mark.parametrize("file", ["metrics.jsonl", "running.lock", "."])
def test_a_file_that_this_user_may_not_use_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Tests may run as root, who may use each file."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    run = finished_run(tmp_path, 3)
    locked, opened = run / file, Path.open

    def refuse(path: Path, *arguments: object, **options: object) -> object:
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked)
    reason = f"[Errno 13] Permission denied: {str(locked)!r}. Give this user the right to read"
    text = f"dump_folder = {str(tmp_path / 'runs')!r}: {reason}"
    with FolderLock() as lock, pytest.raises(RecipeError, match="^" + re.escape(text)):
        agree(tiny.recipe(tmp_path, checkpoint__load="latest"), None, lock)


@pytest.mark.parametrize("enable", [False, True])
def test_the_group_of_asynchronous_checkpoints_has_a_description(tmp_path: Path, enable: bool) -> None:
    """The group keeps a separate timeout; without checkpoints the run has no group."""
    others = {"dataloader": None, "model_parts": [], "optimizers": None, "lr_schedulers": None, "sd_adapter": None}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = RunCheckpoints.Config(enable=enable, async_mode="async", initial_load_model_only=False)
        checkpoints = config.build(states={}, base_folder=str(tmp_path), **others)
        assert not enable or checkpoints.pg.group_desc == compat.ASYNC_CHECKPOINT
        checkpoints.close()
    finally:
        dist.destroy_process_group()


def test_only_a_new_folder_is_discarded(tmp_path: Path) -> None:
    """The new folder of an impossible run is removed, and a continued folder is unchanged."""
    run = finished_run(tmp_path, 3)
    kept = (run / "metrics.jsonl").read_text()
    discard(open_run(tiny.recipe(tmp_path, checkpoint__load="latest", training__steps=5)))
    assert (run / "metrics.jsonl").read_text() == kept
    assert load(run / "recipe.toml") == tiny.recipe(tmp_path)
    new = open_run(tiny.recipe(tmp_path))
    discard(new)
    assert not Path(new.folder).exists()
    discard(open_run(tiny.recipe(tmp_path, name="never")))
    assert not (run.parents[1] / "never").exists()
    assert run.is_dir()


RULED = """
[[optimizer.rule]]
match = "*"
optimizer = "adamw"
options = { betas = [0.5, 0.5] }
"""


def names(folder: Path, *recipes: Recipe, keys: tuple[str, ...] = ()) -> list[str]:
    """Differences in the folder names of consecutive runs."""
    return [Path(start(recipe, keys).folder).name.partition("_")[2] for recipe in recipes]


def test_a_run_is_named_after_differences_from_the_first_run(tmp_path: Path) -> None:
    """A user edits a file and runs again: TensorBoard's list distinguishes the runs."""
    owned, tensor = {"placement__muon": "owned"}, {"parallelism__tensor_parallel_degree": 2}
    edited = [{}, owned, owned | tensor, owned | tensor, tensor | {"muon__lr": 0.5}, {}]
    assert names(tmp_path, *(tiny.recipe(tmp_path, **values) for values in edited)) == [
        "",
        "placement=owned",
        "tensor_parallel_degree=2,placement=owned",
        "tensor_parallel_degree=2,placement=owned",
        "tensor_parallel_degree=2,muon.lr=0.5",
        "",
    ]


def test_a_run_is_named_after_the_keys_of_the_command_line(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, training__steps=4, dump_folder=str(tmp_path / "other"), metrics__log_freq=1)
    keys = keys_of_the_command_line(tmp_path / "tiny.toml", recipe)
    assert keys == ("dump_folder", "training.steps"), "log_freq is what the file says"
    ruled = tmp_path / "ruled.toml"
    ruled.write_text(RULED)
    assert keys_of_the_command_line(ruled, load(ruled)) == (), "options of rules are compared as the recipe has them"
    assert names(tmp_path, recipe, recipe, keys=keys) == ["training.steps=4", "training.steps=4"]
    batches = tiny.recipe(tmp_path, training__local_batch_size=-1, training__global_batch_size=8)
    keys = ("training.local_batch_size", "training.global_batch_size")
    assert names(tmp_path, batches, keys=keys) == ["local_batch_size=-1,global_batch_size=8"], "-1 is not 1"


def test_command_line_keys_come_first_in_a_name(tmp_path: Path) -> None:
    """User overrides are always shown, also in the first run."""
    assert names(tmp_path, tiny.recipe(tmp_path, muon__lr=0.5), keys=("muon.lr",)) == ["muon.lr=0.5"]
    assert names(tmp_path, tiny.recipe(tmp_path)) == ["muon.lr=0.001"]
    edited = {"muon__momentum": 0.5, "muon__weight_decay": 0.25, "adamw__lr": 0.5, "adamw__weight_decay": 0.5}
    (name,) = names(tmp_path, tiny.recipe(tmp_path, training__steps=4, **edited), keys=("training.steps",))
    assert name.startswith("training.steps=4,muon.lr=0.001,momentum=0.5")


def test_names_of_folders_are_short_and_plain(tmp_path: Path) -> None:
    start(tiny.recipe(tmp_path))
    rule = '{match = "layers.*", optimizer = "adamw"}'
    changed = {"adamw__lr": 0.25, "muon__momentum": 0.5, "muon__eps": 0.5, "muon__exchange": "all_gather"}
    changed |= {"optimizer__rule": rule, "comm__train_timeout_seconds": 7, "muon__weight_decay": 0.0}
    (name,) = names(tmp_path, tiny.recipe(tmp_path, **changed))
    assert len(name) <= 84
    assert name.endswith(",+3")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_=.,+-")


def test_the_newest_run_is_selected_by_time_not_by_name(tmp_path: Path) -> None:
    """Also for two runs of the same second, with any differences in the names."""
    for name in ("20260101-000000_a=z", "20260101-000000-2", "20250101-000000_z=z", "20260101-000000-3_a=a"):
        save(tmp_path / "runs" / "tiny" / name, 3)
        (tmp_path / "runs" / "tiny" / name / "recipe.toml").write_text(to_toml(tiny.recipe(tmp_path)))
    newest = open_run(tiny.recipe(tmp_path, checkpoint__load="latest"))
    assert Path(newest.folder).name == "20260101-000000-3_a=a"
    runs = tmp_path / "runs" / "tiny"
    assert [path.name for path in run_folders(runs)][1:3] == ["20260101-000000-2", "20260101-000000_a=z"]


def test_a_recipe_of_an_older_version_is_compared_with_the_defaults(tmp_path: Path) -> None:
    """An unknown new key has the default, a removed key differs, and a torn file has no differences."""
    recipe = Recipe(training=sections.Training(steps=6))
    for number, text in enumerate(("[muon]\nlr = 0.001\n", "not TOML")):
        (tmp_path / f"{number}.toml").write_text(text)
    older, torn, absent = (tmp_path / f"{number}.toml" for number in range(3))
    assert distinguishing_keys(Recipe(), older, ()) == ""
    assert distinguishing_keys(recipe, older, ()) == "training.steps=6"
    assert {distinguishing_keys(recipe, file, ()) for file in (torn, absent, None)} == {""}
