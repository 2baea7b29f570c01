"""Run folders, `<dump_folder>/<recipe name>/<time>_<keys of the command line>`, new or continued.

Rank 0 decides, touches the disk, and broadcasts the result (`agree`).
"""

import errno
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from titan_muon.titan.fault import unusable
from titan_muon.titan.launch.folder_lock import FolderLock
from titan_muon.titan.recipe import Recipe, RecipeError, to_toml
from titan_muon.titan.run.checkpoints import checkpoint_path, flaw, saved_steps
from titan_muon.titan.run.console import print_on_rank0
from titan_muon.titan.run.metrics import METRICS_FILE, read_until
from titan_muon.titan.run_name import IGNORED, changes, other_experiment, overrides_text
from titan_muon.titan.storage.checksums import damage

OPTIMIZERS_FILE = "optimizers.txt"
RECIPE_FILE = "recipe.toml"
LATEST_FILE = "latest"
SAVED_IN_CHECKPOINTS = ("muon.", "adamw.")
"""Tables with values in the checkpoint, which reports their changes."""
FORMAT = "%Y%m%d-%H%M%S"
Flaws = Mapping[Path, str]
"""Reasons not to use checkpoints, found in the content of their files."""


@dataclass(frozen=True)
class Run:
    """Folder and start of a run."""

    folder: str  # absolute path
    source: str | None = None  # folder of the continued run, perhaps the same; None for a new run
    checkpoint: str | None = None  # to load, in `source`
    step: int = 0  # steps already done
    seconds: float = 0.0  # time of these steps
    restarted: bool = False  # an earlier attempt of this job did these steps


def agree(
    recipe: Recipe,
    group: dist.ProcessGroup | None,
    lock: FolderLock,
    overrides: tuple[str, ...] = (),
    interrupted: str | None = None,
) -> Run:
    """The run opened and locked by rank 0, on every rank of `group` (gloo; None for a single process).

    `overrides`: keys of the command line. `interrupted`: folder of an earlier attempt of this job. Raises as `open_run`
    on every rank, and RecipeError for a folder in use by another job.
    """
    flaws: dict[Path, str] = {}
    while True:
        answer: list[Run | Exception | None] = [None]
        failure: Exception | None = None
        if dist.get_rank() == 0:
            try:
                opened = open_run(recipe, overrides, flaws, interrupted)
                if not os.access(opened.folder, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), opened.folder)
                lock.take(opened.folder)
                answer[0] = opened
            except OSError as error:
                answer[0] = unusable(recipe.dump_folder, error)
            except Exception as error:
                failure = error
                # As text, because not every error can be pickled.
                text = f"{type(error).__name__}: {error} (on rank 0)"
                answer[0] = error if isinstance(error, RecipeError) else RuntimeError(text)
        if group is not None:
            dist.broadcast_object_list(answer, src=0, group=group)
        run = answer[0]
        if isinstance(run, Exception):
            raise run if failure is None else failure
        assert run is not None, "rank 0 always answers"
        if run.checkpoint is None or (wrong := damage(Path(run.checkpoint), group)) is None:
            return run
        # Rank 0 chooses among the other checkpoints.
        flaws[Path(run.checkpoint)] = wrong
        print_on_rank0(f"warning: checkpoint {run.checkpoint} is passed over: {wrong}")
        if dist.get_rank() == 0:
            discard(run)


def open_run(
    recipe: Recipe,
    overrides: tuple[str, ...] = (),
    flaws: Flaws = MappingProxyType({}),
    interrupted: str | None = None,
) -> Run:
    """The run requested by `checkpoint.load`. Creates the folder of a new run, and changes nothing else.

    `overrides`, `interrupted`: as in `agree`. Raises RecipeError if no run can continue as requested.
    """
    if interrupted is not None:
        own = replace(recipe.checkpoint, load=interrupted, load_step=-1, exclude_from_loading=())
        if recipe.checkpoint.enable:
            with suppress(RecipeError):
                return replace(open_run(replace(recipe, checkpoint=own), flaws=flaws), restarted=True)
        print_on_rank0(f"the attempt before this one left no whole checkpoint in {interrupted}")
    runs = Path(recipe.dump_folder).resolve() / recipe.name
    start = _source(recipe, runs, flaws)

    def new_folder() -> str:
        return interrupted or _new_folder(recipe, runs, overrides)

    if start is None:
        return Run(new_folder())
    source, step = start
    checkpoints = source / recipe.checkpoint.folder
    checkpoint = checkpoint_path(checkpoints, step)
    if "train_state" in recipe.checkpoint.exclude_from_loading:
        return Run(new_folder(), str(source), str(checkpoint))
    # A new folder, so that later results are not overwritten.
    goes_back = any(flaw(path) is None and path not in flaws for path in _later(checkpoints, step))
    done = read_until(source / METRICS_FILE, step)
    seconds = next((record["seconds"] for record in reversed(done) if "seconds" in record), 0.0)
    return Run(new_folder() if goes_back else str(source), str(source), str(checkpoint), step, seconds)


def begin(run: Run, recipe: Recipe) -> None:
    """Write the recipe, copy the metrics up to `run.step`, and set later checkpoints aside.

    Called on rank 0 when nothing can be refused any more.
    """
    folder, content = Path(run.folder), to_toml(recipe)
    file = folder / RECIPE_FILE
    if file.is_file() and file.read_bytes() != content.encode():
        shutil.copyfile(file, file.with_name(f"recipe-until-step-{run.step}.toml"))
    write_file(file, content)
    write_file(folder.with_name(LATEST_FILE), f"{folder.name}\n")
    source = folder if run.source is None else Path(run.source)
    for metrics in (source / METRICS_FILE, *source.glob(f"rank-*/{METRICS_FILE}")):
        if metrics.is_file():
            records = read_until(metrics, run.step, print_on_rank0)
            target = folder / metrics.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            # A crash must not lose the record of the continued run.
            write_file(target, "".join(json.dumps(record) + "\n" for record in records))
    if source == folder:
        for checkpoint in _later(folder / recipe.checkpoint.folder, run.step):
            # PyTorch would save beside the old files.
            numbered = _numbered(checkpoint.with_name(checkpoint.name.replace("step", "aside")))
            checkpoint.rename(next(path for path in numbered if not path.exists()))


def discard(run: Run) -> None:
    """Remove the new folder of a run that could not begin, and the folders above it that are then empty."""
    folder = Path(run.folder)
    if run.source != run.folder and not (folder / RECIPE_FILE).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()
            folder.parent.parent.rmdir()


def changed_keys(run: Run, recipe: Recipe) -> list[str]:
    """Keys that differ from the continued run's, as `key = old, here new`."""
    if run.source is None:
        return []
    try:
        differences = changes(recipe, Path(run.source) / RECIPE_FILE)
    except RecipeError as error:
        print_on_rank0(f"warning: changes since the checkpoint are unknown: {error}")
        return []
    return [line for key, line in differences.items() if not (key in IGNORED or key.startswith(SAVED_IN_CHECKPOINTS))]


def _source(recipe: Recipe, runs: Path, flaws: Flaws) -> tuple[Path, int] | None:
    """Folder and step to continue from; None for a new run."""
    load, step = recipe.checkpoint.load, recipe.checkpoint.load_step
    if load == "none":
        if step != -1:
            raise RecipeError(f'checkpoint.load_step = {step} needs checkpoint.load = "latest" or a run\'s folder')
        return None
    if not recipe.checkpoint.enable:
        raise RecipeError(f"checkpoint.load = {load!r} needs checkpoint.enable = true")
    if load == "latest":
        return _latest_run(recipe, runs, flaws)
    folder = Path(load).resolve()
    if folder.name == LATEST_FILE and folder.is_file():
        # Run folders have characters that shells treat specially, so the file holds a name.
        latest, folder = folder, folder.parent / (folder.read_text(encoding="utf-8", errors="replace").strip() or "?")
        if not folder.is_dir():
            problem = f"{latest} is damaged or names a removed folder"
            raise RecipeError(f"checkpoint.load = {load!r}: {problem}; name a run's folder in {latest.parent}")
    if not folder.is_dir():
        raise RecipeError(f'checkpoint.load = {load!r}: no such folder; it takes "none", "latest" or a run\'s folder')
    if (whole := _whole_step(recipe, folder, flaws)) is None:
        raise RecipeError(
            f"checkpoint.load = {load!r}: {folder} has no whole checkpoint in {recipe.checkpoint.folder}/"
        )
    return folder, whole


def _latest_run(recipe: Recipe, runs: Path, flaws: Flaws) -> tuple[Path, int] | None:
    others: list[str] = []
    # The newest run may have ended before its first checkpoint.
    for folder in run_folders(runs):
        try:
            differences = other_experiment(recipe, folder / RECIPE_FILE)
        except RecipeError as error:
            if saved_steps(folder / recipe.checkpoint.folder):
                others.append(f"{folder} may be another experiment ({error})")
            continue
        if differences:
            others.append(f"{folder} is another experiment ({'; '.join(differences[:3])})")
        elif (whole := _whole_step(recipe, folder, flaws)) is not None:
            return folder, whole
    step = recipe.checkpoint.load_step
    if step != -1:
        raise RecipeError(f"checkpoint.load_step = {step}: no run in {runs} has a checkpoint of that step")
    # No error: a job submitted with `latest` has a first start too.
    reason = f"no run in {runs} has a whole checkpoint"
    if others:
        reason = f"no run of this experiment has a whole checkpoint. {others[0]}; name the folder to continue it"
    print_on_rank0(f'checkpoint.load = "latest": {reason}; starting anew')
    return None


def _whole_step(recipe: Recipe, folder: Path, flaws: Flaws) -> int | None:
    """Step to continue from; None without a whole checkpoint. Prints the newer checkpoints that are passed over."""
    checkpoints, asked = folder / recipe.checkpoint.folder, recipe.checkpoint.load_step
    steps = saved_steps(checkpoints)
    if asked not in (-1, *steps):
        if recipe.checkpoint.load == "latest":
            return None
        saved, path = ", ".join(map(str, steps)) if steps else "none", checkpoint_path(checkpoints, asked)
        raise RecipeError(f"checkpoint.load_step = {asked}: {path} does not exist; saved steps: {saved}")
    passed: list[str] = []
    whole = None
    for step in steps if asked == -1 else [asked]:
        path = checkpoint_path(checkpoints, step)
        reason = flaws.get(path) or flaw(path)
        if reason is None:
            whole = step
            break
        if step == asked:
            raise RecipeError(f"checkpoint.load_step = {asked}: {path} cannot be used: {reason}; choose another step")
        # `agree` has named the others.
        if path not in flaws:
            passed.append(f"warning: checkpoint {path} is passed over: {reason}")
    for line in passed:
        print_on_rank0(line if whole is None else f"{line}; using step {whole} instead")
    return whole


def _new_folder(recipe: Recipe, runs: Path, overrides: tuple[str, ...]) -> str:
    beside = [folder.name for folder in run_folders(runs)]
    pairs = overrides_text(recipe, overrides, beside)
    # Names sort by time, also of runs of the same second.
    stamps = {name.partition("_")[0] for name in beside}
    for path in _numbered(runs / time.strftime(FORMAT)):
        folder = path.with_name(f"{path.name}_{pairs}" if pairs else path.name)
        # mkdir decides, because two runs of the same second both see a free name.
        with suppress(FileExistsError):
            if path.name not in stamps:
                folder.mkdir(parents=True)
                return str(folder)
    raise AssertionError("there is always another number")


def run_folders(runs: Path) -> list[Path]:
    """Folders of a recipe's runs, newest first."""
    folders = (path for path in runs.glob("*") if path.is_dir())
    return sorted(folders, key=lambda path: path.name.partition("_")[0], reverse=True)


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def _later(checkpoints: Path, step: int) -> list[Path]:
    return [checkpoint_path(checkpoints, other) for other in saved_steps(checkpoints) if other > step]


def write_file(file: Path, text: str) -> None:
    """Write a file that no reader, and no crash, sees half written."""
    # os.replace is atomic within a file system only.
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        # Mode x, because in a shared folder another user may have planted a symbolic link of this name.
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
