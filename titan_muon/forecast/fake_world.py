"""A rank of a world without the other ranks, by private parts of PyTorch that tests check for each version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug


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
    forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _of_this_rank():
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


@contextmanager
def _of_this_rank() -> Iterator[None]:
    """Make no chunk and no group of other ranks, because these take a minute for 16,384 ranks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    chunk, new_group = _fsdp_param._chunk_with_empty, device_mesh.new_group

    def group_of_this_rank(ranks: Sequence[int] | None = None, **options: Any) -> Any:
        if ranks is not None and dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks=ranks, **options)

    _fsdp_param._chunk_with_empty = Chunks  # type: ignore[assignment]
    device_mesh.new_group = group_of_this_rank  # type: ignore[assignment]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty, device_mesh.new_group = chunk, new_group


class Chunks:
    """The chunks of a tensor for `num_chunks` ranks, made when FSDP2 asks for one: it uses two of them."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __getitem__(self, rank: int) -> Tensor:
        tensor, dim = self._tensor, self._dim
        step = -(-tensor.size(dim) // self._count)
        start = rank * step
        if step > 0 and start >= tensor.size(dim):
            return tensor.new_empty(0)
        return tensor.narrow(dim, start, min(step, tensor.size(dim) - start))


def forget_meshes() -> None:
    """Clear DTensor's cached meshes of a previous model, which FSDP2 would refuse on an equal mesh."""
    debug._clear_sharding_prop_cache()


def root_size(mesh: DeviceMesh) -> int:
    """Ranks of the mesh from which a mesh was cut."""
    return mesh._get_root_mesh().size()
