"""Run folders, `<dump_folder>/<recipe name>/<time>_<what differs>`: a new one for each run, or one that is continued.

Rank 0 decides and touches the disk; the other ranks are told (`agree`).
"""

import contextlib
import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from titan_muon.titan.data.cache import atomic
from titan_muon.titan.launch.folder_lock import FolderLock
from titan_muon.titan.recipe import Recipe, RecipeError, to_toml
from titan_muon.titan.run.checkpoints import checkpoint_path, flaw, saved_steps
from titan_muon.titan.run.metrics import METRICS_FILE, read_until
from titan_muon.titan.run_name import what_differs

RECIPE_FILE = "recipe.toml"
LATEST_FILE = "latest"
FORMAT = "%Y%m%d-%H%M%S"


@dataclass(frozen=True)
class Run:
    """Where a run is kept and where it goes on.

    Attributes:
        folder: its folder, absolute.
        source: the run folder that it continues, `folder` itself or another; None if it starts anew.
        checkpoint: checkpoint to load, in `source`.
        step: steps already done.
        seconds: that those steps took.
        restarted: whether an earlier attempt of the same job did them.
    """

    folder: str
    source: str | None = None
    checkpoint: str | None = None
    step: int = 0
    seconds: float = 0.0
    restarted: bool = False


def agree(
    recipe: Recipe,
    group: dist.ProcessGroup | None,
    lock: FolderLock,
    given: tuple[str, ...] = (),
    interrupted: str | None = None,
) -> Run:
    """The run that rank 0 opens, on every rank of `group` (all ranks, on the CPU; None for a single process).

    Rank 0 takes `lock` on the run's folder. `given` are the keys that the command line gives other values than the
    recipe's file does. `interrupted` is the folder that an earlier attempt of this job began. Raises on every rank what
    `open_run` raises, and RecipeError for a folder that another job is in.
    """
    # The error is sent like the answer: raised on rank 0 alone, it would leave the others waiting in the broadcast.
    answer: list[Run | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            opened = open_run(recipe, given) if interrupted is None else _open_again(recipe, interrupted)
            lock.take(opened.folder)
            answer[0] = opened
        except ValueError as error:
            answer[0] = error
        except OSError as error:
            answer[0] = RecipeError(f"dump_folder = {recipe.dump_folder!r} cannot be written: {error}")
        except Exception as error:
            answer[0] = error
    if group is not None:
        dist.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[0], Exception):
        raise answer[0]
    assert answer[0] is not None, "rank 0 always answers"
    return answer[0]


def open_run(recipe: Recipe, given: tuple[str, ...] = ()) -> Run:
    """The run that `checkpoint.load` asks for. A new run's folder is made, named after the time and what differs from
    earlier runs and from the recipe's file (`given`); nothing else is touched.

    Raises RecipeError if `checkpoint.load` names a folder or a step from which no run can be continued.
    """
    runs = Path(recipe.dump_folder).resolve() / recipe.name
    found = _source(recipe, runs)
    if found is None:
        return Run(str(_new_folder(runs, recipe, given)))
    source, step = found
    checkpoints = source / recipe.checkpoint.folder
    checkpoint = checkpoint_path(checkpoints, step)
    # Without the trainer's state steps are counted from 0 again: another run, in a folder of its own.
    if "train_state" in recipe.checkpoint.exclude_from_loading:
        return Run(str(_new_folder(runs, recipe, given)), str(source), str(checkpoint))
    # After an earlier step a run goes on in a new folder, so that what it computed after that step is not overwritten.
    goes_back = any(flaw(checkpoint_path(checkpoints, later)) is None for later in _later(checkpoints, step))
    folder = _new_folder(runs, recipe, given) if goes_back else source
    _, seconds = read_until(source / METRICS_FILE, step)
    return Run(str(folder), str(source), str(checkpoint), step, seconds)


def _open_again(recipe: Recipe, folder: str) -> Run:
    """The run that an earlier attempt of this job began in `folder`, whatever the recipe asks a first attempt to load.

    As the recipe asks if no checkpoint was saved there.
    """
    # All of it, also what the recipe leaves out of another run's checkpoint: this one is the job's own.
    own = replace(recipe.checkpoint, load=folder, load_step=-1, exclude_from_loading=())
    if recipe.checkpoint.enable:
        with contextlib.suppress(RecipeError):
            return replace(open_run(replace(recipe, checkpoint=own)), restarted=True)
    print(f"the attempt before this one left no whole checkpoint in {folder}", flush=True)
    return open_run(recipe)


def begin(run: Run, recipe: Recipe) -> None:
    """Ready the folder for the first step; called on rank 0 when nothing can be refused any more.

    Writes the recipe and the file `latest`, takes over the metrics up to `run.step`, and sets aside what was saved for
    later steps but cannot be continued.
    """
    folder = Path(run.folder)
    _write_recipe(folder, to_toml(recipe), run.step)
    (folder.parent / LATEST_FILE).write_text(folder.name + "\n", encoding="utf-8")
    if run.source is not None:
        # The reporter's file, and one of each rank under metrics.save_for_all_ranks.
        for file in (Path(run.source) / METRICS_FILE, *Path(run.source).glob(f"rank-*/{METRICS_FILE}")):
            lines, _ = read_until(file, run.step)
            target = folder / file.relative_to(run.source)
            target.parent.mkdir(exist_ok=True)
            # In one stroke: a crash here must not cost the record of the run that is continued.
            with atomic(target) as temporary:
                temporary.write_text("".join(lines), encoding="utf-8")
    if run.source == run.folder:
        checkpoints = folder / recipe.checkpoint.folder
        for step in _later(checkpoints, run.step):
            _set_aside(checkpoint_path(checkpoints, step), step)


def discard(run: Run) -> None:
    """Remove the folder of a run that could not begin; called on rank 0. A folder that is continued is left alone."""
    if run.source != run.folder:
        shutil.rmtree(run.folder, ignore_errors=True)


def _source(recipe: Recipe, runs: Path) -> tuple[Path, int] | None:
    """The run folder and the step to continue from; None for a new run."""
    load, step = recipe.checkpoint.load, recipe.checkpoint.load_step
    if load == "none":
        if step != -1:
            raise RecipeError(f'checkpoint.load_step = {step} needs checkpoint.load = "latest" or a run\'s folder')
        return None
    if not recipe.checkpoint.enable:
        raise RecipeError(f"checkpoint.load = {load!r} needs checkpoint.enable = true")
    return _latest_run(recipe, runs) if load == "latest" else _named_run(recipe, Path(load).resolve())


def _named_run(recipe: Recipe, folder: Path) -> tuple[Path, int]:
    load = f"checkpoint.load = {recipe.checkpoint.load!r}"
    if not folder.is_dir():
        raise RecipeError(f'{load}: no such folder; it takes "none", "latest" or a run\'s folder')
    found = _whole_step(recipe, folder)
    if found is None:
        raise RecipeError(f"{load}: {folder} has no whole checkpoint in {recipe.checkpoint.folder}/")
    return folder, found


def _latest_run(recipe: Recipe, runs: Path) -> tuple[Path, int] | None:
    # The newest run may have ended before its first checkpoint; then the one before it is meant, as it would have been
    # had the newest never been started.
    for folder in run_folders(runs):
        found = _whole_step(recipe, folder)
        if found is not None:
            return folder, found
    step = recipe.checkpoint.load_step
    if step != -1:
        raise RecipeError(f"checkpoint.load_step = {step}: no run in {runs} has a checkpoint of that step")
    # No error: a job that is always submitted with `latest` has a first start too.
    print(f'checkpoint.load = "latest": no run in {runs} has a whole checkpoint; starting anew', flush=True)
    return None


def _whole_step(recipe: Recipe, folder: Path) -> int | None:
    """The step to continue a run folder from; None if there is none. Says which newer checkpoints are passed over."""
    checkpoints = folder / recipe.checkpoint.folder
    asked = recipe.checkpoint.load_step
    if asked != -1:
        return _asked_step(checkpoints, asked, must_exist=recipe.checkpoint.load != "latest")
    passed: list[str] = []
    whole = None
    for step in saved_steps(checkpoints):
        path = checkpoint_path(checkpoints, step)
        wrong = flaw(path)
        if wrong is None:
            whole = step
            break
        passed.append(f"warning: checkpoint {path} is passed over: {wrong}")
    for line in passed:
        print(line if whole is None else f"{line}; using step {whole} instead", flush=True)
    return whole


def _asked_step(checkpoints: Path, step: int, *, must_exist: bool) -> int | None:
    path, steps = checkpoint_path(checkpoints, step), saved_steps(checkpoints)
    if step not in steps:
        if must_exist:
            there = ", ".join(map(str, steps)) if steps else "none"
            raise RecipeError(f"checkpoint.load_step = {step}: {path} is not there; steps saved: {there}")
        return None
    # Falling back to another step is for `latest` alone: here the user has named one.
    wrong = flaw(path)
    if wrong is not None:
        raise RecipeError(f"checkpoint.load_step = {step}: {path} cannot be used: {wrong}; choose another step")
    return step


def _new_folder(runs: Path, recipe: Recipe, given: tuple[str, ...]) -> Path:
    stamp, earlier = time.strftime(FORMAT), run_folders(runs)
    said = what_differs(recipe, [folder / RECIPE_FILE for folder in earlier], given)
    # Runs of the same second are numbered before what differs, or their names would not be in the order of time.
    taken = {folder.name.partition("_")[0] for folder in earlier}
    for path in _numbered(runs / stamp):
        folder = path.with_name(f"{path.name}_{said}" if said else path.name)
        # mkdir alone decides: two runs that start in the same second would both find the name free by asking.
        with contextlib.suppress(FileExistsError):
            if path.name not in taken:
                folder.mkdir(parents=True)
                return folder
    raise AssertionError("there is always another number")


def run_folders(runs: Path) -> list[Path]:
    """The folders of a recipe's runs, the newest first."""
    # By the time alone: what differs stands behind it and says nothing of the order.
    folders = (path for path in runs.glob("*") if path.is_dir())
    return sorted(folders, key=lambda path: path.name.partition("_")[0], reverse=True)


def _numbered(path: Path) -> Iterator[Path]:
    """A path, then with -2, -3 and so on behind its name."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def _later(checkpoints: Path, step: int) -> list[int]:
    return [other for other in saved_steps(checkpoints) if other > step]


def _set_aside(checkpoint: Path, step: int) -> None:
    # PyTorch saves into a folder that exists, and would leave files of the old save beside those of the new one. It is
    # renamed, not removed: someone may still rescue what is in it.
    target = next(path for path in _numbered(checkpoint.with_name(f"aside-{step}")) if not path.exists())
    checkpoint.rename(target)


def _write_recipe(folder: Path, text: str, step: int) -> None:
    file = folder / RECIPE_FILE
    # A recipe that differs is what the steps until now were trained with, so it is kept beside the new one.
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        file.rename(folder / f"recipe-until-step-{step}.toml")
    file.write_text(text, encoding="utf-8")
