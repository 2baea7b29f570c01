"""Meshes without process groups, by private parts of PyTorch that `tests/unit/owned/test_private.py` checks."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .warning import warn


class MeshWithoutGroups(DeviceMesh):
    """The holders of a tensor; further ranks have an empty local tensor. `refusal`: error message of a collective."""

    refusal: str

    def __init__(self, device_type: str, ranks: Tensor, names: tuple[str, ...] | None = None) -> None:
        # No process groups, because making a group is collective over all ranks.
        super().__init__(device_type, ranks, mesh_dim_names=names, _init_backend=False)

    @property
    def _dim_group_names(self) -> Any:  # type: ignore[override]
        # FSDP2 reads this property, and DTensor for every collective.
        raise ValueError(self.refusal)

    # DTensor caches the placement of an operator's result by the mesh, and would take an equal mesh with groups.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((type(self).__name__, super().__hash__()))

    # The method of DeviceMesh looks for process groups.
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def without_groups(tensor: Tensor) -> bool:
    """Whether the mesh of a tensor has no process groups."""
    return isinstance(tensor, DTensor) and isinstance(tensor.device_mesh, MeshWithoutGroups)


def refuse_reads_outside(tensor: DTensor, message: str) -> None:
    """Make `full_tensor` and `redistribute` raise ValueError outside of the mesh, where both return an empty tensor."""
    if tensor.device_mesh.get_coordinate() is None:
        for read in ("full_tensor", "redistribute"):
            # Not a closure, because the tensor may be pickled.
            setattr(tensor, read, partial(_refuse, message))


def _refuse(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(message)


class StateMesh(MeshWithoutGroups):
    """The keepers of a momentum or a rule state, if not every holder is a keeper."""

    refusal = (
        'muon.state = "owner": the momentum is on its owner alone; save and load the momentum with '
        "torch.distributed.checkpoint, which moves data between ranks"
    )

    def __getstate__(self) -> dict[str, Any]:
        warn(
            'a momentum or rule state of muon.state = "owner" was pickled: the pickle has the part of this rank alone. '
            "Save with torch.distributed.checkpoint, on all ranks"
        )
        return super().__getstate__()
