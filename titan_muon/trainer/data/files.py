"""Files of `data.files`: paths and URLs, and the documents of a file of text, rows or tokens."""

import glob
import json
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import numpy as np
from pyarrow import ArrowException, types
from pyarrow.parquet import ParquetFile

from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.recipe.sections import Data
from titan_muon.trainer.recipe.toml import without_password

logger = logging.getLogger(__name__)

FORMATS = (".bin", ".jsonl", ".md", ".npy", ".parquet", ".txt")
"""Files that a folder in `data.files` contributes."""
TOKENS = (".bin", ".npy")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
LLM_C = {np.array(number, "<i4").tobytes(): dtype for number, dtype in ((20240520, "uint16"), (20240801, "uint32"))}
"""dtype of tokens by the first bytes of a header of llm.c, 1,024 bytes, for GPT-2 and for Llama 3."""
HTTP_SECONDS = 10.0
"""An HTTP server that sends nothing for so long has failed."""
TOKENS_AT_ONCE = 1 << 20
"""Tokens after which a document ends. With marks, a document may have up to twice as many."""


@dataclass(frozen=True)
class DataFile:
    """A file of documents: rows of `.jsonl` or `.parquet`, tokens of `.bin` or `.npy`, otherwise a single document."""

    name: str  # sort key
    path: str  # or URL
    size: int  # bytes
    version: str  # changes with the content
    entry: int  # number of the entry in `data.files`
    data: Data

    @property
    def has_tokens(self) -> bool:
        return self.path.endswith(TOKENS)

    def contents(self) -> Iterator[bytes]:
        """Each non-empty document: UTF-8 text, or ids as little-endian uint32. Raises RecipeError for a bad file."""
        for content in self.rows():
            if isinstance(content, bytes):
                yield content

    def rows(self) -> Iterator[bytes | RecipeError]:
        """As `contents`, and with `data.bad_rows` = "skip" an error for each skipped row."""
        if self.path.endswith(COMPRESSED):
            raise RecipeError(f": {self.path} is compressed; decompress it, and name the text file", key="data.files")
        try:
            # A local path may have characters of URLs.
            system, inside = _file_system(self.path) if "://" in self.path else (None, self.path)
            with open(inside, "rb") if system is None else system.open(inside, "rb") as stream:
                for content in self._read(stream):
                    if isinstance(content, RecipeError) and self.data.bad_rows == "refuse":
                        raise content
                    if content:
                        yield content.encode(errors="replace") if isinstance(content, str) else content
        except (OSError, ArrowException) as error:
            problem = getattr(error, "strerror", None) or error
            raise RecipeError(f": {self.path!r} cannot be read: {problem}", key="data.files") from error

    def _read(self, stream: Any) -> Iterator[bytes | str | RecipeError]:
        if self.has_tokens:
            return self._documents_of_tokens(stream)
        if self.path.endswith(".parquet"):
            return self._parquet_rows(stream)
        if not self.path.endswith(".jsonl"):
            return iter([stream.read()])
        lines = ((number, line) for number, line in enumerate(stream, start=1) if line.strip())
        return (self._json_row(f": {self.path}:{n}:", line.decode("utf-8", errors="replace")) for n, line in lines)

    def _json_row(self, place: str, line: str) -> str | RecipeError:
        key = self.data.text_key
        try:
            row = json.loads(line)
        except RecursionError:
            problem = "its lists or objects are nested too deeply"
        except ValueError as error:
            problem = f"not JSON: {error}"
        else:
            if not isinstance(row, dict):
                problem = f"it is of type {type(row).__name__}; a row is an object with text"
            elif key not in row:
                problem = self._missing_field(row)
            elif not isinstance(row[key], str):
                problem = f"{key!r} (data.text_key) is {json.dumps(row[key])[:40]}, not text; remove the row"
            else:
                text: str = row[key]
                return text
        return RecipeError(f"{place} {problem}", key="data.files")

    def _parquet_rows(self, stream: Any) -> Iterator[str]:
        table, key = ParquetFile(stream), self.data.text_key
        if key not in (names := table.schema_arrow.names):
            raise RecipeError(f": {self.path}: {self._missing_field(names)}", key="data.files")
        kind = table.schema_arrow.field(key).type
        if "string" not in str(kind) or types.is_nested(kind):
            problem = f"{key!r} (data.text_key) is of type {kind}, not text; name a field with text"
            raise RecipeError(f": {self.path}: {problem}", key="data.files")
        for batch in table.iter_batches(columns=[key]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)

    def _missing_field(self, names: Iterable[str]) -> str:
        return f"no field data.text_key = {self.data.text_key!r}; it has {', '.join(names)}"

    def _documents_of_tokens(self, stream: Any) -> Iterator[bytes]:
        if self.path.endswith(".npy"):
            array = _array(self.path, stream)
            chunks = iter(np.split(array, range(TOKENS_AT_ONCE, len(array), TOKENS_AT_ONCE)))
        else:
            chunks = self._raw_tokens(stream)
        rest, marks = np.empty(0, "<u4"), np.array(self.data.token_marks, np.int64)
        for chunk in chunks:
            ids = np.concatenate([rest, chunk.astype("<u4")])
            *documents, rest = np.split(ids, np.flatnonzero(np.isin(ids, marks)))
            if len(rest) >= TOKENS_AT_ONCE:
                documents, rest = [*documents, rest], rest[:0]
            yield from (_without_mark(document, marks) for document in documents)
        yield _without_mark(rest, marks)

    def _raw_tokens(self, stream: Any) -> Iterator[np.ndarray]:
        of_header = LLM_C.get(stream.read(4))
        stream.seek(1024 if of_header else 0)
        dtype = np.dtype(of_header or self.data.token_dtype).newbyteorder("<")
        while content := stream.read(TOKENS_AT_ONCE * dtype.itemsize):
            if len(content) % dtype.itemsize:
                raise RecipeError(
                    f": {self.path} is cut off within a token of {dtype}; see data.token_dtype", key="data.files"
                )
            yield np.frombuffer(content, dtype)


def _without_mark(ids: np.ndarray, marks: np.ndarray) -> bytes:
    return ids[np.isin(ids[:1], marks).sum() :].tobytes()


def _array(path: str, stream: Any) -> np.ndarray:
    try:
        ids: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
    # A damaged header may ask for any size.
    except (ValueError, MemoryError) as error:
        raise RecipeError(f": {path!r} cannot be read: {error}", key="data.files") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min(initial=0) < 0 or ids.max(initial=0) >= 1 << 32:
        wrong = f"has {ids.dtype} numbers of shape {ids.shape}"
        raise RecipeError(
            f": {path} {wrong}; a file of tokens has one axis of integers from 0 to 2**32 - 1", key="data.files"
        )
    return ids


def data_files(data: Data) -> tuple[DataFile, ...]:
    """Files of a `[data]` table, empty ones too, sorted by name. Raises RecipeError for entries without files."""
    found = _python_files() if data.source == "python" else _matched_files(data)
    # A folder's listing depends on the file system, and the order decides every batch.
    return tuple(_data_file(name, *found[name], data) for name in sorted(found))


def _data_file(name: str, path: str, entry: int, data: Data) -> DataFile:
    if "://" not in path:
        status = os.stat(path)
        return DataFile(name, path, status.st_size, str(status.st_mtime_ns), entry, data)
    system, inside = _file_system(path)
    return DataFile(name, path, system.size(inside), system.ukey(inside), entry, data)


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path there."""
    if not url.startswith(("http://", "https://")):
        found: tuple[Any, str] = fsspec.url_to_fs(url)
        return found
    from aiohttp import ClientTimeout

    limit = ClientTimeout(sock_connect=HTTP_SECONDS, sock_read=HTTP_SECONDS)
    return fsspec.url_to_fs(url, client_kwargs={"timeout": limit})


Found = dict[str, tuple[str, int]]
"""Path or URL, and the number of the entry in `data.files`, by name."""


def _python_files() -> Found:
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: Found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - {"site-packages", "dist-packages", "__pycache__"}
        paths = (Path(folder, file) for file in files if file.endswith(".py"))
        sources |= {path.relative_to(root).as_posix(): (str(path), 0) for path in paths if path.is_file()}
    if not sources:
        raise RecipeError(
            f"= 'python': no .py file in {root}; use data.source = 'files' and data.files", key="data.source"
        )
    return sources


def _matched_files(data: Data) -> Found:
    """Matching files by path from their deepest common folder, independent of the working directory."""
    entries: dict[str, int] = {}
    for number, pattern in enumerate(data.files):
        for file in _matches(pattern) if "://" in pattern else _local_matches(pattern):
            # Patterns or links may match a file twice, to be trained on and held out.
            if entries.setdefault(file, number) != number and data.weights:
                both = f"data.files[{entries[file]}] and data.files[{number}]"
                raise RecipeError(
                    f": {both} both match {file}; an entry with a weight has its own files", key="data.weights"
                )
    paths = {file: PurePosixPath("/", file) for file in entries}
    root = os.path.commonpath([path.parent for path in paths.values()])
    return {path.relative_to(root).as_posix(): (file, entries[file]) for file, path in paths.items()}


def _matches(pattern: str) -> list[str]:
    """URLs of the files that match a URL."""
    if "::" in pattern:
        raise RecipeError(
            f": {pattern!r} chains file systems; unpack the files, and name their own URL", key="data.files"
        )
    try:
        logger.info("Looking for the files of %s", without_password(pattern))
        system, path = _file_system(pattern)
        if system.isdir(path):
            below = system.find(path)
            found = [file for file in below if file.endswith(FORMATS) and "/." not in file.removeprefix(path)]
        else:
            found = [file for file, about in system.glob(path, detail=True).items() if about["type"] == "file"]
    # A file system of another package may raise anything.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".rstrip(": ")
        remedy = "Check the URL, or copy the files and name the copies."
        raise RecipeError(f": {pattern!r} cannot be read: {problem}. {remedy}", key="data.files") from error
    if not found:
        raise RecipeError(f": {pattern!r} matches no file of {', '.join(FORMATS)}", key="data.files")
    return [system.unstrip_protocol(file) for file in found]


def _local_matches(pattern: str) -> list[str]:
    """Resolved paths of the files that match a local pattern."""
    expanded = os.path.expanduser(pattern)
    if os.path.isdir(expanded):
        matches = [path for path in files_below(expanded) if path.endswith(FORMATS)]
        problem = f"the folder {pattern!r} has no file of {', '.join(FORMATS)}"
        remedy = f". Name other files by a pattern, as {os.path.join(pattern, '**', '*.py')!r}"
    else:
        matches = [path for path in glob.glob(expanded, recursive=True) if os.path.isfile(path)]
        problem, remedy = f"{pattern!r} matches no file", f" (seen from {os.getcwd()})"
    if not matches:
        raise RecipeError(f": {problem}{remedy}", key="data.files")
    return [str(Path(path).resolve()) for path in matches]


def files_below(folder: str) -> list[str]:
    """Files of a folder and its folders, in order, without hidden ones."""
    paths = glob.glob(os.path.join(glob.escape(folder), "**", "*"), recursive=True)
    return sorted(path for path in paths if os.path.isfile(path))
