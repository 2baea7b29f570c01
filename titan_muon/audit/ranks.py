"""Pieces of parameters on the ranks, their digests, and exchanges outside of the script's process groups."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

ROWS_AT_ONCE = 2**22


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held(tensor: Tensor) -> list[Tensor] | None:
    """Global indices of this rank's piece by dim; None off the mesh, or for a placement that is not known."""
    dims = [torch.arange(n, device="cpu") for n in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return None
        for axis, placement in enumerate(tensor.placements):
            if (dim := getattr(placement, "dim", None)) is not None:
                # Strided shards of tensor parallelism take a chunk of each of several runs.
                count = tensor.device_mesh.size(axis)
                size = max(1, -(-len(dims[dim]) // (count * getattr(placement, "split_factor", 1))))
                chunks = dims[dim].split(size)[coordinate[axis] :: count]
                dims[dim] = torch.cat([dims[dim][:0], *chunks])
        if tuple(map(len, dims)) != tuple(local(tensor).shape):
            return None
    return dims


def digest(tensor: Tensor, dims: Sequence[Tensor]) -> tuple[float, float]:
    """A random linear form of the whole tensor's elements on this rank, and their sum of squares, both in float64.

    The values of disjoint pieces add up to the whole tensor's.
    """
    piece, weights = local(tensor), []
    for dim, (size, indices) in enumerate(zip(tensor.shape, dims, strict=True)):
        draw = torch.Generator().manual_seed(dim)
        drawn = torch.randn(size, generator=draw, dtype=torch.float64, device="cpu")
        weights.append(drawn[indices].to(piece.device))
    if not piece.ndim or not piece.numel():
        return float(piece.double().sum()), float(piece.double().square().sum())
    rows = max(1, ROWS_AT_ONCE // max(1, piece[0].numel()))
    total = squares = torch.zeros((), dtype=torch.float64, device=piece.device)
    for x, first in zip(piece.split(rows), weights[0].split(rows), strict=True):
        y = x.double()
        squares = squares + y.square().sum()
        for weight in reversed(weights[1:]):
            y = y @ weight
        total = total + y @ first
    return float(total), float(squares)


def region(dims: Sequence[Tensor]) -> str:
    """A name of a piece's place."""
    return ",".join(f"{int(i[0])}-{int(i[-1])}/{len(i)}" if len(i) else "-" for i in dims)


def whole(shape: Sequence[int], pieces: Sequence[tuple[Sequence[Tensor], Tensor]]) -> Tensor | None:
    """The mean of overlapping pieces as a float32 tensor; None if an element is missing."""
    total, count = (torch.zeros(tuple(shape), dtype=torch.float32, device="cpu") for _ in range(2))
    for dims, piece in pieces:
        index = tuple(i.view(-1, *[1] * (len(dims) - 1 - dim)) for dim, i in enumerate(dims))
        total[index] += piece.float().cpu()
        count[index] += 1
    return None if not count.all() else total / count


class Meeting:
    """All ranks of the script, through the store of its default process group. No wait is longer than the limit."""

    def __init__(self, limit: float) -> None:
        self.limit, self.rank, self.size, self.missing = limit, 0, 1, list[int]()
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size > 1:
            store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
            self._store = dist.PrefixStore(f"titan_muon.audit/{store.add(f'titan_muon.audit/{self.rank}', 1)}", store)
        self._group: Any = None

    def come(self, place: str) -> bool:
        """Whether all ranks come to a place within the limit; `missing` has the others."""
        if self.size == 1:
            return True
        self._store.set(f"{place}/{self.rank}", "here")
        deadline = time.monotonic() + self.limit
        for rank in range(self.size):
            try:
                self._store.wait([f"{place}/{rank}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            except RuntimeError:
                self.missing.append(rank)
        return not self.missing

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
        values = list[Any]()
        for rank, size in enumerate(map(int, sizes)):
            buffer = bytearray(size)
            if rank != to:
                self._group.recv([torch.frombuffer(buffer, dtype=torch.uint8)], rank, 0).wait()
            values.append(value if rank == to else pickle.loads(buffer))
        return values

    def tell(self, key: str, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        if self.rank == 0:
            self._store.set(key, pickle.dumps(value))
        self._store.wait([key], timedelta(seconds=10 * self.limit))
        return pickle.loads(self._store.get(key))


def combined(tables: Sequence[Mapping[str, Any]], name: str, key: str, size: int) -> tuple[float, float] | None:
    """Digest and norm of a whole tensor from its pieces in several tables; None if a piece is missing."""
    pieces: dict[str, tuple[float, float, int]] = {}
    for table in tables:
        if (entry := table.get(name, {}).get(key)) is not None:
            pieces.setdefault(entry[0], entry[1:4])
    if sum(count for *_, count in pieces.values()) != size:
        return None
    return sum(value for value, *_ in pieces.values()), sum(square for _, square, _ in pieces.values()) ** 0.5
