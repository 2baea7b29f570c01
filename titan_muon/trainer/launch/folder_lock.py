"""Lock of a run folder: only one job writes to the folder."""

import fcntl
import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from titan_muon.trainer.recipe import RecipeError
from titan_muon.trainer.run_folder import without_links

LOCK_FILE = "running.lock"


class FolderLock(ExitStack):
    """Context of a lock, which ends with the context or the process."""

    def take(self, folder: str) -> None:
        """Lock `folder`, in place of an earlier folder.

        Raises RecipeError if another job has the lock, and for a symbolic link in the folder.
        """
        # Closing any file handle of the lock file releases a process's lock.
        self.close()
        path = Path(folder, LOCK_FILE)
        # In a shared folder a link of another user would lead what the run writes or deletes elsewhere.
        for entry in sorted((*path.parent.iterdir(), *path.parent.glob("*/step-*"))):
            if entry.is_symlink():
                raise RecipeError(f"{entry} is a symbolic link, which a run never makes; remove it")
        opened = open(path, "a+", encoding="utf-8", opener=without_links)  # noqa: SIM115 (entered)
        file = self.enter_context(opened)
        try:
            # `lockf` works over NFS. Children would inherit `flock`, and may outlive the job.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise RecipeError(
                f": {folder} is in use by {file.read().strip()}; end that job first, or start a new run "
                'with checkpoint.load = "none" or another name',
                key="checkpoint.load",
            ) from error
        except OSError as error:
            print(f"warning: {folder} cannot be locked ({error}): start no second job in this folder", flush=True)
            return
        with suppress(OSError):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
