"""Result of a part, as a file of the output folder: written at the end of the part, read by the next run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import Environment, of


class Outcome(StrEnum):
    """Outcome of a part."""

    PASSED = "passed"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """Result of a part in an environment.

    Attributes:
        part: name of the part.
        reason: reason of any outcome but a pass.
        seconds: duration.
        figures: JSON written by the part, or None.
        log: end of the output.
    """

    part: str
    outcome: Outcome
    reason: str
    seconds: float
    command: tuple[str, ...]
    environment: Environment
    figures: Any = None
    log: str = ""

    @property
    def bad(self) -> bool:
        """Whether the part failed. An impossible part has not failed."""
        return self.outcome in (Outcome.FAILED, Outcome.OUT_OF_TIME)


def write(result: Result, folder: Path) -> None:
    """Save a result atomically."""
    write_whole(folder / f"{result.part}.json", json.dumps(asdict(result), indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def read(name: str, folder: Path) -> Result | None:
    """Result of a part in a folder; None without a valid result."""
    try:
        document = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        document["environment"], document["outcome"] = of(document["environment"]), Outcome(document["outcome"])
        return Result(**{**document, "command": tuple(document["command"])})
    except (OSError, ValueError, KeyError, TypeError):
        # A result of an older version, or an edited one: the part runs again.
        return None
