"""States of matrices besides the momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..exchange.exchange import move
from ..layout.intervals import Geometries
from ..layout.types import Plan
from ..program.program import orthogonalizing_ranks
from ..tensors.dtensor import from_local, local, step_device
from ..tensors.process_groups import StateMesh, refuse_reads_outside
from ..tensors.storage import TrainedParam, placement_key


@dataclass(frozen=True)
class StateSpec:
    """A float32 state on the owner of a matrix, zero at the start, with the key `name.i` for matrix i of a parameter.

    Attributes:
        saved: whether the state outlives a step. The engine fills other states in each step.
        identity: the state begins as the identity matrix.
    """

    name: str
    shape: tuple[int, ...]
    saved: bool = True
    identity: bool = False

    @property
    def bytes(self) -> int:
        return 4 * prod(self.shape)


AlgorithmFor = Callable[[int], Any]
"""`step.algorithm.Algorithm.for_parameter`."""
MatrixStates = Mapping[int, Mapping[str, Tensor]]
"""This rank's states, by matrix and name."""


def with_matrix_states(
    plan: Plan,
    params: Sequence[TrainedParam],
    algorithm_for: AlgorithmFor,
    state: Mapping[Tensor, dict[str, Any]],
) -> MatrixStates:
    """The states of the plan's matrices, created or moved from another plan's ranks in the optimizer's `state`.

    Collective over the holders. A state is a DTensor on the ranks that orthogonalize the matrix, so that
    torch.distributed.checkpoint can load the state to another owner.
    """
    states: dict[int, dict[str, Tensor]] = {}
    for number, specs, ranks in _stateful(plan, algorithm_for):
        matrix = plan.matrices[number]
        param, holders = params[matrix.parameter].param, plan.parameters[matrix.parameter].layout.mesh.ranks
        for spec in specs:
            key = f"{spec.name}.{matrix.index}"
            old = state[param].get(key)
            new = _zeros(param, spec.shape, ranks, holders)
            if spec.identity and local(new).numel():
                local(new).fill_diagonal_(1)
            # Another algorithm had another state of this name.
            old = None if old is not None and old.shape != new.shape else old
            # Optimizer.load_state_dict rounds states of frozen parameters to the weights' dtype.
            if old is None or _place(old) != _place(new):
                if old is not None:
                    move(local(old), local(new), _keepers(old, holders), _keepers(new, holders))
                old = state[param][key] = new
            states.setdefault(number, {})[spec.name] = local(old)
    return states


def state_bytes(plan: Plan, algorithm_for: AlgorithmFor) -> Mapping[int, int]:
    """Bytes of the saved states on each rank with states."""
    by_rank: dict[int, int] = {}
    for _, specs, ranks in _stateful(plan, algorithm_for):
        size = sum(spec.bytes for spec in specs)
        for rank in ranks:
            by_rank[rank] = by_rank.get(rank, 0) + size
    return by_rank


def _stateful(plan: Plan, algorithm_for: AlgorithmFor) -> Iterator[tuple[int, list[StateSpec], tuple[int, ...]]]:
    """(matrix, saved states, ranks that orthogonalize it) of each matrix with saved states."""
    specs: dict[int, list[StateSpec]] = {}
    for number, matrix in enumerate(plan.matrices):
        transposed = plan.parameters[matrix.parameter].stack.transposed
        states = algorithm_for(matrix.parameter).states(matrix.rows, matrix.cols, transposed=transposed)
        if saved := [spec for spec in states if spec.saved]:
            specs[number] = saved
    ranks = orthogonalizing_ranks(plan, Geometries(plan.parameters)) if specs else ()
    for number in specs:
        yield number, specs[number], ranks[number]


def _zeros(param: Tensor, shape: tuple[int, ...], ranks: tuple[int, ...], holders: tuple[int, ...]) -> Tensor:
    device, whole = step_device(param), torch.empty(shape, device="meta")
    if not isinstance(param, DTensor) and ranks == tuple(sorted(holders)):
        return torch.zeros(shape, dtype=torch.float32, device=device)
    # A DTensor for replicated plain tensors too, because checkpoints must save the owner's state.
    mesh = StateMesh(device.type, torch.tensor(ranks, device="cpu"))
    stored = shape if mesh.get_coordinate() is not None else (0, *shape[1:])
    zeros = torch.zeros(stored, dtype=torch.float32, device=device)
    state = from_local(zeros, mesh, [Replicate()], whole)
    refuse_reads_outside(
        state,
        "this rank has no part of a state of muon.algorithm, which is only on the ranks that orthogonalize the matrix; "
        "save and load the state with torch.distributed.checkpoint, which moves states between ranks",
    )
    return state


def _place(state: Tensor) -> object:
    return state.dtype, local(state).device, placement_key(state)


def _keepers(state: Tensor, holders: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(state.device_mesh.mesh.flatten().tolist()) if isinstance(state, DTensor) else holders
