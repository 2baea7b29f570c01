"""Checksums of a checkpoint's files in `checksums.json`: written by a save, compared before a load.

After a power loss, a file of full length may have other bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_muon.trainer.run_folder import CHECKSUMS, FORMAT, METADATA, Checksum, damage, write_file


@dataclass(frozen=True)
class SummedResult(WriteResult):
    """PyTorch's record of a written item, with the file's checksum."""

    checksum: Checksum


class SummingWriter(FileSystemWriter):
    """PyTorch's writer. Each rank computes checksums of its files, and the coordinator writes them."""

    def __init__(self, path: str | Path, step: int, run: str | None = None) -> None:
        super().__init__(path)
        self._facts = {"format": FORMAT, "step": step, "run": run}

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
        facts = {**self._facts, "save": self.save_id, "world": len(results)}
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
            text = json.dumps({**self._facts, "files": files}, indent=1) + "\n"
            write_file(Path(new_path).with_name(CHECKSUMS), text)
        super().rename(path, new_path)


def damage_on_any_rank(checkpoint: Path, run: str | None, group: dist.ProcessGroup | None) -> str | None:
    """Problem of a checkpoint's files on every rank, or None. Each rank reads a share of the files.

    `run`: the run's id. Collective over `group` (None: a single process).
    """
    if group is None:
        return damage(checkpoint, run)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    problems: list[str | None] = [None] * world
    dist.all_gather_object(problems, damage(checkpoint, run, slice(rank, None, world)), group=group)
    return next((text for text in problems if text is not None), None)
