"""How a parameter is cut where it computes, whatever its data-parallel ranks do: by tensor or expert parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ..dtensor import layout_on
from ..plan.layout import Intervals, region


@dataclass(frozen=True)
class Inner:
    """The mesh and the placements of a parameter before it was owned; none of a plain tensor.

    Attributes:
        mesh: mesh of tensor or expert parallelism, or None.
        placements: one for each axis of the mesh.
    """

    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    @classmethod
    def of(cls, original: Tensor) -> Inner:
        """What cuts a parameter that is not owned yet."""
        return cls(original.device_mesh, tuple(original.placements)) if isinstance(original, DTensor) else cls()

    def size(self, shape: Sequence[int]) -> torch.Size:
        """What this rank computes with of a parameter of some shape."""
        if self.mesh is None:
            return torch.Size(shape)
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "this rank is on the mesh of its own piece"
        return torch.Size(sum(stop - start for start, stop in dim) for dim in self._region(shape, coordinate))

    def piece(self, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """Where in the whole the piece of a rank is, on a mesh of one axis that `Shard` cuts for."""
        runs = [[*dim, (0, 0)][0] for dim in self._region(shape, (rank,))]
        return tuple(slice(start, stop) for start, stop in runs)

    def wrap(self, piece: Tensor, like: Tensor) -> Tensor:
        """This rank's piece as the original parameter was: itself, or a DTensor."""
        return piece if self.mesh is None else from_local(piece, self.mesh, self.placements, like)

    def _region(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Intervals, ...]:
        assert self.mesh is not None, "a plain tensor has no pieces"
        return region(layout_on("", shape, self.mesh, self.placements), coordinate)


def from_local(piece: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor) -> DTensor:
    """A DTensor of the shape of `like`, of which this rank has a piece."""
    # With shape and stride, and unchecked: to find them out, or to check, DTensor would communicate.
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
