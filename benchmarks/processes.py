"""A command with all descendant processes, ended together at a time-out or an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SECONDS_TO_END = 10.0
"""Grace period between SIGTERM and SIGKILL."""


def run_within(seconds: float, command: Sequence[str], log: Path, cwd: Path, environ: Mapping[str, str]) -> int | None:
    """Exit code of a command, or None after a time-out. Output goes to `log`."""
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
    """End a process and all descendants, which would otherwise keep using the GPUs."""
    # Not the process group: torchrun gives each rank a session. Listed before the first signal, because the children of
    # an ended process get another parent.
    starts = {pid: started(pid) for pid in (process.pid, *descendants(process.pid))}
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running(starts):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + SECONDS_TO_END
        while running(starts) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)


def running(starts: dict[int, str]) -> list[int]:
    """Running ones of some processes; a reused pid has a later start."""
    return [pid for pid, began in starts.items() if began and started(pid) == began]


def descendants(pid: int) -> Iterator[int]:
    """Descendants of a process."""
    for child in Path("/proc").glob("[0-9]*"):
        if _stat(int(child.name))[1:2] == [str(pid)]:
            yield int(child.name)
            yield from descendants(int(child.name))


def started(pid: int) -> str:
    """Start of a process in the kernel's clock ticks; empty for an ended process."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in "ZX" else ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name, which may contain spaces: first the state, then the parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
