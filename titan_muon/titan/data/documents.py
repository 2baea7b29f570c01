"""Documents of a recipe's `[data]` table: text, digest, training and validation split."""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from titan_muon.options import plural
from titan_muon.titan.data.cache import cached, digest
from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.recipe.sections import Data

_FORMAT = "2"
"""Increment when the digest or the split changes."""
_INDEX = "4"
"""Increment when the columns of the index change."""
_COLUMNS = {"file": "int64", "hash": "binary", "hardly_text": "bool"}
MOST_REPLACED = 0.1
MOST_NAMED = 5
FORMATS = (".jsonl", ".md", ".parquet", ".txt")
"""Files that a folder in `data.files` contributes."""
COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".zip"}


@dataclass(frozen=True)
class TextFile:
    """A file of documents: rows of `.jsonl` or `.parquet`, otherwise a single document."""

    name: str  # sort key
    path: Path
    size: int  # bytes
    key: str = "text"  # of a row's text

    def contents(self) -> Iterator[bytes]:
        """UTF-8 bytes of each non-empty document. Raises RecipeError for an unreadable file."""
        if self.path.suffix in COMPRESSED:
            raise RecipeError(f"data.files: {self.path} is compressed; decompress it, and name the text file")
        try:
            if self.path.suffix in (".jsonl", ".parquet"):
                rows = self._json_rows() if self.path.suffix == ".jsonl" else self._parquet_rows()
                yield from (text.encode("utf-8", errors="replace") for text in rows if text)
            elif content := self.path.read_bytes():
                yield content
        except (OSError, ArrowException) as error:
            problem = getattr(error, "strerror", None) or error
            raise RecipeError(f"data.files: {str(self.path)!r} cannot be read: {problem}") from error

    def texts(self) -> Iterator[str]:
        """Text of each document; bytes outside of UTF-8 become U+FFFD."""
        return (content.decode("utf-8", errors="replace") for content in self.contents())

    def _json_rows(self) -> Iterator[str]:
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                place = f"data.files: {self.path}:{number}"
                try:
                    row = json.loads(line)
                except RecursionError:
                    raise RecipeError(f"{place}: its lists or objects are nested too deeply") from None
                except ValueError as error:
                    raise RecipeError(f"{place}: not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise RecipeError(f"{place} is of type {type(row).__name__}; a row is an object with text")
                self._check_field(place, row)
                if not isinstance(text := row[self.key], str):
                    problem = f"{self.key!r} (data.text_key) is {json.dumps(text)[:40]}, not text; remove the row"
                    raise RecipeError(f"{place}: {problem}")
                yield text

    def _parquet_rows(self) -> Iterator[str]:
        table = ParquetFile(self.path)
        self._check_field(f"data.files: {self.path}", table.schema_arrow.names)
        for batch in table.iter_batches(columns=[self.key]):
            yield from (str(text) for text in batch.column(0).to_pylist() if text is not None)

    def _check_field(self, place: str, names: Collection[str]) -> None:
        if self.key not in names:
            raise RecipeError(f"{place} has no field data.text_key = {self.key!r}; it has {', '.join(names)}")


@dataclass(frozen=True)
class _Index:
    """Arrays with an entry for each document."""

    file: np.ndarray  # int64: number of its file, ascending
    hashes: np.ndarray  # uint64 (documents, 2): hash of its content
    hardly_text: np.ndarray  # bool: many of its bytes are outside of UTF-8


class Documents:
    """The documents of a `[data]` table, numbered by file and row."""

    def __init__(self, data: Data) -> None:
        assert data.source != "hf", "TorchTitan's own loader reads data.source = 'hf'"
        self.data = data

    def to_dict(self) -> dict[str, object]:
        return asdict(self.data)

    @cached_property
    def all(self) -> tuple[TextFile, ...]:
        paths = _python_files() if self.data.source == "python" else _matched_files(self.data.files)
        # A folder's listing depends on the file system, and the order decides every batch.
        files = (TextFile(name, path, path.stat().st_size, self.data.text_key) for name, path in sorted(paths.items()))
        nonempty = tuple(file for file in files if file.size > 0)
        if not nonempty:
            raise self._empty(len(paths))
        return nonempty

    def _empty(self, files: int) -> RecipeError:
        where = "source = 'python'" if self.data.source == "python" else f"files = {list(self.data.files)}"
        return RecipeError(f"data.{where}: no text to train on; {plural(files, 'empty file')} found")

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits for all names and contents."""
        # Contents, not dates: a copy on another machine finds the cached tokens, an edited corpus does not.
        state = hashlib.blake2b(_FORMAT.encode(), digest_size=16)
        first = np.searchsorted(self._index.file, np.arange(len(self.all) + 1))
        for number, file in enumerate(self.all):
            state.update(f"\0{file.name}\0".encode(errors="surrogateescape"))
            state.update(self._index.hashes[first[number] : first[number + 1]].tobytes())
        return state.hexdigest()

    @property
    def count(self) -> int:
        return len(self._index.file)

    @property
    def training(self) -> np.ndarray:
        """int64: training documents, ascending, never empty. Raises RecipeError if the split is impossible."""
        return self._split[0]

    @property
    def validation(self) -> np.ndarray:
        """int64: held-out documents in arbitrary order, so that the first few are a fair sample.

        Empty only if `data.validation_fraction` is 0. Raises as `training`.
        """
        return self._split[1]

    def warnings(self) -> list[str]:
        """Lines on files that are hardly text, and on files of a folder that are not read."""
        lines = []
        doubtful = np.unique(self._index.file[self._index.hardly_text])
        if paths := [str(self.all[number].path) for number in doubtful]:
            lines.append(f"data.files: many bytes are not UTF-8 in {_named(paths)}; is this text?")
        for folder in filter(os.path.isdir, map(os.path.expanduser, self.data.files)):
            if paths := [path for path in _below(folder) if not path.endswith(FORMATS)]:
                lines.append(f"data.files: {folder!r} has files of other formats, which are not read: {_named(paths)}")
        return lines

    def texts(self) -> Iterator[tuple[TextFile, str]]:
        return ((file, text) for file in self.all for text in file.texts())

    def training_texts(self) -> Iterator[str]:
        held_out = set(self.validation.tolist())
        return (text for number, (_, text) in enumerate(self.texts()) if number not in held_out)

    @cached_property
    def _index(self) -> _Index:
        # Named by sizes and times, so that other ranks and later starts read no text.
        times = (f"{file.path}\0{file.size}\0{file.path.stat().st_mtime_ns}" for file in self.all)
        name = f"documents-{digest(_FORMAT, _INDEX, self.data.source, self.data.text_key, *times)}"
        table = cached(self.data.cache, name, self._hashes(), _COLUMNS)
        hashes = np.frombuffer(b"".join(table["hash"].to_pylist()), dtype="<u8").reshape(-1, 2)
        return _Index(table["file"].to_numpy(), hashes, table["hardly_text"].to_numpy())

    def _hashes(self) -> Iterator[dict[str, Any]]:
        hashed = b""
        for number, file in enumerate(self.all):
            for content in file.contents():
                # The standard library has a few sources in other encodings, on purpose.
                hardly_text = self.data.source == "files" and _is_hardly_text(content)
                hashed = hashlib.blake2b(content, digest_size=16).digest()
                yield {"file": number, "hash": hashed, "hardly_text": hardly_text}
        if not hashed:
            raise self._empty(len(self.all))

    @cached_property
    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        fraction, keys = self.data.validation_fraction, self._index.hashes[:, 0]
        # By content, so that a run on more text does not train on earlier held-out text.
        order = np.argsort(keys, kind="stable")
        held_out = 0
        if fraction > 0:
            if len(keys) < 2:
                raise RecipeError(
                    f"data.validation_fraction = {fraction} needs at least 2 documents, one for each side; "
                    f"there is 1 ({self.all[0].path}). Split it into several files, or set "
                    "data.validation_fraction = 0 and validator.enable = false."
                )
            held_out = min(max(int(np.count_nonzero(keys < fraction * 2.0**64)), 1), len(keys) - 1)
        return np.sort(order[held_out:]), order[:held_out]


def _is_hardly_text(content: bytes) -> bool:
    start = content[: 1 << 16].decode("utf-8", errors="replace")
    return start.count("\ufffd") > MOST_REPLACED * len(start)


def _python_files() -> dict[str, Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: dict[str, Path] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - {"site-packages", "dist-packages", "__pycache__"}
        paths = (Path(folder, file) for file in files if file.endswith(".py"))
        sources |= {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
    if not sources:
        raise RecipeError(f"data.source = 'python': no .py file in {root}; use data.source = 'files' and data.files")
    return sources


def _matched_files(patterns: tuple[str, ...]) -> dict[str, Path]:
    """Matching files by path from their deepest common folder, independent of the working directory."""
    if not patterns:
        raise RecipeError("data.files is empty; data.source = 'files' needs at least one glob pattern")
    files: set[Path] = set()
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            matches = [path for path in _below(expanded) if path.endswith(FORMATS)]
            problem = f"the folder {pattern!r} has no file of {', '.join(FORMATS)}"
            remedy = f". Name other files by a pattern, as {os.path.join(pattern, '**', '*.py')!r}"
        else:
            matches = [path for path in glob.glob(expanded, recursive=True) if os.path.isfile(path)]
            problem, remedy = f"{pattern!r} matches no file", f" (seen from {os.getcwd()})"
        if not matches:
            raise RecipeError(f"data.files: {problem}{remedy}")
        # Patterns or links may match a file twice, to be trained on and held out.
        files.update(Path(match).resolve() for match in matches)
    root = Path(os.path.commonpath([path.parent for path in files]))
    return {path.relative_to(root).as_posix(): path for path in files}


def _below(folder: str) -> list[str]:
    """Files of a folder and its folders, in order, without hidden ones."""
    paths = glob.glob(os.path.join(glob.escape(folder), "**", "*"), recursive=True)
    return sorted(path for path in paths if os.path.isfile(path))


def _named(paths: list[str]) -> str:
    more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(paths[:MOST_NAMED]) + more
