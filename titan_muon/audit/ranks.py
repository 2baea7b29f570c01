"""Pieces of tensors on the ranks, their digests, and exchanges between the ranks after the audited steps."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, NamedTuple

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


class Digest(NamedTuple):
    """The place of a piece and sums of its elements, which add up over disjoint pieces.

    `form` has a pseudo-random weight for each element, and `squares` the weight is the element.
    """

    place: str
    form: float
    squares: float
    elements: int


def digest(tensor: Tensor) -> Digest | None:
    """The digest of this rank's piece in float64, so that equal bits have equal digests; None for an unknown piece."""
    if (dims := held(tensor)) is None:
        return None
    one, form, squares = torch.ones(1, dtype=torch.float64, device="cpu"), 0.0, 0.0
    rows, *others = [(i.double() + dim + 1).square().sin() for dim, i in enumerate(dims)] or [one]
    rows, columns = rows.to(tensor.device), reduce(torch.kron, others, one).to(tensor.device)
    at_once = max(1, ELEMENTS_AT_ONCE // max(1, len(columns)))
    pieces = local(tensor).reshape(len(rows), len(columns)).split(at_once)
    for x, weights in zip(pieces, rows.split(at_once), strict=True):
        form += float(weights @ (x.double() @ columns))
        squares += float(x.double().square().sum())
    place = ",".join(f"{int(i[0])}-{int(i[-1])}/{len(i)}" if len(i) else "-" for i in dims)
    return Digest(place, form, squares, len(rows) * len(columns))


def join(shape: Sequence[int], pieces: Sequence[tuple[Sequence[Tensor], Mapping[Any, Tensor]]]) -> dict[Any, Tensor]:
    """Whole tensors in float32 on the CPU, where each element is in a piece, from indices and tensors of each rank."""
    joined = dict[Any, Tensor]()
    for key in pieces[0][1]:
        total, count = (torch.zeros(tuple(shape), dtype=torch.float32, device="cpu") for _ in range(2))
        for dims, tensors in pieces:
            if key in tensors and tensors[key].shape == tuple(map(len, dims)):
                index = tuple(i.view(-1, *[1] * (len(dims) - 1 - dim)) for dim, i in enumerate(dims))
                total[index] += tensors[key].float().cpu()
                count[index] += 1
        # Replicas of an element have a gradient each before its reduction, and the step has their mean.
        joined |= {key: total / count} if count.all() else {}
    return joined


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks, 0 and 1 without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Meeting:
    """All ranks of the script. A wait for them ends after `limit` seconds, and a transfer after ten times that."""

    def __init__(self, limit: float) -> None:
        self.limit, (self.rank, self.size) = limit, rank_and_size()
        self._group: Any = None
        if self.size > 1:
            store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
            number = store.add(f"titan_muon.audit/{self.rank}", 1)
            self._store = dist.PrefixStore(f"titan_muon.audit/{number}", store)

    def come(self, place: str) -> list[int]:
        """Wait for all ranks at a place. Returns those that come late; each rank is on its own then."""
        if self.size == 1:
            return []
        here, word = [f"{place}/{rank}" for rank in range(self.size)], "together"
        self._store.set(here[self.rank], "")
        try:
            self._store.wait(here, timedelta(seconds=self.limit))
        except RuntimeError:
            word = "alone"
        # All ranks take the first word, so that no late rank waits for ranks that went on.
        if self._store.compare_set(place, "", word) == b"together":
            return []
        missing = [rank for rank, key in enumerate(here) if not self._store.check([key])]
        late, self.rank, self.size = self.rank, 0, 1
        return missing or [late]

    def gather(self, value: Any, to: int | None = None) -> list[Any]:
        """The values of all ranks, or nothing on other ranks than `to`. All ranks must have come."""
        if self.size == 1:
            return [value]
        self._group = self._group or dist.new_group(backend="gloo", timeout=timedelta(seconds=10 * self.limit))
        values = [None] * self.size if to in (None, self.rank) else None
        if to is None:
            dist.all_gather_object(values, value, group=self._group)
        else:
            dist.gather_object(value, values, group=self._group, group_dst=to)
        return values or []
