"""A command with all processes that it starts, ended together when its time is over or the run is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SECONDS_TO_END = 10.0
"""Between asking processes to end and making them."""


def run_within(seconds: float, command: Sequence[str], log: Path, cwd: Path, environ: Mapping[str, str]) -> int | None:
    """The exit code of a command, or None if it was ended because its time was over. Its output goes to `log`."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, env=environ, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all its descendants, which would go on using the GPUs."""
    # Not its process group: torchrun gives each rank a session of its own. Looked for before the first is asked to end,
    # since the children of one that has ended have another parent.
    there = {pid: started(pid) for pid in (process.pid, *descendants(process.pid))}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running(there):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + SECONDS_TO_END
        while running(there) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)


def running(there: dict[int, str]) -> list[int]:
    """Those of some processes that still run; a number may have become another process's, which began later."""
    return [pid for pid, began in there.items() if began and started(pid) == began]


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that these have."""
    for child in Path("/proc").glob("[0-9]*"):
        if _stat(int(child.name))[1:2] == [str(pid)]:
            yield int(child.name)
            yield from descendants(int(child.name))


def started(pid: int) -> str:
    """When a process began, in the kernel's clock ticks; nothing of one that has ended."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _stat(pid: int) -> list[str]:
    """What Linux says of a process after its name, which may hold spaces: its state first, then its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
