"""Errors of a run that cannot start or continue."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from titan_muon.trainer.recipe import RecipeError

T = TypeVar("T")


class RunFault(RuntimeError):
    """A run cannot continue. Raised on every rank; the text is a complete message."""


def unusable(folder: str, error: OSError) -> RecipeError:
    """Error for a start that cannot read or write in `dump_folder`."""
    remedy = "Free space, give this user the right to read and to write there, or set another dump_folder."
    return RecipeError(f"dump_folder = {folder!r}: {error}. {remedy}")


def by_rank_0(action: Callable[[], T], folder: str, group: dist.ProcessGroup | None) -> T:
    """The result of `action` on rank 0, on every rank of `group` (gloo; None: a single process).

    Raises an error of `action` on every rank: a RecipeError, also for files in `folder`, or else a RuntimeError.
    """
    answer: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except Exception as error:
            failure = unusable(folder, error) if isinstance(error, OSError) else error
            # As text, because not every error can be pickled.
            text = f"{type(error).__name__}: {error} (on rank 0)"
            answer[0] = failure if isinstance(failure, RecipeError) else RuntimeError(text)
    if group is not None:
        dist.broadcast_object_list(answer, src=0, group=group)
    if failure is not None:
        raise failure
    if isinstance(answer[0], Exception):
        raise answer[0]
    result: T = answer[0]
    return result
