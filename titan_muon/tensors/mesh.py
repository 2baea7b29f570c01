"""Meshes that say where a tensor is and have no process groups, by private parts of PyTorch.

`tests/unit/owned/test_private.py` fails on a version of PyTorch where one of them is gone or does something else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class MeshWithoutGroups(DeviceMesh):
    """Ranks that hold a tensor, which others have too, as non-participants. Nothing communicates over it.

    Attributes:
        refusal: what PyTorch's attempts to do so are told.
    """

    refusal: str

    def __init__(self, device_type: str, ranks: Tensor, names: tuple[str, ...] | None = None) -> None:
        # Without process groups: to make them is collective, one for each set of ranks.
        super().__init__(device_type, ranks, mesh_dim_names=names, _init_backend=False)

    @property
    def _dim_group_names(self) -> Any:  # type: ignore[override]
        # FSDP2 asks for it to shard a DTensor, and DTensor for every collective.
        raise ValueError(self.refusal)

    # DeviceMesh's own would look for process groups.
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def without_groups(tensor: Tensor) -> bool:
    """Whether a tensor is on such a mesh: an owned parameter, or a momentum on its owner alone."""
    return isinstance(tensor, DTensor) and isinstance(tensor.device_mesh, MeshWithoutGroups)


def flattened_by(parameter: Tensor) -> str:
    """The library that cut a parameter into a one-dimensional piece: FSDP1 or DeepSpeed; empty if none did."""
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        return "FSDP1"
    return "DeepSpeed ZeRO" if hasattr(parameter, "ds_id") else ""


class StateMesh(MeshWithoutGroups):
    """The ranks that keep the momentum of a parameter of which others have copies."""

    refusal = (
        'muon.state = "owner": the momentum is on its owner alone; save and load it with torch.distributed.checkpoint, '
        "which brings it to where it is needed"
    )
