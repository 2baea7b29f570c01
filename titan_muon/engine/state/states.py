"""States of holders, placed like a parameter, on the device or on the host, and states of matrices on their owners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...options import MuonOptions, Offload
from ..exchange.exchange import move
from ..layout.intervals import Geometries, chunk
from ..layout.types import Parameter, Plan
from ..program.program import orthogonalizing_ranks
from ..tensors.dtensor import copy_rows, from_local, is_host, local, step_device, storage_device
from ..tensors.names import named_parameters
from ..tensors.process_groups import StateMesh, refuse_reads_outside
from ..tensors.storage import TrainedParam, placement_key, with_momentum

AlgorithmFor = Callable[[int], Any]
"""`step.algorithm.Algorithm.for_parameter`."""
MatrixStates = Mapping[int, Mapping[str, Tensor]]
"""This rank's states, by matrix and name."""


def with_states(
    params: Iterable[TrainedParam],
    planned: Iterable[Parameter],
    state: Mapping[Tensor, dict[str, Any]],
    options: MuonOptions,
    algorithm_for: AlgorithmFor,
) -> tuple[TrainedParam, ...]:
    """The parameters with their momentum, created in the optimizer's `state` if missing or without elements.

    An algorithm without momentum has an empty tensor in its place.
    """
    complete = []
    for number, (trained, parameter) in enumerate(zip(params, planned, strict=True)):
        momentum, has_momentum = trained.momentum_buffer, algorithm_for(number).momentum
        if momentum is None or (has_momentum and not momentum.numel()):
            momentum = torch.zeros(0, device=storage_device(trained.param))
            if has_momentum:
                momentum = new_momentum(trained.param, parameter, options)
            state[trained.param]["momentum_buffer"] = momentum
            trained = with_momentum(trained, momentum)
        complete.append(trained)
    return tuple(complete)


def new_momentum(parameter: Tensor, planned: Parameter, options: MuonOptions) -> Tensor:
    """Momentum of zeros: placed like the parameter, or like one replica on the keepers (`planned.state_ranks`)."""
    dtype: torch.dtype = getattr(torch, options.state_dtype)
    if not planned.state_ranks:
        return new_state(parameter, dtype, options.offload)
    return new_state(parameter, dtype, options.offload, _replica(parameter, planned.state_ranks))


def _replica(parameter: Tensor, ranks: tuple[int, ...]) -> DTensor:
    """A meta tensor like one replica of a parameter, on `ranks`. They divide the rows of a whole replica."""
    cut: list[tuple[int, Any]] = []
    if isinstance(parameter, DTensor):
        axes = zip(parameter.device_mesh.mesh.shape, parameter.placements, strict=True)
        cut = [(size, placement) for size, placement in axes if placement != Replicate()]
    shape = [size for size, _ in cut] or [-1]
    mesh = StateMesh(step_device(parameter).type, torch.tensor(ranks, device="cpu").view(shape))
    coordinate, stored = mesh.get_coordinate(), [0]
    if coordinate is not None:
        stored = list(local(parameter).shape)
        if not cut:
            start, stop = chunk(stored[0], len(ranks), coordinate[0])
            stored[0] = stop - start
    placements = [placement for _, placement in cut] or [Shard(0)]
    return from_local(torch.empty(stored, device="meta"), mesh, placements, parameter)


def moved(
    params: Iterable[TrainedParam], state: Mapping[Tensor, dict[str, Any]], offload: Offload
) -> list[TrainedParam]:
    """The parameters with copies of the momentum on the host or the device, also in the optimizer's `state`."""
    moved_params = []
    for trained in params:
        momentum = moved_state(trained.momentum, trained.param, offload)
        state[trained.param]["momentum_buffer"] = momentum
        moved_params.append(with_momentum(trained, momentum))
    return moved_params


def move_to_replacements(
    groups: Iterable[Mapping[str, Any]],
    state: dict[Tensor, dict[str, Any]],
    params: Iterable[TrainedParam],
    offload: Offload,
) -> None:
    """Give the states of planned parameters to the tensors that have their names now.

    Raises ValueError for a parameter with a new mesh, placement or shape.
    """
    trained, kept = {planned.fqn: planned for planned in params}, list[tuple[Tensor, Tensor, dict[str, Any]]]()
    for fqn, parameter in named_parameters(groups):
        if fqn not in trained:
            continue
        planned = trained[fqn]
        values = dict(state.get(parameter) or state[planned.param])
        if placement_key(parameter) != planned.key:
            raise ValueError(
                f"{fqn}: resharded since Muon was built, and its momentum does not fit; build a new optimizer, and "
                "load the momentum from a checkpoint of torch.distributed.checkpoint"
            )
        if offload == "none":
            device = storage_device(parameter)
            values = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in values.items()}
        kept.append((planned.param, parameter, values))
    for previous, parameter, values in kept:
        state.pop(previous, None)
        state[parameter] = values


@contextmanager
def unchanged_after_errors(groups: Iterable[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> Iterator[None]:
    """Give an optimizer's groups and state back the present values after an error. Tensors are not copied."""
    dicts: list[dict[Any, Any]] = [*groups, *state.values(), state]
    kept = [(values, dict(values)) for values in dicts]
    try:
        yield
    except BaseException:
        for values, before in kept:
            values.clear()
            values.update(before)
        raise


def kept_by(trained: TrainedParam) -> tuple[int, ...]:
    """The keepers of a parameter's momentum; empty if every holder is a keeper."""
    momentum = trained.momentum_buffer
    if isinstance(momentum, DTensor) and isinstance(momentum.device_mesh, StateMesh):
        return tuple(momentum.device_mesh.mesh.flatten().tolist())
    return ()


def new_state(parameter: Tensor, dtype: torch.dtype, offload: Offload, like: Tensor | None = None) -> Tensor:
    """A state of zeros, placed like the parameter or `like`; pinned if on the host."""
    like = parameter if like is None else like
    if offload == "none":
        state = torch.zeros_like(like, dtype=dtype, device=storage_device(parameter))
    else:
        # Copies are asynchronous only from pinned memory, and pinning needs an accelerator.
        pinned = not is_host(step_device(parameter))
        state = torch.zeros_like(like, dtype=dtype, device="cpu", pin_memory=pinned)
    if isinstance(state, DTensor) and isinstance(state.device_mesh, StateMesh):
        refuse_reads_outside(state, StateMesh.refusal)
    copy_rows(parameter, state)
    return state


def moved_state(state: Tensor, parameter: Tensor, offload: Offload) -> Tensor:
    """A copy of a state, on the device or the host as `new_state`."""
    moved = new_state(parameter, state.dtype, offload, state)
    local(moved).copy_(local(state))
    return moved


def resolved(chosen: Offload, parameters: Iterable[Tensor]) -> Offload:
    """The chosen offload, or "parameters" if FSDP's CPUOffloadPolicy keeps a parameter on the host."""
    offloaded = any(storage_device(parameter).type != step_device(parameter).type for parameter in parameters)
    return "parameters" if offloaded else chosen


def needs_move(current: Offload, target: Offload) -> bool:
    """Whether states have to move. Raises ValueError for a reload with parameters on the host."""
    if current == "parameters" and target == "none":
        raise ValueError("reload: the parameters are on the host (CPUOffloadPolicy), and so must be the states")
    return current not in (target, "parameters")


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
