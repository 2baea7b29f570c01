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
    """Result of `load`; for None, an absent or damaged file, one process runs `build` first.

    `path` names the lock. If `build` raises, the next process tries. Raises RecipeError if the folder cannot be written
    or locked.
    """
    loaded = load()
    if loaded is not None:
        return loaded
    # Unlike a barrier, a lock works with a folder per node, and ends with the process.
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
    # os.replace is atomic within a file system only.
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    # In a shared folder another user may have planted a symbolic link of this name.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
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
        handle = open(path.with_name(path.name + ".lock"), "a")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise RecipeError(f"{folder} cannot be written: {error}. Name another folder.") from error
    # Never remove the lock file: processes with the old and with a new file would not exclude each other.
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise RecipeError(f"{folder} cannot be locked: {error}. Name a folder on a local disk.") from error
        yield
