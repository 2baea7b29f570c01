"""Free space for a checkpoint, and errors of the disk."""

import errno
import shutil
from pathlib import Path

from titan_muon.titan.recipe import RecipeError

MARGIN = 1.05
"""Space over size of a checkpoint: file systems count blocks, not bytes."""


def folder_bytes(folder: Path) -> int:
    """Size of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def free_bytes(folder: Path) -> int:
    """Free bytes at a folder, which need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def is_disk_full(error: BaseException) -> bool:
    """Whether an error or any of its causes is a full disk."""
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None:
            continue
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        links += [link.__cause__, link.__context__]
        failures = getattr(link, "failures", {})
        links += [cause for cause, _ in failures.values()]
    return False


def full_disk(folder: Path, step: int, needed: int, free: int, newest: int | None) -> str:
    """Message for a step without space. `newest`: step of the newest whole checkpoint, or None."""
    left = "no whole checkpoint is left" if newest is None else f"the newest whole checkpoint is step {newest}"
    return (
        f"step {step} is not saved: {folder} has {free:,} bytes free, and a checkpoint takes about {needed:,}; {left}. "
        "Free space or lower checkpoint.keep_latest_k, then continue the run with checkpoint.load."
    )


def unusable(folder: str, error: OSError) -> RecipeError:
    """Error for a start that cannot read or write in `dump_folder`."""
    remedy = "Free space" if is_disk_full(error) else "Give this user the right to read and to write there"
    return RecipeError(f"dump_folder = {folder!r}: {error}. {remedy}, or set another dump_folder.")
