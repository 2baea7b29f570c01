"""The states of a rule besides the momentum: one tensor a matrix, on the ranks that orthogonalize the matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..comm.collectives import move
from ..plan.program import workers
from ..plan.terms.layout import Geometries
from ..plan.terms.types import Plan
from ..tensors.dtensor import local, step_device
from ..tensors.mesh import StateMesh
from ..tensors.storage import TrainedParam, placement_key


@dataclass(frozen=True)
class StateSpec:
    """A state that a matrix's owner keeps: float32, one number for each output of the matrix.

    The optimizer's state has it as `name.i` for matrix i of a parameter. It starts at zero.
    """

    name: str


MatrixStates = Mapping[int, Mapping[str, Tensor]]
"""By matrix and name, this rank's states as plain tensors."""


def with_rule_states(
    plan: Plan,
    geometries: Geometries,
    params: Sequence[TrainedParam],
    specs: Sequence[StateSpec],
    state: Mapping[Tensor, dict[str, Any]],
) -> MatrixStates:
    """The states of the plan's matrices, from the optimizer's `state`, where missing ones are made.

    Every rank of a parameter has the same keys. A DTensor on the ranks that orthogonalize the matrix holds the numbers,
    so that torch.distributed.checkpoint saves them once and loads them to any other owner. The states of another plan
    move to the ranks of this plan. All ranks of the parameters call this together.
    """
    found: dict[int, dict[str, Tensor]] = {}
    if not specs:
        return found
    for number, ranks in enumerate(workers(plan, geometries)):
        matrix = plan.matrices[number]
        param, every = params[matrix.parameter].param, plan.parameters[matrix.parameter].layout.mesh.ranks
        for spec in specs:
            key = f"{spec.name}.{matrix.index}"
            kept = state[param].get(key)
            made = _zeros(param, plan.out_in(number)[0], ranks, every)
            # Optimizer.load_state_dict rounds the states of frozen parameters to the dtype of their weights.
            if kept is None or _place(kept) != _place(made):
                if kept is not None:
                    move(local(kept), local(made), _holders(kept, every), _holders(made, every))
                kept = state[param][key] = made
            found.setdefault(number, {})[spec.name] = local(kept)
    return found


def _zeros(param: Tensor, outputs: int, ranks: tuple[int, ...], every: tuple[int, ...]) -> Tensor:
    """A state of zeros on `ranks`. `every` are the ranks of the parameter."""
    device = step_device(param)
    if not isinstance(param, DTensor) and ranks == tuple(sorted(every)):
        return torch.zeros(outputs, dtype=torch.float32, device=device)
    # Replicas of a plain tensor too: only the owner's state advances, and a checkpoint would save that of any rank.
    mesh = StateMesh(device.type, torch.tensor(ranks, device="cpu"))
    here = outputs if mesh.get_coordinate() is not None else 0
    held = torch.zeros(here, dtype=torch.float32, device=device)
    size = torch.Size((outputs,))
    made = DTensor.from_local(held, mesh, [Replicate()], run_check=False, shape=size, stride=(1,))
    if not here:
        # PyTorch's methods would return an empty tensor.
        for read in ("full_tensor", "redistribute"):
            setattr(made, read, _refuse)
    return made


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "a state of muon.rule is only on the ranks that orthogonalize its matrix, and this is none of them; save and "
        "load it with torch.distributed.checkpoint, which brings it to the ranks that need it"
    )


def _place(state: Tensor) -> object:
    return state.dtype, local(state).device, placement_key(state)


def _holders(state: Tensor, every: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(state.device_mesh.mesh.flatten().tolist()) if isinstance(state, DTensor) else every


def saved_rule_states(
    params: Sequence[TrainedParam],
    current: Mapping[Tensor, Mapping[str, Any]],
    saved: Mapping[Tensor, Mapping[str, Any]],
) -> list[tuple[Tensor, Tensor]]:
    """(current, saved) local tensors of each state of the rule.

    Args:
        params: trained parameters.
        current: by parameter, the optimizer's state.
        saved: by parameter, the state that is loaded.

    Raises:
        ValueError: naming the first state that is missing or is kept on other ranks.
    """
    found = []
    for trained in params:
        for key, kept in current[trained.param].items():
            if key == "momentum_buffer":
                continue
            given = saved[trained.param].get(key)
            if given is None or placement_key(given) != placement_key(kept):
                raise ValueError(
                    f"{trained.fqn}: the state dict has no {key} on the ranks that orthogonalize the matrix; load a "
                    "state of another plan with torch.distributed.checkpoint, and build Muon with the rule that saved"
                )
            found.append((local(kept), local(given)))
    return found
