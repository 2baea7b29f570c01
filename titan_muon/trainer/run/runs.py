"""Run folders, `<dump_folder>/<recipe name>/<time>_<keys of the command line>`, new or continued.

Rank 0 decides, touches the disk, and broadcasts the result (`agree`).
"""

import itertools
import json
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from titan_muon.trainer.fault import by_rank_0
from titan_muon.trainer.recipe import Recipe, RecipeError, to_toml
from titan_muon.trainer.run.checkpoints import flaw
from titan_muon.trainer.run.console import print_on_rank0
from titan_muon.trainer.run_folder import (
    LATEST,
    METRICS,
    RECIPE,
    RUN,
    TOKENIZER,
    FolderLock,
    RunFolder,
    choose,
    read_bytes,
    run_name,
    runs_in,
    saved_steps,
    write_file,
)
from titan_muon.trainer.storage.checksums import damage_on_any_rank

OPTIMIZERS_FILE = "optimizers.txt"
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
    id: str | None = field(default=None, compare=False)  # in the run's checkpoints
    source_id: str | None = field(default=None, compare=False)  # in the checkpoints of `source`


def agree(
    recipe: Recipe,
    group: dist.ProcessGroup | None,
    lock: FolderLock,
    typed: tuple[str, ...] = (),
    interrupted: str | None = None,
) -> Run:
    """The run opened and locked by rank 0, on every rank of `group` (gloo; None for a single process).

    `typed`: keys of the command line. `interrupted`: folder of an earlier attempt of this job. Raises as `open_run`
    on every rank, and RecipeError for a folder in use by another job.
    """
    flaws: dict[Path, str] = {}

    def opened() -> Run:
        run = open_run(recipe, typed, flaws, interrupted)
        lock.take(run.folder)
        return run

    while True:
        run = by_rank_0(opened, recipe.dump_folder, group)
        if run.checkpoint is None or (wrong := damage_on_any_rank(Path(run.checkpoint), run.source_id, group)) is None:
            return run
        # Rank 0 chooses among the other checkpoints.
        flaws[Path(run.checkpoint)] = wrong
        print_on_rank0(f"warning: checkpoint {run.checkpoint} is passed over: {wrong}")
        if dist.get_rank() == 0:
            discard(run)


def open_run(
    recipe: Recipe, typed: tuple[str, ...] = (), flaws: Flaws = MappingProxyType({}), interrupted: str | None = None
) -> Run:
    """The run requested by `checkpoint.load`. Creates the folder of a new run, and changes nothing else.

    `typed`, `interrupted`: as in `agree`. Raises RecipeError if no run can continue as requested.
    """
    if interrupted is not None:
        own = replace(recipe.checkpoint, load=interrupted, load_step=-1, exclude_from_loading=())
        if recipe.checkpoint.enable:
            with suppress(RecipeError):
                return replace(open_run(replace(recipe, checkpoint=own), flaws=flaws), restarted=True)
        print_on_rank0(f"the attempt before this one left no whole checkpoint in {interrupted}")
    runs = Path(recipe.dump_folder).resolve() / recipe.name
    start = _source(recipe, runs, typed, flaws)

    def run(folder: str, source: RunFolder | None = None, **others: Any) -> Run:
        identity = RunFolder(folder).id or uuid.uuid4().hex
        if source is None:
            return Run(folder, id=identity)
        return Run(folder, source=str(source.path), source_id=source.id, id=identity, **others)

    def new_folder() -> str:
        return interrupted or _new_folder(recipe, runs, typed)

    if start is None:
        return run(new_folder())
    source, step = start
    checkpoints = source.path / recipe.checkpoint.folder
    checkpoint = str(checkpoints / f"step-{step}")
    if "train_state" in recipe.checkpoint.exclude_from_loading:
        return run(new_folder(), source, checkpoint=checkpoint)
    # A new folder, so that later results are not overwritten.
    goes_back = any(flaw(path) is None and path not in flaws for path in _later(checkpoints, step))
    done = source.records(step, lambda line: None)
    seconds = next((record["seconds"] for record in reversed(done) if "seconds" in record), 0.0)
    folder = new_folder() if goes_back else str(source.path)
    return run(folder, source, checkpoint=checkpoint, step=step, seconds=seconds)


def begin(run: Run, recipe: Recipe, typed: tuple[str, ...] = (), world: int = 1, tokenizer: str | None = None) -> None:
    """Write the run's files, copy the metrics up to `run.step`, and set later checkpoints aside.

    `tokenizer`: text of the tokenizer that the run trains. Called on rank 0 when nothing can be refused any more.
    """
    folder, content = Path(run.folder), to_toml(recipe)
    file = folder / RECIPE
    # A link is replaced, and nothing is read through it.
    if file.is_file() and not file.is_symlink() and (before := read_bytes(file)) != content.encode():
        write_file(file.with_name(f"recipe-until-step-{run.step}.toml"), before.decode(errors="replace"))
    if tokenizer is not None:
        write_file(folder / TOKENIZER, tokenizer)
    write_file(folder / RUN, json.dumps({"id": run.id, "typed": typed, "world": world}) + "\n")
    write_file(file, content)
    write_file(folder.with_name(LATEST), f"{folder.name}\n")
    source = folder if run.source is None else Path(run.source)
    if (source / METRICS).is_file():
        records = RunFolder(source).records(run.step, print_on_rank0)
        # A crash must not lose the record of the continued run.
        write_file(folder / METRICS, "".join(json.dumps(record) + "\n" for record in records))
    if source == folder:
        for checkpoint in _later(folder / recipe.checkpoint.folder, run.step):
            # PyTorch would save beside the old files.
            numbered = _numbered(checkpoint.with_name(checkpoint.name.replace("step", "aside")))
            checkpoint.rename(next(path for path in numbered if not path.exists()))


def discard(run: Run) -> None:
    """Remove the new folder of a run that could not begin, and the folders above it that are then empty."""
    folder = Path(run.folder)
    if run.source != run.folder and not (folder / RECIPE).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()
            folder.parent.parent.rmdir()


def changed_keys(run: Run, recipe: Recipe) -> list[str]:
    """Keys that differ from the continued run's, as `key = old, here new`."""
    if run.source is None:
        return []
    try:
        differences = RunFolder(run.source).changes(recipe)
    except RecipeError as error:
        print_on_rank0(f"warning: changes since the checkpoint are unknown: {error}")
        return []
    return [line for key, line in differences.items() if not key.startswith(SAVED_IN_CHECKPOINTS)]


def _source(recipe: Recipe, runs: Path, typed: tuple[str, ...], flaws: Flaws) -> tuple[RunFolder, int] | None:
    """Run and step to continue from; None for a new run."""
    load, step = recipe.checkpoint.load, recipe.checkpoint.load_step
    if load == "none":
        if step != -1:
            raise RecipeError(
                f'= {step} needs checkpoint.load = "latest" or a run\'s folder', key="checkpoint.load_step"
            )
        return None
    if not recipe.checkpoint.enable:
        raise RecipeError(f"= {load!r} needs checkpoint.enable = true", key="checkpoint.load")
    if load == "latest":
        return _latest_run(recipe, runs, typed, flaws)
    folder = Path(load).resolve()
    if folder.name == LATEST and folder.is_file():
        try:
            folder = RunFolder.find(folder).path
        except RecipeError as error:
            raise RecipeError(f"= {load!r}: {error}", key="checkpoint.load") from error
    if not folder.is_dir():
        raise RecipeError(
            f'= {load!r}: no such folder; it takes "none", "latest" or a run\'s folder', key="checkpoint.load"
        )
    if (whole := _whole_step(recipe, folder, flaws)) is None:
        raise RecipeError(
            f"= {load!r}: {folder} has no whole checkpoint in {recipe.checkpoint.folder}/", key="checkpoint.load"
        )
    return RunFolder(folder), whole


def _latest_run(recipe: Recipe, runs: Path, typed: tuple[str, ...], flaws: Flaws) -> tuple[RunFolder, int] | None:
    """The newest run with the name of `typed` and a whole checkpoint."""
    others: list[str] = []
    for run in runs_in(runs):
        try:
            if not run.has_name(recipe, typed):
                others.append(run.path.name)
                continue
            refusal = run.refusal(recipe)
        except RecipeError as error:
            others.append(f"{run.path.name}, which cannot be read ({error})")
            continue
        # The newest run may have ended before its first checkpoint.
        if (whole := _whole_step(recipe, run.path, flaws)) is None:
            continue
        if refusal is not None:
            raise refusal
        return run, whole
    step = recipe.checkpoint.load_step
    if step != -1:
        raise RecipeError(f"= {step}: no run in {runs} has a checkpoint of that step", key="checkpoint.load_step")
    # No error: a job submitted with `latest` has a first start too.
    name = run_name(recipe, typed) or "without typed keys"
    beside = f"; other runs in {runs}: {', '.join(others[:5])}" if others else ""
    print_on_rank0(
        f'checkpoint.load = "latest": no run {name} has a whole checkpoint, so this is its first start{beside}'
    )
    return None


def _whole_step(recipe: Recipe, folder: Path, flaws: Flaws) -> int | None:
    """Step to continue from; None without a whole checkpoint. Prints the newer checkpoints that are passed over."""
    checkpoints, asked = folder / recipe.checkpoint.folder, recipe.checkpoint.load_step
    steps = saved_steps(checkpoints)
    if asked not in (-1, *steps):
        if recipe.checkpoint.load == "latest":
            return None
        saved, path = ", ".join(map(str, steps)) if steps else "none", checkpoints / f"step-{asked}"
        raise RecipeError(f"= {asked}: {path} does not exist; saved steps: {saved}", key="checkpoint.load_step")
    # `agree` has named the flaws that it found.
    others = [step for step in steps if checkpoints / f"step-{step}" not in flaws]
    if asked == -1:
        return choose(checkpoints, others, flaw, print_on_rank0)
    path = checkpoints / f"step-{asked}"
    if (reason := flaws.get(path) or flaw(path)) is not None:
        raise RecipeError(
            f"= {asked}: {path} cannot be used: {reason}; choose another step", key="checkpoint.load_step"
        )
    return asked


def _new_folder(recipe: Recipe, runs: Path, typed: tuple[str, ...]) -> str:
    pairs = run_name(recipe, typed)
    # Names sort by time, also of runs of the same second.
    stamps = {run.path.name.partition("_")[0] for run in runs_in(runs)}
    for path in _numbered(runs / time.strftime(FORMAT)):
        folder = path.with_name(f"{path.name}_{pairs}" if pairs else path.name)
        # mkdir decides, because two runs of the same second both see a free name.
        with suppress(FileExistsError):
            if path.name not in stamps:
                folder.mkdir(parents=True)
                return str(folder)
    raise AssertionError("there is always another number")


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def _later(checkpoints: Path, step: int) -> list[Path]:
    return [checkpoints / f"step-{other}" for other in saved_steps(checkpoints) if other > step]
