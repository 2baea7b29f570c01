"""Files that one process builds while all others wait for it, and that every process then reads. No collectives."""

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
    """32 hexadecimal digits that name a sequence of strings."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode()
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.hexdigest()


def build_once(path: Path, *, load: Callable[[], T | None], build: Callable[[], None]) -> T:
    """What `load` returns, after `build` has run in one process if there was nothing sound to load.

    `load` returns None for an absent or damaged file. `path` names the lock. If `build` raises, the next process
    tries for itself and reports its own error. Raises RecipeError if the folder cannot be written or locked.
    """
    found = load()
    if found is not None:
        return found
    # A lock on a file, not a barrier: it works without torch.distributed and on nodes with folders of their own, and
    # the operating system opens it when the process that builds dies, so that no one is left waiting.
    with _locked(path):
        # Once more: another process may have built while this one waited for the lock.
        found = load()
        if found is None:
            build()
            found = load()
    assert found is not None, f"{path} cannot be read right after it was written"
    return found


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A neighbour of `path` to write to. It becomes `path` if the block ends well, and is removed if it raises."""
    # Beside `path`: os.replace is atomic within one file system only.
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
    # The lock's file stays: removed, it could be locked once more under the same name by a process that comes later,
    # while another one still waits for the lock on the removed file.
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise RecipeError(f"{folder} cannot be locked: {error}. Name a folder on a local disk.") from error
        yield
