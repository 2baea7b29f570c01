"""A rank of a world without the other ranks, by private parts of PyTorch that tests check for each version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import debug

from ..engine.layout.intervals import chunk


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """A rank of a world without the other ranks: collectives send nothing and leave outputs unchanged.

    Raises ValueError if this process has a default process group.
    """
    # Imports a test package of PyTorch, which training does not need.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError(
            "torch.distributed is initialized, and a plan without processes makes a default process group of its own; "
            "plan before init_process_group, or in another process"
        )
    new_group = device_mesh.new_group

    def group_of_this_rank(ranks: Sequence[int] | None = None, **options: Any) -> Any:
        absent = ranks is not None and dist.get_rank() not in ranks
        return dist.GroupMember.NON_GROUP_MEMBER if absent else new_group(ranks=ranks, **options)

    forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        # No chunk and no group of other ranks, because these take a minute for 16,384 ranks.
        with (
            patch.object(_fsdp_param, "_chunk_with_empty", Chunks),
            patch.object(device_mesh, "new_group", group_of_this_rank),
        ):
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


@dataclass(frozen=True)
class Chunks:
    """The chunks of a tensor for `num_chunks` ranks, made when FSDP2 asks for one: it uses two of them."""

    tensor: Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, rank: int) -> Tensor:
        size = self.tensor.size(self.dim)
        start, stop = chunk(size, self.num_chunks, rank)
        return self.tensor.new_empty(0) if start == stop and size else self.tensor.narrow(self.dim, start, stop - start)


def forget_meshes() -> None:
    """Clear DTensor's cached meshes of a previous model, which FSDP2 would refuse on an equal mesh."""
    debug._clear_sharding_prop_cache()


def root_size(mesh: DeviceMesh) -> int:
    """Ranks of the mesh from which a mesh was cut."""
    return mesh._get_root_mesh().size()
