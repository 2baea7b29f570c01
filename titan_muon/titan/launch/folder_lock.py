"""Lock of a run folder: only one job writes to the folder."""

import fcntl
import os
import socket
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

from titan_muon.titan.recipe import RecipeError

LOCK_FILE = "running.lock"


class FolderLock:
    """Context of a lock, which ends with the context or the process."""

    def __init__(self) -> None:
        self._file: TextIOWrapper | None = None
        self._folder: str | None = None

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def take(self, folder: str) -> None:
        if self._folder == folder and Path(folder, LOCK_FILE).is_file():
            return
        file = Path(folder, LOCK_FILE).open("a+", encoding="utf-8")  # noqa: SIM115 (closed at the end of the context)
        try:
            # `lockf` works over NFS. Children would inherit `flock`, and may outlive the job.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise RecipeError(
                f"checkpoint.load: {folder} is in use by {holder}; end that job first, or start a new run with "
                'checkpoint.load = "none" or another name'
            ) from error
        except OSError as error:
            # The file system has no locks.
            file.close()
            print(f"warning: {folder} cannot be locked ({error}): start no second job in this folder", flush=True)
            return
        # Closing any file handle of the lock file releases a process's lock.
        if self._file is not None:
            self._file.close()
        self._file, self._folder = file, folder
        with suppress(OSError):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
