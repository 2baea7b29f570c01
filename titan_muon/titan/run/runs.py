"""Run folders, `<dump_folder>/<recipe name>/<time>_<differences>`, new or continued.

Rank 0 decides, touches the disk, and broadcasts the result (`agree`).
"""

import contextlib
import errno
import itertools
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from titan_muon.titan.launch.folder_lock import FolderLock
from titan_muon.titan.recipe import Recipe, RecipeError, to_toml
from titan_muon.titan.run.checkpoints import checkpoint_path, flaw, saved_steps
from titan_muon.titan.run.console import say
from titan_muon.titan.run.metrics import METRICS_FILE, read_until
from titan_muon.titan.run_name import changes, distinguishing_keys, other_experiment
from titan_muon.titan.storage.checksums import damage
from titan_muon.titan.storage.space import unusable

OPTIMIZERS_FILE = "optimizers.txt"
RECIPE_FILE = "recipe.toml"
LATEST_FILE = "latest"
DIVERGED_FILE = "diverged"
"""In a checkpoint's folder: a line with a recipe's digest for each divergence."""
DIVERGED = "training diverged twice"
FORMAT = "%Y%m%d-%H%M%S"
Flaws = Mapping[Path, str]


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
        if dist.get_rank() == 0:
            try:
                opened = _opened(recipe, overrides, interrupted, flaws)
                if not os.access(opened.folder, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), opened.folder)
                lock.take(opened.folder)
                answer[0] = opened
            except OSError as error:
                answer[0] = unusable(recipe.dump_folder, error)
            except Exception as error:
                answer[0] = error
        if group is not None:
            dist.broadcast_object_list(answer, src=0, group=group)
        run = answer[0]
        if isinstance(run, Exception):
            raise run
        assert run is not None, "rank 0 always answers"
        if run.checkpoint is None or (wrong := damage(Path(run.checkpoint), group)) is None:
            return run
        # Rank 0 chooses among the other checkpoints.
        flaws[Path(run.checkpoint)] = wrong
        if dist.get_rank() == 0:
            say(f"warning: checkpoint {run.checkpoint} is passed over: {wrong}")
            discard(run)


def _opened(recipe: Recipe, overrides: tuple[str, ...], interrupted: str | None, flaws: Flaws) -> Run:
    """`open_run`, or the run in the folder of an earlier attempt, if it has a checkpoint."""
    if interrupted is None:
        return open_run(recipe, overrides, flaws)
    own = replace(recipe.checkpoint, load=interrupted, load_step=-1, exclude_from_loading=())
    if recipe.checkpoint.enable:
        with contextlib.suppress(RecipeError):
            return replace(open_run(replace(recipe, checkpoint=own), flaws=flaws), restarted=True)
    say(f"the attempt before this one left no whole checkpoint in {interrupted}")
    return open_run(recipe, overrides, flaws, Path(interrupted))


def open_run(
    recipe: Recipe, overrides: tuple[str, ...] = (), flaws: Flaws = MappingProxyType({}), folder: Path | None = None
) -> Run:
    """The run requested by `checkpoint.load`. Creates the folder of a new run, and changes nothing else.

    `overrides`: keys of the command line, for the name. `flaws`: damaged checkpoints. `folder`: of a new run, instead
    of another name. Raises RecipeError if no run can continue as requested.
    """
    runs = Path(recipe.dump_folder).resolve() / recipe.name
    start = _source(recipe, runs, flaws)

    def new_folder() -> Path:
        return _new_folder(runs, recipe, overrides) if folder is None else folder

    if start is None:
        return Run(str(new_folder()))
    source, step = start
    checkpoints = source / recipe.checkpoint.folder
    checkpoint = checkpoint_path(checkpoints, step)
    if "train_state" in recipe.checkpoint.exclude_from_loading:
        return Run(str(new_folder()), str(source), str(checkpoint))
    # A new folder, so that later results are not overwritten.
    goes_back = any(_flaw(path, recipe, flaws) is None for path in _later(checkpoints, step))
    _, seconds = read_until(source / METRICS_FILE, step)
    return Run(str(new_folder() if goes_back else source), str(source), str(checkpoint), step, seconds)


def begin(run: Run, recipe: Recipe) -> None:
    """Write the recipe, copy the metrics up to `run.step`, and set later checkpoints aside.

    Called on rank 0 when nothing can be refused any more.
    """
    folder = Path(run.folder)
    _write_recipe(run, recipe)
    source = folder if run.source is None else Path(run.source)
    for file in (source / METRICS_FILE, *source.glob(f"rank-*/{METRICS_FILE}")):
        if not file.is_file():
            continue
        lines, _ = read_until(file, run.step, say)
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        # A crash must not lose the record of the continued run.
        write_file(target, "".join(lines))
    if source == folder:
        checkpoints = folder / recipe.checkpoint.folder
        for checkpoint in _later(checkpoints, run.step):
            # PyTorch would save beside the old files.
            numbered = _numbered(checkpoint.with_name(checkpoint.name.replace("step", "aside")))
            checkpoint.rename(next(path for path in numbered if not path.exists()))


def note_divergence(run: Run, recipe: Recipe) -> None:
    """Note in the continued checkpoint that training diverged before another save; called on rank 0."""
    # The error of the divergence matters more than a disk that takes no note.
    with contextlib.suppress(OSError):
        if run.checkpoint is not None:
            with Path(run.checkpoint, DIVERGED_FILE).open("a", encoding="utf-8") as file:
                file.write(_digest(recipe) + "\n")


def _flaw(checkpoint: Path, recipe: Recipe, flaws: Flaws) -> str | None:
    """Reason why a run should not continue from a checkpoint, or None."""
    found = flaws[checkpoint] if checkpoint in flaws else flaw(checkpoint)
    return _diverged_twice(checkpoint, recipe) if found is None else found


def _diverged_twice(checkpoint: Path, recipe: Recipe) -> str | None:
    """A line if two attempts of the recipe from a checkpoint diverged. Killed attempts do not count."""
    file = checkpoint / DIVERGED_FILE
    lines = file.read_text(encoding="utf-8", errors="replace").split() if file.is_file() else []
    if lines.count(_digest(recipe)) < 2:
        return None
    step = checkpoint.name.removeprefix("step-")
    return f"{DIVERGED} from there; checkpoint.load_step = {step} takes it nevertheless"


def _digest(recipe: Recipe) -> str:
    # A restart loads another checkpoint than the first attempt.
    text = to_toml(replace(recipe, checkpoint=Recipe().checkpoint))
    return f"{zlib.crc32(text.encode()):08x}"


def keep_folder(run: Run, recipe: Recipe, lock: FolderLock) -> None:
    """Restore a removed recipe file and lock; called on rank 0 at each report."""
    folder = Path(run.folder)
    if (folder / RECIPE_FILE).is_file():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_recipe(run, recipe)
        lock.take(run.folder)
    except OSError as error:
        say(f"warning: {folder} was removed or moved, and cannot be made again: {error}")
    else:
        say(f"warning: {folder} was removed or moved; what the run writes from now on is in a new folder of this name")


SAVED_IN_CHECKPOINTS = ("muon.", "adamw.", "lr_scheduler.")
"""Tables with values in the checkpoint, which reports their changes."""


def changed_keys(run: Run, recipe: Recipe) -> list[str]:
    """Keys that change the loss curve and differ from the continued run's, as `key = old, here new`."""
    if run.source is None:
        return []
    try:
        differences = other_experiment(recipe, Path(run.source) / RECIPE_FILE)
    except RecipeError as error:
        say(f"warning: changes since the checkpoint are unknown: {error}")
        return []
    return [line for line in differences if not line.startswith(SAVED_IN_CHECKPOINTS)]


def changes_text(run: Run, recipe: Recipe) -> str:
    """Every key that differs from the continued run, or from the newest run before; empty without one."""
    earlier = _earlier(run, recipe)
    if earlier is None:
        return ""
    try:
        lines = [*changes(recipe, earlier / RECIPE_FILE).values()]
    except RecipeError as error:
        lines = [str(error)]
    return "\n".join([f"from {earlier.name}:", *(lines or ["nothing differs"])])


def earlier_optimizers(run: Run, recipe: Recipe) -> str | None:
    """`optimizers.txt` of the continued run, or of the newest run with the same model; None without one."""
    earlier = _earlier(run, recipe, same_model=True)
    file = None if earlier is None else earlier / OPTIMIZERS_FILE
    if file is None or not file.is_file():
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        say(f"warning: {file} cannot be read, and changed assignments are unknown: {error}")
        return None


def _earlier(run: Run, recipe: Recipe, *, same_model: bool = False) -> Path | None:
    """The continued run, or the newest run before with a readable recipe."""
    if run.source is not None:
        return Path(run.source)
    for folder in run_folders(Path(run.folder).parent):
        with contextlib.suppress(RecipeError):
            changed = changes(recipe, folder / RECIPE_FILE)
            other_model = not changed.keys().isdisjoint(("model.name", "model.flavor"))
            if folder != Path(run.folder) and not (same_model and other_model):
                return folder
    return None


def discard(run: Run) -> None:
    """Remove the new folder of a run that could not begin, and the recipe's folder if that was the only run."""
    folder = Path(run.folder)
    if run.source != run.folder and not (folder / RECIPE_FILE).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def _source(recipe: Recipe, runs: Path, flaws: Flaws) -> tuple[Path, int] | None:
    load, step = recipe.checkpoint.load, recipe.checkpoint.load_step
    if load == "none":
        if step != -1:
            raise RecipeError(f'checkpoint.load_step = {step} needs checkpoint.load = "latest" or a run\'s folder')
        return None
    if not recipe.checkpoint.enable:
        raise RecipeError(f"checkpoint.load = {load!r} needs checkpoint.enable = true")
    return _latest_run(recipe, runs, flaws) if load == "latest" else _named_run(recipe, Path(load).resolve(), flaws)


def _named_run(recipe: Recipe, folder: Path, flaws: Flaws) -> tuple[Path, int]:
    load = f"checkpoint.load = {recipe.checkpoint.load!r}"
    if folder.name == LATEST_FILE and folder.is_file():
        folder = _run_of(folder, recipe)
    if not folder.is_dir():
        raise RecipeError(f'{load}: no such folder; it takes "none", "latest" or a run\'s folder')
    step = _whole_step(recipe, folder, flaws)
    if step is None:
        raise RecipeError(f"{load}: {folder} has no whole checkpoint in {recipe.checkpoint.folder}/")
    return folder, step


def _run_of(latest: Path, recipe: Recipe) -> Path:
    """Run folder named by a file `latest`, or the newest folder with checkpoints if the file is damaged."""
    # Run folders have characters that shells treat specially, so the file holds a name.
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if name and name == Path(name).name and not {"\0", "\ufffd"} & {*name}:
        return latest.with_name(name)
    with_steps = (path for path in run_folders(latest.parent) if saved_steps(path / recipe.checkpoint.folder))
    newest = next(with_steps, None)
    if newest is None:
        raise RecipeError(f"checkpoint.load = {recipe.checkpoint.load!r}: the file is damaged; name the run's folder")
    say(f"warning: {latest} is damaged; the newest run with checkpoints is {newest}")
    return newest


def _latest_run(recipe: Recipe, runs: Path, flaws: Flaws) -> tuple[Path, int] | None:
    others: list[str] = []
    # The newest run may have ended before its first checkpoint.
    for folder in run_folders(runs):
        try:
            if differences := other_experiment(recipe, folder / RECIPE_FILE):
                others.append(f"{folder} is another experiment ({'; '.join(differences[:3])})")
                continue
        except RecipeError as error:
            if saved_steps(folder / recipe.checkpoint.folder):
                others.append(f"{folder} may be another experiment ({error})")
            continue
        whole = _whole_step(recipe, folder, flaws)
        if whole is not None:
            return folder, whole
    step = recipe.checkpoint.load_step
    if step != -1:
        raise RecipeError(f"checkpoint.load_step = {step}: no run in {runs} has a checkpoint of that step")
    # No error: a job submitted with `latest` has a first start too.
    reason = f"no run in {runs} has a whole checkpoint"
    if others:
        reason = f"no run of this experiment has a whole checkpoint. {others[0]}; name the folder to continue it"
    say(f'checkpoint.load = "latest": {reason}; starting anew')
    return None


def _whole_step(recipe: Recipe, folder: Path, flaws: Flaws) -> int | None:
    """Step to continue from; None without a whole checkpoint. Prints the newer checkpoints that are passed over."""
    checkpoints, asked = folder / recipe.checkpoint.folder, recipe.checkpoint.load_step
    steps = saved_steps(checkpoints)
    if asked != -1:
        return _asked_step(recipe, checkpoints, steps, flaws)
    wrong = {}
    for step in steps:
        wrong[step] = _flaw(checkpoint_path(checkpoints, step), recipe, flaws)
        if wrong[step] is None:
            break
    # A checkpoint from which training diverged is better than none.
    usable = [step for step, text in wrong.items() if text is None or text.startswith(DIVERGED)]
    whole = next((step for step in usable if wrong[step] is None), usable[0] if usable else None)
    for step, text in wrong.items():
        path = checkpoint_path(checkpoints, step)
        if (whole is None or step > whole) and path not in flaws:
            instead = "" if whole is None else f"; using step {whole} instead"
            say(f"warning: checkpoint {path} is passed over: {text}{instead}")
    return whole


def _asked_step(recipe: Recipe, checkpoints: Path, steps: list[int], flaws: Flaws) -> int | None:
    asked = recipe.checkpoint.load_step
    path = checkpoint_path(checkpoints, asked)
    if asked not in steps:
        if recipe.checkpoint.load == "latest":
            return None
        saved = ", ".join(map(str, steps)) if steps else "none"
        raise RecipeError(f"checkpoint.load_step = {asked}: {path} does not exist; saved steps: {saved}")
    wrong = flaws[path] if path in flaws else flaw(path)
    if wrong is not None:
        raise RecipeError(f"checkpoint.load_step = {asked}: {path} cannot be used: {wrong}; choose another step")
    return asked


def _new_folder(runs: Path, recipe: Recipe, overrides: tuple[str, ...]) -> Path:
    earlier = run_folders(runs)
    differences = distinguishing_keys(recipe, earlier[-1] / RECIPE_FILE if earlier else None, overrides)
    # Names sort by time, also of runs of the same second.
    stamps = {folder.name.partition("_")[0] for folder in earlier}
    for path in _numbered(runs / time.strftime(FORMAT)):
        folder = path.with_name(f"{path.name}_{differences}" if differences else path.name)
        # mkdir decides, because two runs of the same second both see a free name.
        with contextlib.suppress(FileExistsError):
            if path.name not in stamps:
                folder.mkdir(parents=True)
                return folder
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


def _write_recipe(run: Run, recipe: Recipe) -> None:
    """Write the recipe, keep an earlier one, and name the run in the file `latest`."""
    content, file = to_toml(recipe), Path(run.folder, RECIPE_FILE)
    if file.is_file() and file.read_bytes() != content.encode():
        shutil.copyfile(file, file.with_name(f"recipe-until-step-{run.step}.toml"))
    write_file(file, content)
    write_file(file.parents[1] / LATEST_FILE, f"{file.parent.name}\n")


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
