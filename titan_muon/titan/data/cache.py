"""Rows that one process makes and all processes map into memory. `datasets` caches and locks. No collectives."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value, disable_progress_bars
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock
from pyarrow import ChunkedArray
from torchtitan.tools.logging import logger

from titan_muon.titan.recipe import RecipeError

ROWS_IN_MEMORY = 100
"""A row may be the tokens of a book."""
Rows = Callable[[], Iterator[dict[str, Any]]]


def digest(*parts: str) -> str:
    """32 hexadecimal digits for a sequence of strings."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode()
        # The length distinguishes ("ab", "c") from ("a", "bc").
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.hexdigest()


def cached(cache: str, name: str, rows: Rows, types: Mapping[str, str]) -> dict[str, ChunkedArray]:
    """Columns of `rows`, memory-mapped from the folder `cache`. `name` identifies their content, `types` their columns.

    One process of each folder runs `rows`, and the others wait. If `rows` raises, the next process tries. Damaged files
    are made again. Raises RecipeError if the folder cannot be written or locked.
    """
    folder = Path(cache, name)
    try:
        try:
            return _read(folder, rows, types)
        except DatasetGenerationError:
            raise
        except Exception:  # the libraries raise any error for a damaged file
            with FileLock(f"{folder}.lock"):
                return _repaired(folder, rows, types)
    except (DatasetGenerationError, NotImplementedError, OSError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        if isinstance(cause, NotImplementedError | OSError):
            problem = f"data.cache = {cache!r} cannot be written or locked: {cause}"
            raise RecipeError(f"{problem}. Name another folder, on a local disk.") from error
        # The error of `rows` itself.
        raise (error if cause is None else cause) from None


def _read(folder: Path, rows: Rows, types: Mapping[str, str]) -> dict[str, ChunkedArray]:
    features = Features({column: Value(kind) for column, kind in types.items()})
    disable_progress_bars()
    options: dict[str, Any] = {"fingerprint": folder.name, "writer_batch_size": ROWS_IN_MEMORY}
    table = Dataset.from_generator(rows, features=features, cache_dir=str(folder), **options).data
    return {column: table.column(column) for column in types}


def _repaired(folder: Path, rows: Rows, types: Mapping[str, str]) -> dict[str, ChunkedArray]:
    try:
        # Another process may have made the files again.
        return _read(folder, rows, types)
    except DatasetGenerationError:
        raise
    except Exception as error:
        logger.warning("The cache at %s is damaged (%s) and is made again", folder, error)
        shutil.rmtree(folder)
        return _read(folder, rows, types)
