"""States of matrices besides the momentum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

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

    `saved`: whether the state outlives a step. The engine fills other states in each step.
    """

    name: str
    shape: tuple[int, ...]
    saved: bool = True


class HasStates(Protocol):
    """An algorithm: see `algorithms.algorithm.Algorithm.states`."""

    def states(self, rows: int, cols: int, *, transposed: bool) -> tuple[StateSpec, ...]: ...


def saved_specs(plan: Plan, algorithm: HasStates, number: int) -> list[StateSpec]:
    """The saved states of a matrix."""
    matrix = plan.matrices[number]
    transposed = plan.parameters[matrix.parameter].stack.transposed
    return [spec for spec in algorithm.states(matrix.rows, matrix.cols, transposed=transposed) if spec.saved]


MatrixStates = Mapping[int, Mapping[str, Tensor]]
"""This rank's states, by matrix and name."""


def with_matrix_states(
    plan: Plan,
    params: Sequence[TrainedParam],
    algorithm: HasStates,
    state: Mapping[Tensor, dict[str, Any]],
) -> MatrixStates:
    """The states of the plan's matrices, created or moved from another plan's ranks in the optimizer's `state`.

    Collective over the holders. A state is a DTensor on the ranks that orthogonalize the matrix, so that
    torch.distributed.checkpoint can load the state to another owner.
    """
    states: dict[int, dict[str, Tensor]] = {}
    for number, specs, ranks in _stateful(plan, algorithm):
        matrix = plan.matrices[number]
        param, holders = params[matrix.parameter].param, plan.parameters[matrix.parameter].layout.mesh.ranks
        for spec in specs:
            key = f"{spec.name}.{matrix.index}"
            old = state[param].get(key)
            new = _zeros(param, spec.shape, ranks, holders)
            # Optimizer.load_state_dict rounds states of frozen parameters to the weights' dtype.
            if old is None or _place(old) != _place(new):
                if old is not None:
                    move(local(old), local(new), _keepers(old, holders), _keepers(new, holders))
                old = state[param][key] = new
            states.setdefault(number, {})[spec.name] = local(old)
    return states


def state_bytes(plan: Plan, algorithm: HasStates) -> Mapping[int, int]:
    """Bytes of the saved states on each rank with states."""
    by_rank: dict[int, int] = {}
    for _, specs, ranks in _stateful(plan, algorithm):
        size = 4 * sum(prod(spec.shape) for spec in specs)
        for rank in ranks:
            by_rank[rank] = by_rank.get(rank, 0) + size
    return by_rank


def _stateful(plan: Plan, algorithm: HasStates) -> Iterator[tuple[int, list[StateSpec], tuple[int, ...]]]:
    """(matrix, saved states, ranks that orthogonalize it) of each matrix with saved states."""
    specs = [saved_specs(plan, algorithm, number) for number in range(len(plan.matrices))]
    for number, ranks in enumerate(orthogonalizing_ranks(plan, Geometries(plan.parameters)) if any(specs) else ()):
        if specs[number]:
            yield number, specs[number], ranks


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
            "this rank has no part of a state of muon.algorithm, which is only on the ranks that orthogonalize the "
            "matrix; save and load the state with torch.distributed.checkpoint, which moves states between ranks",
        )
    return state


def _place(state: Tensor) -> object:
    return state.dtype, local(state).device, placement_key(state)


def _keepers(state: Tensor, holders: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(state.device_mesh.mesh.flatten().tolist()) if isinstance(state, DTensor) else holders
