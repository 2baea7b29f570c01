"""Results of the parts: one file of the output folder, renewed after each part and read by the next run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import Environment, of

FILE = "results.json"


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

    @property
    def source(self) -> str:
        """Where the figures come from: `measured` on a GPU, else `rehearsed`."""
        return "measured" if self.environment.gpus else "rehearsed"


def write(results: Iterable[Result], folder: Path) -> None:
    """Save all results atomically."""
    document = {result.part: {"source": result.source, **asdict(result)} for result in results}
    write_whole(folder / FILE, json.dumps(document, indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def read(file: Path) -> dict[str, Result]:
    """Results of a file by part, without invalid ones; empty without a valid file."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # A missing file, or a torn one: the parts run again.
        return {}
    entries = document.items() if isinstance(document, dict) else ()
    return {name: result for name, entry in entries if (result := _result(entry)) is not None}


def _result(entry: Mapping[str, Any]) -> Result | None:
    try:
        values = {key: value for key, value in entry.items() if key != "source"}
        values["environment"], values["outcome"] = of(entry["environment"]), Outcome(entry["outcome"])
        return Result(**{**values, "command": tuple(entry["command"])})
    except (ValueError, KeyError, TypeError, AttributeError):
        # A result of an older version, or an edited one: the part runs again.
        return None
