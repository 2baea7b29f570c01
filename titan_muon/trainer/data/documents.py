"""Documents of a recipe's `[data]` table: text, digest, training and validation split."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from titan_muon.engine.tensors.names import listed
from titan_muon.options import plural
from titan_muon.trainer.data.cache import cached, digest
from titan_muon.trainer.data.files import FORMATS, DataFile, data_files, files_below
from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.recipe.sections import Data

_FORMAT = "2"
"""Increment when the digest or the split changes."""
_INDEX = "5"
"""Increment when the columns of the index change."""
_COLUMNS = {"file": "int64", "hash": "binary", "hardly_text": "bool", "problem": "string"}
MOST_REPLACED = 0.1


@dataclass(frozen=True)
class _Index:
    """Arrays with an entry for each document."""

    file: np.ndarray  # int64: number of its file, ascending
    hashes: np.ndarray  # uint64 (documents, 2): hash of its content; of the whole one for both parts of a cut one
    hardly_text: np.ndarray  # bool: many of its bytes are outside of UTF-8
    problems: dict[int, list[str]]  # of skipped rows, by number of the file
    tails: np.ndarray  # int64: second parts of cut documents, each after its first part


class Documents:
    """The documents of a `[data]` table, numbered by file and row."""

    def __init__(self, data: Data) -> None:
        assert data.source != "hf", "TorchTitan's own loader reads data.source = 'hf'"
        self.data = data

    def to_dict(self) -> dict[str, object]:
        return asdict(self.data)

    @cached_property
    def all(self) -> tuple[DataFile, ...]:
        files = data_files(self.data)
        nonempty = tuple(file for file in files if file.size > 0)
        if not nonempty:
            raise self._empty(len(files))
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
        if len(self._index.tails):
            state.update(repr(self.data.validation_fraction).encode())
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
        if paths := [self.all[number].path for number in doubtful]:
            lines.append(f"data.files: many bytes are not UTF-8 in {listed(paths)}; is this text?")
        for folder in filter(os.path.isdir, map(os.path.expanduser, self.data.files)):
            if paths := [path for path in files_below(folder) if not path.endswith(FORMATS)]:
                lines.append(f"data.files: {folder!r} has files of other formats, which are not read: {listed(paths)}")
        return lines

    def entries(self) -> np.ndarray:
        """int64: number of each document's entry in `data.files`."""
        return np.array([file.entry for file in self.all])[self._index.file]

    def summary(self) -> list[str]:
        """Lines on cut documents, and on skipped rows."""
        cut = self._index.file[self._index.tails]
        lines = [f"{self.all[n].path}: its end is held out, because it is a single document" for n in cut]
        if problems := [problem for of_file in self._index.problems.values() for problem in of_file]:
            files = plural(len(self._index.problems), "file")
            lines.append(f"{plural(len(problems), 'row')} of {files} skipped, the first: {problems[0]}")
        return lines

    def contents(self) -> Iterator[tuple[DataFile, bytes]]:
        heads, number = set((self._index.tails - 1).tolist()), 0
        for file in self.all:
            for content in file.contents():
                parts = _parts(file, content, self.data.validation_fraction) if number in heads else (content,)
                yield from ((file, part) for part in parts)
                number += len(parts)

    def training_texts(self) -> Iterator[str]:
        """Raises RecipeError for a file of tokens."""
        held_out = set(self.validation.tolist())
        for number, (file, content) in enumerate(self.contents()):
            if file.has_tokens:
                needed = "text, which data.tokenizer = 'bpe' needs"
                raise RecipeError(f": {file.path} has tokens and no {needed}", key="data.files")
            if number not in held_out:
                yield content.decode("utf-8", errors="replace")

    @cached_property
    def _index(self) -> _Index:
        # Named by sizes and times, so that other ranks and later starts read no text.
        data = self.data
        keys = (data.source, data.text_key, data.bad_rows, data.token_dtype, str(data.token_marks))
        files = (f"{file.path}\0{file.size}\0{file.version}" for file in self.all)
        table = cached(data.cache, f"documents-{digest(_FORMAT, _INDEX, *keys, *files)}", self._hashes(), _COLUMNS)
        problems: dict[int, list[str]] = {}
        for row in table.filter(table["problem"].is_valid()).select(["file", "problem"]).to_pylist():
            problems.setdefault(row["file"], []).append(row["problem"])
        table = table.filter(table["problem"].is_null())
        hashes = np.frombuffer(b"".join(table["hash"].to_pylist()), dtype="<u8").reshape(-1, 2)
        file, hardly_text = table["file"].to_numpy(), table["hardly_text"].to_numpy()
        # A document without others in its stream trains by its beginning and is held out by its end.
        stream = np.array([f.entry for f in self.all])[file] * (len(data.weights) > 0)
        cut = np.flatnonzero((np.bincount(stream)[stream] == 1) & (data.validation_fraction > 0))
        file, hashes, hardly_text = (np.insert(column, cut, column[cut], 0) for column in (file, hashes, hardly_text))
        return _Index(file, hashes, hardly_text, problems, cut + 1 + np.arange(len(cut)))

    def _hashes(self) -> Iterator[dict[str, Any]]:
        hashed, problem = b"", None
        for number, file in enumerate(self.all):
            for content in file.rows():
                if isinstance(content, RecipeError):
                    problem = problem or content
                    # JSON may have names with lone surrogates.
                    yield {"file": number, "problem": str(content).encode(errors="replace").decode()}
                    continue
                # The standard library has a few sources in other encodings, on purpose.
                hardly_text = self.data.source == "files" and not file.has_tokens and _is_hardly_text(content)
                hashed = hashlib.blake2b(content, digest_size=16).digest()
                yield {"file": number, "hash": hashed, "hardly_text": hardly_text}
        if not hashed:
            raise problem or self._empty(len(self.all))

    @cached_property
    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        fraction, tails = self.data.validation_fraction, self._index.tails
        whole = np.setdiff1d(np.arange(self.count), [*tails, *(tails - 1)])
        keys = self._index.hashes[whole, 0]
        # By content, so that a run on more text does not train on earlier held-out text.
        order = whole[np.argsort(keys, kind="stable")]
        held_out = 0
        if fraction > 0 and len(whole):
            least = 0 if len(tails) else 1
            held_out = min(max(int(np.count_nonzero(keys < fraction * 2.0**64)), least), len(whole) - 1)
        return np.sort(np.concatenate([order[held_out:], tails - 1])), np.concatenate([order[:held_out], tails])


def _parts(file: DataFile, content: bytes, held_out: float) -> tuple[bytes, bytes]:
    """The beginning and the held-out end of a document: whole lines of a text, or else whole characters or tokens."""
    unit = 4 if file.has_tokens else 1
    units = len(content) // unit
    at = min(max(round(units * (1 - held_out)), 1), units - 1) * unit
    if not file.has_tokens:
        line = content.find(b"\n", at) + 1
        at = line if 0 < line < len(content) else at
        while at > 0 and content[at] & 0xC0 == 0x80:
            at -= 1
    return content[:at], content[at:]


def _is_hardly_text(content: bytes) -> bool:
    start = content[: 1 << 16].decode("utf-8", errors="replace")
    return start.count("\ufffd") > MOST_REPLACED * len(start)
