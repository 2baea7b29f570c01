"""Checksums of a checkpoint's files in `checksums.json`: written by a save, compared before a load.

After a power loss, a file of full length may have other bytes.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

CHECKSUMS = "checksums.json"
METADATA = ".metadata"
FORMAT = 1
"""Version of a checkpoint's layout; readers refuse a higher one."""
CHUNK = 2**20


class Checksum(NamedTuple):
    """Length and CRC-32 of a file."""

    bytes: int
    crc32: int

    @classmethod
    def of(cls, file: Path) -> "Checksum":
        length, crc = 0, 0
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                length, crc = length + len(chunk), zlib.crc32(chunk, crc)
        return cls(length, crc)


@dataclass(frozen=True)
class SummedResult(WriteResult):
    """PyTorch's record of a written item, with the file's checksum."""

    checksum: Checksum


class SummingWriter(FileSystemWriter):
    """PyTorch's writer. Each rank computes checksums of its files, and the coordinator writes them."""

    def __init__(self, path: str | Path, step: int) -> None:
        super().__init__(path)
        self._step = step

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, then read the files again, mostly from the page cache."""
        results = super().write_data(plan, planner).wait()
        names = dict.fromkeys(result.storage_data.relative_path for result in results)
        sums = {name: Checksum.of(Path(self.path) / name) for name in names}
        summed: Future[list[WriteResult]] = Future()
        summed.set_result([SummedResult(**vars(r), checksum=sums[r.storage_data.relative_path]) for r in results])
        return summed

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = (result for rank in results for result in rank if isinstance(result, SummedResult))
        sums = {result.storage_data.relative_path: result.checksum for result in written}
        facts = {"format": FORMAT, "step": self._step, "save": self.save_id, "world": len(results)}
        self.fs = _SummedFiles(facts, sums)
        super().finish(metadata, results)


class _SummedFiles(FileSystem):
    """Writes the checksums before PyTorch renames `.metadata`, the last step of a save."""

    def __init__(self, facts: Mapping[str, object], sums: Mapping[str, Checksum]) -> None:
        self._facts, self._sums = facts, sums

    def rename(self, path: Any, new_path: Any) -> None:
        if Path(new_path).name == METADATA:
            sums = sorted({**self._sums, METADATA: Checksum.of(Path(path))}.items())
            files = {name: {"bytes": checksum.bytes, "crc32": f"{checksum.crc32:08x}"} for name, checksum in sums}
            target = Path(new_path).with_name(CHECKSUMS)
            temporary = target.with_name(f"{CHECKSUMS}.tmp")
            temporary.write_text(json.dumps({**self._facts, "files": files}, indent=1) + "\n", encoding="utf-8")
            temporary.replace(target)
        super().rename(path, new_path)


def read_checksums(checkpoint: Path) -> dict[str, Checksum] | None:
    """Checksums by file name; None for a checkpoint of an earlier version. Raises ValueError for a wrong file."""
    file = checkpoint / CHECKSUMS
    if not file.is_file():
        return None
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        number, step = int(document["format"]), int(document["step"])
        files = {name: Checksum(int(e["bytes"]), int(e["crc32"], 16)) for name, e in document["files"].items()}
    except Exception as error:
        raise ValueError(f"{CHECKSUMS} cannot be read ({type(error).__name__}: {error})") from error
    if number > FORMAT:
        raise ValueError(f"its format {number} is newer than this version's {FORMAT}")
    check_names(CHECKSUMS, files)
    if METADATA not in files:
        raise ValueError(f"{CHECKSUMS} has no entry for {METADATA}")
    if checkpoint.name.startswith("step-") and checkpoint.name != f"step-{step}":
        raise ValueError(f"the files are of step {step}")
    return files


def check_names(source: str, names: Iterable[str]) -> None:
    """Raise ValueError for a name in the file `source` that leads out of the checkpoint's folder."""
    for name in names:
        if name == ".." or name != Path(name).name:
            raise ValueError(f"{source} names {name} outside of the checkpoint")


def damage(checkpoint: Path, group: dist.ProcessGroup | None) -> str | None:
    """Problem of a checkpoint's files on every rank, or None. Each rank reads a share of the files.

    Collective over `group` (None: a single process).
    """
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    problem = None
    try:
        sums = read_checksums(checkpoint) or {}
        for name in sorted(sums)[rank::world]:
            if problem is None:
                problem = _difference(checkpoint / name, sums[name])
    except ValueError as error:
        problem = str(error)
    problems: list[str | None] = [problem]
    if group is not None:
        problems = [None] * world
        dist.all_gather_object(problems, problem, group=group)
    return next((text for text in problems if text is not None), None)


def _difference(file: Path, saved: Checksum) -> str | None:
    """Problem of a file with another checksum, or None."""
    try:
        # A device or a pipe would be read for ever.
        if not S_ISREG((status := file.stat()).st_mode):
            return f"{file.name} cannot be read (no regular file)"
        if status.st_size != saved.bytes:
            return f"{file.name} has {status.st_size} of {saved.bytes} bytes"
        current = Checksum.of(file)
    except OSError as error:
        return f"{file.name} cannot be read ({error})"
    if current == saved:
        return None
    return f"{file.name} has other bytes than were saved (CRC-32 {current.crc32:08x}, not {saved.crc32:08x})"
