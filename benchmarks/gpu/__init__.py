"""One GPU, four calls of at most eight minutes: `make gpu CALL=1`. This file has the tools of all calls."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
FAULT_CHARACTERS = 400


@dataclass(frozen=True)
class Rows:
    """Appends rows of JSON to a file. Each is on the disk before the next measurement.

    Attributes:
        common: columns of every row.
        end: `time.monotonic` after which no measurement begins.
    """

    file: Path
    common: Mapping[str, Any]
    end: float = math.inf

    def write(self, **columns: Any) -> None:
        """Append a row. One write call, so that a process that is killed leaves whole lines."""
        line = json.dumps(_plain({**self.common, **columns}), allow_nan=False) + "\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        print(line, end="", flush=True)

    @contextmanager
    def faults(self, **columns: Any) -> Iterator[None]:
        """Turn an error of the block into a row, so that it does not cost later measurements."""
        try:
            yield
        except Exception as error:
            # Packages of other projects raise anything on an unknown machine.
            self.write(**columns, error=f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS])

    @property
    def is_over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self.end


def _plain(value: Any) -> Any:
    """A value for JSON, which has neither NaN nor infinity."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file, without a last line that the machine cut off; none without a file."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


@contextmanager
def one_process(device: torch.device) -> Iterator[None]:
    """A process group of this process, over NCCL on a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True)
class Clock:
    """Times of calls on a device."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether host and device are two."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def once(self, run: Callable[[], object]) -> dict[str, float]:
        """Milliseconds of a call on an idle device: of the host until it returns, between two events, until both end.

        On the CPU the three are one.
        """
        self.wait()
        begin = time.perf_counter()
        if not self.is_gpu:
            run()
            return dict.fromkeys(("device ms", "host ms", "wall ms"), 1e3 * (time.perf_counter() - begin))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        host = time.perf_counter() - begin
        self.wait()
        wall = time.perf_counter() - begin
        return {"device ms": start.elapsed_time(end), "host ms": 1e3 * host, "wall ms": 1e3 * wall}
