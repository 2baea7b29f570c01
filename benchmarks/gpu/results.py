"""What a part came to, as a file of the output folder: written as soon as the part ends, read by the next run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.gpu.environment import Environment, of


class Outcome(StrEnum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """One part in one environment.

    Attributes:
        part: its name.
        reason: of anything but a pass.
        seconds: that it took.
        figures: JSON that the part wrote, or None.
        log: the end of what it printed.
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
        """Whether something is wrong: a part that cannot run here is not."""
        return self.outcome in (Outcome.FAILED, Outcome.OUT_OF_TIME)


def write(result: Result, folder: Path) -> None:
    """Keep a result; a reader finds the old one or the new one whole."""
    write_whole(folder / f"{result.part}.json", json.dumps(asdict(result), indent=1) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file in one step, so that a run that is cut off leaves no half of one."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def read(name: str, folder: Path) -> Result | None:
    """What a part left in a folder; nothing if there is none, or what is there is no result."""
    try:
        document = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        document["environment"], document["outcome"] = of(document["environment"]), Outcome(document["outcome"])
        return Result(**{**document, "command": tuple(document["command"])})
    except (OSError, ValueError, KeyError, TypeError):
        # Of an older version, or edited: the part is run again.
        return None
