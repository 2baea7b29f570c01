"""The documents that a recipe's `[data]` table names: text, digest, and the split into training and validation."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.recipe.sections import Data


@dataclass(frozen=True)
class Document:
    """One text file. `name` decides its place in the order and the side of the split; `size` is in bytes."""

    name: str
    path: Path
    size: int

    def read_bytes(self) -> bytes:
        """The file's content. Raises RecipeError if it cannot be read."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise RecipeError(f"data.files: {str(self.path)!r} cannot be read: {error.strerror}") from error

    def text(self) -> str:
        """The file as UTF-8; bytes that are not become U+FFFD."""
        return self.read_bytes().decode("utf-8", errors="replace")


class Documents:
    """The documents of a `[data]` table, listed and hashed at first use and then kept."""

    def __init__(self, data: Data) -> None:
        assert data.source != "hf", "TorchTitan's own loader reads data.source = 'hf'"
        self.data = data

    def to_dict(self) -> dict[str, object]:
        """The table, for the record TorchTitan writes of a configuration."""
        return asdict(self.data)

    @cached_property
    def all(self) -> tuple[Document, ...]:
        """Every document that is not empty, sorted by name. Raises RecipeError if there is none."""
        found = _python_files() if self.data.source == "python" else _matched_files(self.data.files)
        # Sorted: what a folder lists first differs between file systems, and the order decides every batch.
        documents = (Document(name, path, path.stat().st_size) for name, path in sorted(found.items()))
        kept = tuple(document for document in documents if document.size > 0)
        if not kept:
            where = "source = 'python'" if self.data.source == "python" else f"files = {list(self.data.files)}"
            raise RecipeError(f"data.{where}: all {len(found)} files found are empty; there is no text to train on")
        return kept

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits that name all names and contents. Reads every file."""
        # Of contents, not of dates: a corpus that is copied to another machine finds its cache, an edited one does not.
        state = hashlib.blake2b(digest_size=16)
        for document in self.all:
            content = document.read_bytes()
            state.update(f"{document.name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
        return state.hexdigest()

    @property
    def training(self) -> np.ndarray:
        """Indices into `all`, ascending: int64, never empty. Raises RecipeError if the split is impossible."""
        return self._split[0]

    @property
    def validation(self) -> np.ndarray:
        """Indices into `all` in an order without meaning, so that any first few are a fair sample: int64.

        Empty only if `data.validation_fraction` is 0. Raises RecipeError if the split is impossible.
        """
        return self._split[1]

    def training_texts(self) -> Iterator[str]:
        """The text of the training documents, one by one."""
        return (self.all[i].text() for i in self.training)

    @cached_property
    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        fraction, count = self.data.validation_fraction, len(self.all)
        # By the hash of its name a document stays on its side when others are added or removed, so a run on more text
        # does not train on what an earlier one held out.
        keys = np.array([_split_key(document.name) for document in self.all], dtype=np.uint64)
        order = np.argsort(keys, kind="stable")
        held_out = 0
        if fraction > 0:
            if count < 2:
                raise RecipeError(
                    f"data.validation_fraction = {fraction} needs at least 2 documents, one for each side; "
                    f"there is 1 ({self.all[0].path}). Split it into several files, or set "
                    "data.validation_fraction = 0 and validator.enable = false."
                )
            # Few documents may all fall on one side; the nearest one then crosses over.
            held_out = min(max(int(np.count_nonzero(keys < fraction * 2.0**64)), 1), count - 1)
        return np.sort(order[held_out:]), order[:held_out]


def _split_key(name: str) -> int:
    hashed = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(hashed.digest(), "little")


def _python_files() -> dict[str, Path]:
    """The standard library's sources by their path inside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Path] = {}
    for folder, folders, files in os.walk(root):
        # Installed packages differ from machine to machine, the standard library only with Python's version.
        folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages", "__pycache__")]
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py" and path.is_file():
                found[path.relative_to(root).as_posix()] = path
    if not found:
        raise RecipeError(f"data.source = 'python': no .py file in {root}; use data.source = 'files' and data.files")
    return found


def _matched_files(patterns: tuple[str, ...]) -> dict[str, Path]:
    """The files that the patterns match, each once, by their path from the deepest folder that has all of them.

    So order and split are those of the files, from whatever folder and by whatever patterns they were found.
    """
    if not patterns:
        raise RecipeError("data.files is empty; data.source = 'files' needs at least one glob pattern")
    found: set[Path] = set()
    for pattern in patterns:
        matches = [m for m in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(m)]
        if not matches:
            raise RecipeError(f"data.files: {pattern!r} matches no file (seen from {os.getcwd()})")
        # Two patterns, or two links, may lead to one file; read twice, it could be held out and trained on.
        found.update(Path(match).resolve() for match in matches)
    root = Path(os.path.commonpath([path.parent for path in found]))
    return {path.relative_to(root).as_posix(): path for path in found}
