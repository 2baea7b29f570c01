"""States of a rule besides the momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..comm.collectives import move
from ..plan.program import orthogonalizing_ranks
from ..plan.terms.layout import Geometries
from ..plan.terms.types import Plan
from ..tensors.dtensor import local, step_device
from ..tensors.mesh import StateMesh, refuse_reads
from ..tensors.storage import TrainedParam, placement_key


@dataclass(frozen=True)
class StateSpec:
    """A float32 state on the owner of a matrix, zero at the start, with the key `name.i` for matrix i of a parameter.

    Attributes:
        kind: a number for each output, for each element, or for the whole matrix.
        saved: whether the state outlives a step. A feature fills other states in each step.
    """

    name: str
    kind: Literal["outputs", "elements", "matrix"] = "outputs"
    saved: bool = True

    def shape(self, plan: Plan, number: int) -> tuple[int, ...]:
        matrix = plan.matrices[number]
        shapes = {"outputs": (plan.out_in(number)[0],), "elements": (matrix.rows, matrix.cols), "matrix": (1,)}
        return shapes[self.kind]


MatrixStates = Mapping[int, Mapping[str, Tensor]]
"""This rank's states, by matrix and name."""


def with_rule_states(
    plan: Plan,
    params: Sequence[TrainedParam],
    specs: Sequence[StateSpec],
    state: Mapping[Tensor, dict[str, Any]],
) -> MatrixStates:
    """The states of the plan's matrices, created or moved from another plan's ranks in the optimizer's `state`.

    Collective over the holders. A state is a DTensor on the ranks that orthogonalize the matrix, so that
    torch.distributed.checkpoint can load the state to another owner.
    """
    states: dict[int, dict[str, Tensor]] = {}
    for number, ranks in enumerate(orthogonalizing_ranks(plan, Geometries(plan.parameters)) if specs else ()):
        matrix = plan.matrices[number]
        param, holders = params[matrix.parameter].param, plan.parameters[matrix.parameter].layout.mesh.ranks
        for spec in specs:
            if not spec.saved:
                continue
            key = f"{spec.name}.{matrix.index}"
            old = state[param].get(key)
            new = _zeros(param, spec.shape(plan, number), ranks, holders)
            # Optimizer.load_state_dict rounds states of frozen parameters to the weights' dtype.
            if old is None or _place(old) != _place(new):
                if old is not None:
                    move(local(old), local(new), _keepers(old, holders), _keepers(new, holders))
                old = state[param][key] = new
            states.setdefault(number, {})[spec.name] = local(old)
    return states


def state_bytes(plan: Plan, specs: Sequence[StateSpec]) -> Mapping[int, int]:
    """Bytes of the saved states on each rank with states."""
    by_rank: dict[int, int] = {}
    saved = [spec for spec in specs if spec.saved]
    for number, ranks in enumerate(orthogonalizing_ranks(plan, Geometries(plan.parameters)) if saved else ()):
        size = 4 * sum(prod(spec.shape(plan, number)) for spec in saved)
        for rank in ranks:
            by_rank[rank] = by_rank.get(rank, 0) + size
    return by_rank


def _zeros(param: Tensor, shape: tuple[int, ...], ranks: tuple[int, ...], holders: tuple[int, ...]) -> Tensor:
    device = step_device(param)
    if not isinstance(param, DTensor) and ranks == tuple(sorted(holders)):
        return torch.zeros(shape, dtype=torch.float32, device=device)
    # A DTensor for replicated plain tensors too, because checkpoints must save the owner's state.
    mesh = StateMesh(device.type, torch.tensor(ranks, device="cpu"))
    stored = mesh.get_coordinate() is not None
    zeros = torch.zeros(shape if stored else (0, *shape[1:]), dtype=torch.float32, device=device)
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    state = DTensor.from_local(zeros, mesh, [Replicate()], run_check=False, shape=torch.Size(shape), stride=stride)
    if not stored:
        refuse_reads(
            state,
            "this rank has no part of a state of muon.rule, which is only on the ranks that orthogonalize the matrix; "
            "save and load the state with torch.distributed.checkpoint, which moves states between ranks",
        )
    return state


def _place(state: Tensor) -> object:
    return state.dtype, local(state).device, placement_key(state)


def _keepers(state: Tensor, holders: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(state.device_mesh.mesh.flatten().tolist()) if isinstance(state, DTensor) else holders
