"""Free space for a checkpoint, and errors of the disk."""

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


def unusable(folder: str, error: OSError) -> RecipeError:
    """Error for a start that cannot read or write in `dump_folder`."""
    remedy = "Free space, give this user the right to read and to write there, or set another dump_folder."
    return RecipeError(f"dump_folder = {folder!r}: {error}. {remedy}")
