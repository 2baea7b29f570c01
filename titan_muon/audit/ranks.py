"""Pieces of tensors on the ranks, their digests, and exchanges outside of the script's process groups."""

import json
import pickle
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

ELEMENTS_AT_ONCE = 2**22


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held(tensor: Tensor) -> list[Tensor] | None:
    """Global indices of this rank's piece by dim; None off the mesh, or for an unknown placement."""
    dims = [torch.arange(n, device="cpu") for n in tensor.shape]
    if isinstance(tensor, DTensor):
        if (coordinate := tensor.device_mesh.get_coordinate()) is None:
            return None
        for axis, placement in enumerate(tensor.placements):
            if (dim := getattr(placement, "dim", None)) is not None:
                # Strided shards of tensor parallelism take a chunk of each of several runs.
                count = tensor.device_mesh.size(axis)
                size = max(1, -(-len(dims[dim]) // (count * getattr(placement, "split_factor", 1))))
                dims[dim] = torch.cat([dims[dim][:0], *dims[dim].split(size)[coordinate[axis] :: count]])
    return dims if tuple(map(len, dims)) == tuple(local(tensor).shape) else None


def digest(tensor: Tensor, dims: Sequence[Tensor]) -> tuple[str, float, float, int]:
    """A piece's place, a random linear form of its elements, their sum of squares and number.

    Linear forms of disjoint pieces add up to the whole tensor's. In float64, so that equal bits have equal digests.
    """
    place = ",".join(f"{int(i[0])}-{int(i[-1])}/{len(i)}" if len(i) else "-" for i in dims)
    piece, weights = local(tensor), list[Tensor]()
    if not piece.ndim or not piece.numel():
        return place, float(piece.double().sum()), float(piece.double().square().sum()), piece.numel()
    for dim, (size, indices) in enumerate(zip(tensor.shape, dims, strict=True)):
        draw = torch.Generator().manual_seed(dim)
        drawn = torch.randn(size, generator=draw, dtype=torch.float64, device="cpu")
        weights.append(drawn[indices].to(piece.device))
    rows, total, squares = max(1, ELEMENTS_AT_ONCE // max(1, piece[0].numel())), 0.0, 0.0
    for x, first in zip(piece.split(rows), weights[0].split(rows), strict=True):
        y = x.double()
        squares += float(y.square().sum())
        for weight in reversed(weights[1:]):
            y = y @ weight
        total += float(y @ first)
    return place, total, squares, piece.numel()


def whole(shape: Sequence[int], pieces: Sequence[tuple[Sequence[Tensor], Tensor]]) -> Tensor | None:
    """The mean of overlapping pieces in float32 on the CPU; None if an element is missing."""
    total, count = (torch.zeros(tuple(shape), dtype=torch.float32, device="cpu") for _ in range(2))
    for dims, piece in pieces:
        index = tuple(i.view(-1, *[1] * (len(dims) - 1 - dim)) for dim, i in enumerate(dims))
        total[index] += piece.float().cpu()
        count[index] += 1
    return total / count if count.all() else None


Found = dict[tuple[str, str], list[str]]
"""Names by code and evidence. The code is empty for an undecided name."""


def differences(paths: Sequence[str], tables: Sequence[Any], restored: bool) -> Found:
    """Weights and states that differ from the loaded checkpoint with the fewest differences, by the digests beside it.

    Args: `tables` of digests after the load, one a rank. States count if an optimizer was `restored`.
    """
    results = list[Found]()
    for path in map(Path, dict.fromkeys(paths)):
        saved = [json.loads(file.read_text()) for file in sorted(path.parent.glob(f"{path.name}.audit.*.json"))]
        found: Found = defaultdict(list)
        for name, key in dict.fromkeys((n, k) for table in saved for n, states in table.items() for k in states):
            if not any(name in table for table in tables) or (key != "weight" and not restored):
                continue
            then, now = ({e[0]: e[1:] for t in side if (e := t.get(name, {}).get(key))} for side in (saved, tables))
            old, new = ([sum(parts) for parts in zip(*side.values(), strict=True)] for side in (then, now))
            if not new:
                found["resume", f"{key} of {path.name} was not restored"].append(name)
            elif old[2] != new[2]:
                found["", f"{path.name} has digests of a part of {key}"].append(name)
            elif abs(old[0] - new[0]) > 0.01 * max(old[1], new[1]) ** 0.5:
                found["resume", f"{key} is not that of {path.name}"].append(name)
        results.append(found)
    return min(results, key=lambda found: sum(code != "" for code, _ in found), default=defaultdict(list))


class Meeting:
    """All ranks of the script, by the store of its default process group. A wait ends after `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self.limit, self.rank, self.size = limit, 0, 1
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
            number = store.add(f"titan_muon.audit/{self.rank}", 1)
            self._store = dist.PrefixStore(f"titan_muon.audit/{number}", store)

    def come(self, place: str) -> list[int]:
        """Wait for all ranks at a place. Returns those that do not come; without them each rank is on its own."""
        deadline, missing = time.monotonic() + self.limit, list[int]()
        if self.size > 1:
            self._store.set(f"{place}/{self.rank}", "here")
        for rank in range(self.size if self.size > 1 else 0):
            try:
                self._store.wait([f"{place}/{rank}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            except RuntimeError:
                missing.append(rank)
        self.rank, self.size = (0, 1) if missing else (self.rank, self.size)
        return missing

    def gather(self, to: int, value: Any) -> list[Any]:
        """The values of all ranks on rank `to`; empty elsewhere. Raises RuntimeError after ten times the limit."""
        if self.size == 1:
            return [value]
        if self._group is None:
            limit = timedelta(seconds=10 * self.limit)
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", self._store), self.rank, self.size, limit)
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        self._group.allgather([sizes], [torch.tensor([len(data)], device="cpu")]).wait()
        if self.rank != to:
            self._group.send([data], to, 0).wait()
            return []
        buffers = [bytearray(int(size)) for size in sizes]
        for rank, buffer in enumerate(buffers):
            if rank != to:
                self._group.recv([torch.frombuffer(buffer, dtype=torch.uint8)], rank, 0).wait()
        return [value if rank == to else pickle.loads(buffer) for rank, buffer in enumerate(buffers)]

    def tell(self, key: str, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        if self.rank == 0:
            self._store.set(key, pickle.dumps(value).hex())
        self._store.wait([key], timedelta(seconds=10 * self.limit))
        return pickle.loads(bytes.fromhex(self._store.get(key).decode()))
