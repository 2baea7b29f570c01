"""Files built by one process and read by every process. No collectives."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from titan_muon.titan.recipe import RecipeError

T = TypeVar("T")


def digest(*parts: str) -> str:
    """32 hexadecimal digits for a sequence of strings."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode()
        # The length distinguishes ("ab", "c") from ("a", "bc").
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.hexdigest()


def build_once(path: Path, *, load: Callable[[], T | None], build: Callable[[], None]) -> T:
    """Result of `load`; if `load` returns None, one process runs `build` first.

    `load` returns None for an absent or damaged file. `path` names the lock. If `build` raises, the next process tries
    and reports its own error. Raises RecipeError if the folder cannot be written or locked.
    """
    loaded = load()
    if loaded is not None:
        return loaded
    # A lock instead of a barrier works without torch.distributed and with a folder per node, and ends with its process.
    with _locked(path):
        loaded = load()
        if loaded is None:
            build()
            loaded = load()
    assert loaded is not None, f"{path} cannot be read right after it was written"
    return loaded


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Temporary file, renamed to `path` at the end, or removed on an error."""
    # In the same folder: os.replace is atomic within a file system only.
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    folder = f"data.cache = {str(path.parent)!r}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path.with_name(path.name + ".lock"), "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise RecipeError(f"{folder} cannot be written: {error}. Name another folder.") from error
    # Never remove the lock file: a process that waits for the removed file would not exclude a process with a new one.
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise RecipeError(f"{folder} cannot be locked: {error}. Name a folder on a local disk.") from error
        yield
