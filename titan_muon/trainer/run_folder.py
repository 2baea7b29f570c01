"""The one reader of a run's folder: name, recipe, typed keys, records, steps, tokenizer and checksums. No torch.

`<dump_folder>/<recipe's name>/<time>_<typed keys>/` has `recipe.toml`, `run.json` (id, typed keys, world size),
`tokenizer.json` if the run trained a tokenizer, `metrics.jsonl`, and `checkpoint/step-<N>/checksums.json`.
"""

import fcntl
import json
import os
import re
import socket
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from types import MappingProxyType
from typing import Any, NamedTuple

from titan_muon.trainer.recipe import Recipe, RecipeError, load
from titan_muon.trainer.recipe.schema import keys, may_change, values
from titan_muon.trainer.recipe.toml import read_layers, value_text
from titan_muon.trainer.recipe.torchtitan_sections import DEGREES, Checkpoint

RECIPE, RUN, TOKENIZER, METRICS, LATEST = "recipe.toml", "run.json", "tokenizer.json", "metrics.jsonl", "latest"
CHECKSUMS, METADATA, LOCK_FILE = "checksums.json", ".metadata", "running.lock"
FORMAT = 1
"""Version of a checkpoint's layout; readers refuse a higher one."""
STEP_FOLDER = re.compile(r"step-(\d+)")
PLACE = frozenset({"name", "dump_folder", "data.cache", "checkpoint.load", "checkpoint.load_step"})
"""Keys of a run's place, without effect on the computation."""
NAMELESS = PLACE | {"data.files", "data.source"}
"""Keys that no name shows: paths are long, and `data.source` follows from them."""
OPTIMIZERS = ("muon", "adamw", "optimizer", "lr_scheduler")
LONGEST = 150
"""Characters of the pairs in a name."""
SHORT: Mapping[str, str] = MappingProxyType(
    {
        **{f"parallelism.{key}": name for name, key in DEGREES.items()},
        "training.global_batch_size": "batch",
        "placement.muon": "placement",
    }
)
CHUNK = 2**20


def _say(line: str) -> None:
    print(line, file=sys.stderr)


class RunFolder:
    """A run's folder, perhaps not yet written. Raises RecipeError for damaged files, and OSError."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def find(cls, path: Path, notice: Callable[[str], None] = _say) -> "RunFolder":
        """The run `path`, the run of a file `latest`, or the newest run with a logged step in a folder of runs."""
        if path.name == LATEST and path.is_file():
            name = path.read_text(encoding="utf-8", errors="replace").strip()
            # A name only: a path would lead to another folder.
            if not (path.parent / RECIPE).is_file() and name in [run.path.name for run in runs_in(path.parent)]:
                return cls(path.parent / name)
            raise RecipeError(f"{path} is damaged or names a removed folder; name a run's folder in {path.parent}")
        if (path / RECIPE).is_file():
            return cls(path)
        if not path.is_dir():
            others = ", ".join(sorted(folder.name for folder in path.parent.glob("[!.]*") if folder.is_dir()))
            remedy = f"{path.parent} has {others}" if others else "train first: titan-muon train --config RECIPE"
            raise RecipeError(f"{path}: no such folder; {remedy}")
        logs = [(run, run.path / METRICS) for run in runs_in(path)]
        newest = next((run for run, file in logs if file.is_file() and file.stat().st_size > 0), None)
        if newest is None:
            raise RecipeError(f"{path}: neither a run ({RECIPE}, {METRICS}) nor a folder with runs that logged a step")
        notice(f"{newest.path}: the newest run in {path}")
        return newest

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe as it ran."""
        return load(self.path / RECIPE, saved=True)

    @property
    def written(self) -> dict[str, object]:
        """Values of the recipe's file by dotted key, unchecked, so that runs of any version compare."""
        return {key: entry.value for layer in read_layers(self.path / RECIPE) for key, entry in layer.items()}

    @property
    def recipe_to_read(self) -> Recipe:
        """The recipe for a checkpoint's weights, without the files that only the first step needed."""
        checkpoint = Checkpoint(folder=self.recipe.checkpoint.folder)
        model = replace(self.recipe.model, hf_assets_path=None)
        return replace(self.recipe, checkpoint=checkpoint, model=model)

    @cached_property
    def _run(self) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            try:
                run = json.loads(read_bytes(self.path / RUN))
                typed, world = [str(key) for key in run["typed"]], int(run["world"])
                return {"id": str(run["id"]), "typed": typed, "world": world}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise RecipeError(f"{self.path / RUN} is damaged ({error}); restore the file or remove it") from error
        return {}

    @property
    def id(self) -> str | None:
        """Random text in the run's checkpoints; None for a run of version 0.2."""
        return self._run.get("id")

    @property
    def typed(self) -> Sequence[str]:
        """Keys of the command line of the newest start; empty for a run of version 0.2."""
        return self._run.get("typed", ())

    @property
    def world_size(self) -> int | None:
        """Ranks of the newest start; None for a run of version 0.2."""
        return self._run.get("world")

    @property
    def tokenizer(self) -> str | None:
        """Text of the tokenizer that the run trained; None for other tokenizers and for a run of version 0.2."""
        with suppress(FileNotFoundError):
            return read_bytes(self.path / TOKENIZER).decode()
        if self._run and self.recipe.data.tokenizer == "bpe":
            raise RecipeError(f"{self.path / TOKENIZER} is missing; restore the file, or name another run")
        return None

    def records(
        self, until: float = float("inf"), warn: Callable[[str], None] = _say, file: str = METRICS
    ) -> list[dict[str, Any]]:
        """Records of a metrics file up to a step. The torn last line is left out: a save comes after its line."""
        records: list[dict[str, Any]] = []
        lines: list[bytes] = []
        with suppress(FileNotFoundError):
            lines = read_bytes(self.path / file).split(b"\n")[:-1]
        for number, line in enumerate(lines, start=1):
            record: Any = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
            numbers = ("loss", "grad_norm", "seconds")
            is_whole = isinstance(record, dict) and type(record.get("step")) is int
            if not is_whole or any(type(record.get(key, 0)) not in (int, float) for key in numbers):
                warn(f"warning: {self.path / file}: left out the damaged line {number}")
            elif record["step"] <= until:
                records.append(record)
        return records

    def path_of(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.path / self.recipe.checkpoint.folder / f"step-{step}"

    @property
    def steps(self) -> list[int]:
        """Steps of finished saves, newest first."""
        return [step for step in saved_steps(self.path / self.recipe.checkpoint.folder) if _is_finished(self, step)]

    def checkpoint(self, step: int | None = None, notice: Callable[[str], None] = _say) -> tuple[int, Path]:
        """Step and folder of the newest checkpoint with the bytes that were saved, or of `step`."""
        saved = self.steps
        if not saved:
            raise RecipeError(f"{self.path}: no complete checkpoint; train with checkpoint.enable = true")
        shown = ", ".join(map(str, saved))
        if step is not None and step not in saved:
            raise RecipeError(f"--step {step}: {self.path} has no complete checkpoint of that step; it has {shown}")
        if step is None:
            folder = self.path / self.recipe.checkpoint.folder
            step = choose(folder, saved, lambda path: damage(path, self.id), notice)
            if step is None:
                raise RecipeError(f"{self.path}: no checkpoint can be used (steps {shown}); name another run")
        elif (problem := damage(self.path_of(step), self.id)) is not None:
            raise RecipeError(f"{self.path_of(step)} cannot be used: {problem}; name another saved step ({shown})")
        return step, self.path_of(step)

    def has_name(self, recipe: Recipe, typed: Sequence[str]) -> bool:
        """Whether the same keys and values were typed, except for keys that may change. `--name` names alone."""
        if "name" in typed:
            return True
        mine, theirs = values(recipe), values(self.recipe)

        def identity(keys: Sequence[str], own: Mapping[str, Any]) -> dict[str, Any]:
            return {key: own.get(key) for key in keys if key not in PLACE and not may_change(Recipe, key, mine, theirs)}

        return identity(typed, mine) == identity(self.typed, theirs)

    def changes(self, recipe: Recipe) -> dict[str, str]:
        """Differences of `recipe` by key, as `muon.lr = 0.001, here 0.02`, without keys of the place."""
        mine, theirs = values(recipe), values(self.recipe)
        return {
            key: f"{key} = {_text(theirs[key])}, here {_text(mine[key])}"
            for key in mine
            if mine[key] != theirs[key] and key not in PLACE
        }

    def refusal(self, recipe: Recipe) -> RecipeError | None:
        """Why `checkpoint.load = "latest"` cannot continue this run: the first key that may not change."""
        mine, theirs = values(recipe), values(self.recipe)
        for key in self.changes(recipe):
            if not may_change(Recipe, key, mine, theirs):
                return RecipeError(
                    f"= {_text(mine[key])} differs from {self.path}, which has {_text(theirs[key])}. Write "
                    f"{_text(theirs[key])} or name that folder in checkpoint.load to continue the run, or write "
                    'checkpoint.load = "none" or another --name to start a new one',
                    key=key,
                )
        return None


def run_name(recipe: Recipe, typed: Sequence[str]) -> str:
    """`key=value` of the typed keys in plain characters: optimizer keys, then keys that make another run."""
    own, place = values(recipe), {table: number for number, table in enumerate(OPTIMIZERS)}
    keys_in_order = sorted(
        dict.fromkeys(key for key in typed if key not in NAMELESS),
        key=lambda key: (place.get(key.partition(".")[0], len(place)), may_change(Recipe, key, own, own)),
    )
    pairs = (f"{short_key(key)}={_plain(own[key])}" for key in keys_in_order)
    name = ",".join(re.sub(r"[^A-Za-z0-9_.=+-]+", "-", pair) for pair in pairs)
    # The last pairs are lost, and a number tells such names apart.
    start = name[:LONGEST].rpartition(",")[0] or name[:LONGEST]
    return name if len(name) <= LONGEST else f"{start}+{zlib.crc32(name.encode()):08x}"


def short_key(key: str) -> str:
    """Name of a key in a run's name: the shortest end that no other key has, and all of muon's and adamw's keys."""
    if key in SHORT or key.partition(".")[0] in OPTIMIZERS[:2]:
        return SHORT.get(key, key)
    leaf = key.rpartition(".")[2]
    return leaf if sum(other.endswith(f".{leaf}") for other in keys(Recipe)) == 1 else key


def _plain(value: object) -> str:
    return value if isinstance(value, str) else _text(value)


def _text(value: object) -> str:
    return "absent" if value is None else value_text(value)


def runs_in(folder: Path) -> list[RunFolder]:
    """Runs of a recipe, newest first."""
    paths = (path for path in folder.glob("*") if path.is_dir())
    # By time only, not by the keys behind the time.
    return [RunFolder(path) for path in sorted(paths, key=lambda path: path.name.partition("_")[0], reverse=True)]


def saved_steps(folder: Path) -> list[int]:
    """Steps of all checkpoints in a run's folder of checkpoints, whole or not, newest first."""
    if not folder.is_dir():
        return []
    names = (STEP_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def choose(
    folder: Path, steps: Iterable[int], problem: Callable[[Path], str | None], notice: Callable[[str], None]
) -> int | None:
    """The first of `steps` with a checkpoint in `folder` without `problem`, or None. Names the others."""
    for step in steps:
        path = folder / f"step-{step}"
        if (text := problem(path)) is None:
            return step
        notice(f"warning: checkpoint {path} is passed over: {text}")
    return None


def _is_finished(run: RunFolder, step: int) -> bool:
    return all((run.path_of(step) / name).is_file() for name in (CHECKSUMS, METADATA))


class Checksum(NamedTuple):
    """Length and CRC-32 of a file."""

    bytes: int
    crc32: int

    @classmethod
    def of(cls, file: Path) -> "Checksum":
        length, crc = 0, 0
        with open(file, "rb", opener=without_links) as stream:
            while chunk := stream.read(CHUNK):
                length, crc = length + len(chunk), zlib.crc32(chunk, crc)
        return cls(length, crc)


def read_checksums(checkpoint: Path, run: str | None = None) -> dict[str, Checksum]:
    """Checksums by file name. Raises ValueError for a wrong file, another run's, and a data file without a checksum."""
    try:
        document = json.loads(read_bytes(checkpoint / CHECKSUMS))
        number, step = int(document["format"]), int(document["step"])
        files = {name: Checksum(int(e["bytes"]), int(e["crc32"], 16)) for name, e in document["files"].items()}
    except FileNotFoundError:
        raise ValueError(f"{CHECKSUMS} is missing: the save was cut off, or the model was exported") from None
    except Exception as error:  # any content may be there
        raise ValueError(f"{CHECKSUMS} cannot be read ({type(error).__name__}: {error})") from error
    if number > FORMAT:
        raise ValueError(f"its format {number} is newer than this version's {FORMAT}")
    check_names(CHECKSUMS, files)
    if checkpoint.name.startswith("step-") and checkpoint.name != f"step-{step}":
        raise ValueError(f"the files are of step {step}")
    # A run of version 0.2 has no id in its checkpoints.
    if document.get("run") not in (None, run):
        raise ValueError("the files are of another run")
    for name in [METADATA, *sorted(path.name for path in checkpoint.glob("*.distcp"))]:
        if name not in files:
            raise ValueError(f"{CHECKSUMS} has no entry for {name}")
    return files


def check_names(source: str, names: Iterable[str]) -> None:
    """Raise ValueError for a name in the file `source` that leads out of the checkpoint's folder."""
    for name in names:
        if name == ".." or name != Path(name).name:
            raise ValueError(f"{source} names {name} outside of the checkpoint")


def damage(checkpoint: Path, run: str | None = None, share: slice = slice(None)) -> str | None:
    """Problem of a checkpoint's files, or None. `run`: id of the run. `share`: of the files that this rank reads."""
    try:
        sums = read_checksums(checkpoint, run)
    except ValueError as error:
        return str(error)
    return next((text for name in sorted(sums)[share] if (text := _difference(checkpoint / name, sums[name]))), None)


def _difference(file: Path, saved: Checksum) -> str | None:
    """Problem of a file with another checksum, or None."""
    try:
        # A link leads elsewhere, and a device or a pipe would be read for ever.
        if not S_ISREG((status := file.lstat()).st_mode):
            return f"{file.name} cannot be read (no regular file)"
        if status.st_size != saved.bytes:
            return f"{file.name} has {status.st_size} of {saved.bytes} bytes"
        current = Checksum.of(file)
    except OSError as error:
        return f"{file.name} cannot be read ({error})"
    if current == saved:
        return None
    return f"{file.name} has other bytes than were saved (CRC-32 {current.crc32:08x}, not {saved.crc32:08x})"


def without_links(file: str, flags: int) -> int:
    """`opener` of `open` that follows no symbolic link at the end of the path: others may write to a shared folder."""
    return os.open(file, flags | os.O_NOFOLLOW, 0o666)


def read_bytes(file: Path) -> bytes:
    """Content of a file of a run, which is not a link."""
    with open(file, "rb", opener=without_links) as stream:
        return stream.read()


def write_file(file: Path, text: str) -> None:
    """Write a file that no reader, and no crash, sees half written. Replaces a link."""
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


class FolderLock(ExitStack):
    """Context of a lock, which ends with the context or the process."""

    def take(self, folder: str) -> None:
        """Lock `folder`, in place of an earlier folder.

        Raises RecipeError if another job has the lock, and for a symbolic link in the folder.
        """
        # Closing any file handle of the lock file releases a process's lock.
        self.close()
        path = Path(folder, LOCK_FILE)
        # In a shared folder a link of another user would lead what the run writes or deletes elsewhere.
        for entry in sorted((*path.parent.iterdir(), *path.parent.glob("*/step-*"))):
            if entry.is_symlink():
                raise RecipeError(f"{entry} is a symbolic link, which a run never makes; remove it")
        opened = open(path, "a+", encoding="utf-8", opener=without_links)  # noqa: SIM115 (entered)
        file = self.enter_context(opened)
        try:
            # `lockf` works over NFS. Children would inherit `flock`, and may outlive the job.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise RecipeError(
                f": {folder} is in use by {file.read().strip()}; end that job first, or start a new run "
                'with checkpoint.load = "none" or another name',
                key="checkpoint.load",
            ) from error
        except OSError as error:
            print(f"warning: {folder} cannot be locked ({error}): start no second job in this folder", flush=True)
            return
        with suppress(OSError):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
