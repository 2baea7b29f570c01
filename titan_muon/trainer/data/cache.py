"""Rows that one process makes and all processes map into memory. No collectives."""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from filelock import FileLock

from titan_muon.trainer.recipe import RecipeError

logger = logging.getLogger(__name__)

ROWS_IN_MEMORY = 100
"""A row may be the tokens of a book."""
Rows = Iterator[dict[str, Any]]


def digest(*parts: str) -> str:
    """32 hexadecimal digits for a sequence of strings."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode()
        # The length distinguishes ("ab", "c") from ("a", "bc").
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.hexdigest()


def cached(cache: str, name: str, rows: Rows, types: Mapping[str, str]) -> pyarrow.Table:
    """Table of `rows`, memory-mapped from the folder `cache`. `name` identifies the content, `types` the columns.

    One process reads `rows`, a generator, and the others wait. If `rows` raises, the next process tries. A damaged
    file is made again, and a complete file needs no writable folder. Raises RecipeError if the folder cannot be
    written or locked.
    """
    file = Path(cache, f"{name}.arrow")
    if (table := _mapped(file)) is not None:
        return table
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A soft lock would outlive a killed process of another node.
        with FileLock(f"{file}.lock", fallback_to_soft=False):
            # Another process may have made the file.
            if (table := _mapped(file)) is None:
                _write(file, rows, pyarrow.schema(types))
                table = _mapped(file)
    except (NotImplementedError, OSError) as error:
        problem = f"data.cache = {cache!r} cannot be written or locked: {error}"
        raise RecipeError(f"{problem}. Name another folder, on a local disk.") from error
    return table


def _mapped(file: Path) -> pyarrow.Table | None:
    """The table of a complete file, or None."""
    if not file.exists():
        return None
    try:
        return pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        logger.warning("The cache at %s is damaged (%s) and is made again", file, error)
        return None


def _write(file: Path, rows: Rows, schema: pyarrow.Schema) -> None:
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    try:
        # Mode x, because in a shared folder another user may have planted a symbolic link of this name.
        with partial.open("xb") as stream:
            with pyarrow.ipc.new_file(stream, schema) as writer:
                while batch := list(islice(rows, ROWS_IN_MEMORY)):
                    writer.write(pyarrow.RecordBatch.from_pylist(batch, schema))
            # A crash of the machine must not leave a complete name with incomplete content.
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
