"""One job at a time writes to a run folder: a lock that ends with the process that holds it, however that ends."""

import fcntl
import os
import socket
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

from titan_muon.titan.recipe import RecipeError

LOCK_FILE = "running.lock"


class FolderLock:
    """Context at whose end a folder that was taken is free again."""

    def __init__(self) -> None:
        self._file: TextIOWrapper | None = None

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def take(self, folder: str) -> None:
        """Keep other jobs out of `folder`. Raises RecipeError that names the process which is in it already."""
        file = Path(folder, LOCK_FILE).open("a+", encoding="utf-8")  # noqa: SIM115 (closed at the end of the context)
        try:
            # The operating system's own lock, over NFS too, and not the file's existence: that would outlive a job that
            # was killed. Not `flock`: children inherit that one, and may outlive the job as well.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise RecipeError(
                f"checkpoint.load: {folder} is in use by {holder}; end that job first, or start a run of its own with "
                'checkpoint.load = "none" or another name'
            ) from error
        except OSError as error:
            # A file system without locks cannot keep a second job out of the folder.
            file.close()
            print(f"warning: {folder} cannot be locked ({error}): start no second job in this folder", flush=True)
            return
        self._file = file
        with suppress(OSError):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
