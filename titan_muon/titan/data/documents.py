"""Documents of a recipe's `[data]` table: text, digest, and the split into training and validation."""

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
    """A text file. `name` decides on order and split; `size` is in bytes."""

    name: str
    path: Path
    size: int

    def read_bytes(self) -> bytes:
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise RecipeError(f"data.files: {str(self.path)!r} cannot be read: {error.strerror}") from error

    def text(self) -> str:
        """Text of the file; invalid UTF-8 becomes U+FFFD. Raises RecipeError if the file cannot be read."""
        return self.read_bytes().decode("utf-8", errors="replace")


class Documents:
    """Documents of a `[data]` table, listed and hashed at first use."""

    def __init__(self, data: Data) -> None:
        assert data.source != "hf", "TorchTitan's own loader reads data.source = 'hf'"
        self.data = data

    def to_dict(self) -> dict[str, object]:
        """The table, for TorchTitan's record of the configuration."""
        return asdict(self.data)

    @cached_property
    def all(self) -> tuple[Document, ...]:
        """Every non-empty document, sorted by name. Raises RecipeError without documents."""
        files = _python_files() if self.data.source == "python" else _matched_files(self.data.files)
        # Sorted, because the order of a folder listing depends on the file system, and the order decides every batch.
        documents = (Document(name, path, path.stat().st_size) for name, path in sorted(files.items()))
        kept = tuple(document for document in documents if document.size > 0)
        if not kept:
            where = "source = 'python'" if self.data.source == "python" else f"files = {list(self.data.files)}"
            raise RecipeError(f"data.{where}: all {len(files)} files found are empty; there is no text to train on")
        return kept

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits for all names and contents. Reads every file."""
        # Of contents, not of dates: a copy on another machine finds the cache, an edited corpus does not.
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
        """Indices into `all` in arbitrary order, so that any first few are a fair sample: int64.

        Empty only if `data.validation_fraction` is 0. Raises RecipeError if the split is impossible.
        """
        return self._split[1]

    def training_texts(self) -> Iterator[str]:
        return (self.all[i].text() for i in self.training)

    @cached_property
    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        fraction, count = self.data.validation_fraction, len(self.all)
        # A document's name decides on the side, so additions and removals move no document. A run on more text does not
        # train on the held-out documents of an earlier run.
        names = (document.name.encode(errors="surrogateescape") for document in self.all)
        hashes = (hashlib.blake2b(name, digest_size=8).digest() for name in names)
        keys = np.array([int.from_bytes(digest, "little") for digest in hashes], dtype=np.uint64)
        order = np.argsort(keys, kind="stable")
        held_out = 0
        if fraction > 0:
            if count < 2:
                raise RecipeError(
                    f"data.validation_fraction = {fraction} needs at least 2 documents, one for each side; "
                    f"there is 1 ({self.all[0].path}). Split it into several files, or set "
                    "data.validation_fraction = 0 and validator.enable = false."
                )
            # With few documents all may fall on one side; then the nearest document changes sides.
            held_out = min(max(int(np.count_nonzero(keys < fraction * 2.0**64)), 1), count - 1)
        return np.sort(order[held_out:]), order[:held_out]


def _python_files() -> dict[str, Path]:
    """Sources of the standard library by path inside the library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: dict[str, Path] = {}
    for folder, folders, files in os.walk(root):
        # Installed packages differ between machines; the standard library differs only between Python versions.
        folders[:] = [f for f in folders if f not in ("site-packages", "dist-packages", "__pycache__")]
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py" and path.is_file():
                sources[path.relative_to(root).as_posix()] = path
    if not sources:
        raise RecipeError(f"data.source = 'python': no .py file in {root}; use data.source = 'files' and data.files")
    return sources


def _matched_files(patterns: tuple[str, ...]) -> dict[str, Path]:
    """Matching files without duplicates, by path from their deepest common folder.

    So order and split depend on the files, not on the working directory or the patterns.
    """
    if not patterns:
        raise RecipeError("data.files is empty; data.source = 'files' needs at least one glob pattern")
    files: set[Path] = set()
    for pattern in patterns:
        matches = [m for m in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(m)]
        if not matches:
            raise RecipeError(f"data.files: {pattern!r} matches no file (seen from {os.getcwd()})")
        # Several patterns or links may lead to the same file. A file must not be both trained on and held out.
        files.update(Path(match).resolve() for match in matches)
    root = Path(os.path.commonpath([path.parent for path in files]))
    return {path.relative_to(root).as_posix(): path for path in files}
