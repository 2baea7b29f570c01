"""Warnings at the user's line."""

from __future__ import annotations

import sys
import warnings

INTERNAL = frozenset(("titan_muon", "torch", "contextlib"))
"""Packages between a warning and the code of the user."""


def warn(text: str) -> None:
    """Warn at the innermost line outside of this package and of torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INTERNAL:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
