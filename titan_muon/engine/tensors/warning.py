"""Warnings at the user's line."""

from __future__ import annotations

import inspect
import warnings
from types import FrameType

INTERNAL = frozenset(("titan_muon", "torch", "contextlib"))
"""Packages between a warning and the code of the user."""


def warn(text: str) -> None:
    """Warn at the innermost line outside of this package and of torch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None and _is_internal(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _is_internal(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in INTERNAL
