"""Measurements of a monitored step: sizes by role, sampled matrices, and small momentum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_muon.assignment.rules import Assignment
from titan_muon.comm.clip import replica_count
from titan_muon.muon import Muon
from titan_muon.owned import gather
from titan_muon.plan.terms.types import Parameter
from titan_muon.tensors.dtensor import held_indices, local
from titan_muon.titan.assign.container import HybridOptimizers
from titan_muon.titan.monitor.spectrum import largest_singular_value, orthogonality_error
from titan_muon.titan.monitor.waits import Waits

MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class Matrix:
    """A sampled parameter, or the first matrix of a stack."""

    name: str
    parameter: Tensor
    group: Mapping[str, Any]

    def decayed(self) -> Tensor:
        """The whole matrix after the next step's weight decay, in float32. Collective."""
        return self.whole() * (1 - float(self.group["lr"]) * self.group["weight_decay"])

    def whole(self) -> Tensor:
        whole = gather(self.parameter)
        return (whole[0] if whole.dim() == 3 else whole).float()


class Monitor:
    """Measures a training step. All ranks call each method together.

    Args:
        parts: this rank's model parts.
        stage_ranks: ranks with shards of these parameters (world size / pipeline stages).
        every: steps between monitored steps.
        matrices: number of sampled matrices. Every rank gathers each matrix twice.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizers: HybridOptimizers,
        device: torch.device,
        *,
        stage_ranks: int,
        every: int,
        matrices: int,
    ) -> None:
        self._optimizers, self._device, self._every = optimizers, device, every
        self._parameters = {canonical_fqn(name): p for part in parts for name, p in part.named_parameters()}
        self._shares = {name: 1 / replica_count(p, stage_ranks) for name, p in self._parameters.items()}
        # Under pipeline parallelism each rank fills in a part.
        self._whole = {assignment.fqn: number for number, assignment in enumerate(optimizers.parts.whole)}
        self._roles = [_role(assignment) for assignment in optimizers.parts.whole]
        self._offsets = _offsets(optimizers.parts.whole)
        self._sampled = self._sample(matrices)
        self._waits = Waits(self._muons(), device)
        self._before: dict[str, Tensor] = {}
        self._decayed: dict[str, Tensor] = {}

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    @torch.no_grad()
    def before_step(self) -> None:
        self._before = {name: local(p).detach().clone() for name, p in self._trained()}
        self._decayed = {matrix.name: matrix.decayed() for matrix in self._sampled}
        self._waits.begin()

    @torch.no_grad()
    def after_step(self, tokens: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Measurements of the step. `tokens`: tokens of each expert, by layer. The host waits."""
        # With overlap = "forward", updates may be pending.
        self._optimizers.finish_step()
        record: dict[str, Any] = self._sizes()
        record["exposed_communication_ms"] = self._waits.end()
        self._before = {}
        for matrix in self._sampled:
            after = matrix.whole()
            update = self._decayed.pop(matrix.name) - after
            record.setdefault("largest_singular_value", {})[matrix.name] = float(largest_singular_value(after))
            record.setdefault("orthogonality_error", {})[matrix.name] = float(orthogonality_error(update))
        for layer, counts in tokens.items():
            mean = sum(counts) / len(counts)
            record.setdefault("tokens_max_over_mean", {})[layer] = max(counts) / mean if mean else 0.0
            record.setdefault("experts_without_tokens", {})[layer] = sum(count == 0 for count in counts)
        return record

    def _trained(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self._parameters.items() if name in self._whole]

    def _sizes(self) -> dict[str, Any]:
        """Root mean squares of weights and updates, norms of the momentum, by role; matrices with small momentum."""
        squares = torch.zeros(2, len(self._whole), dtype=torch.float64, device=self._device)
        momentum = torch.zeros(self._offsets[-1], dtype=torch.float64, device=self._device)
        states = self._momentum()
        for name, parameter in self._trained():
            weight, number, share = local(parameter), self._whole[name], self._shares[name]
            if weight.numel() == 0:
                continue
            squares[0, number] = _square(weight).to(self._device) * share
            squares[1, number] = _square(weight - self._before[name]).to(self._device) * share
            if name in states:
                self._add_momentum(momentum, states[name], number, share)
        both = torch.cat((squares.flatten(), momentum))
        if dist.get_world_size() > 1:
            dist.all_reduce(both)
        weights, updates, norms = both.split((len(self._whole), len(self._whole), len(momentum)))
        counts = [prod(assignment.shape) for assignment in self._optimizers.parts.whole]
        by_matrix = norms.sqrt().tolist()
        muons = [number for number, a in enumerate(self._optimizers.parts.whole) if a.optimizer == "muon"]
        eps = min((group["eps"] for muon in self._muons() for group in muon.param_groups), default=0.0)
        small = sum(
            norm < eps for number in muons for norm in by_matrix[self._offsets[number] : self._offsets[number + 1]]
        )
        record: dict[str, Any] = {"weight_rms": {}, "update_rms": {}, "momentum_norm": {}, "matrices_under_eps": small}
        for role in dict.fromkeys(self._roles):
            members = [number for number, other in enumerate(self._roles) if other == role]
            total = sum(counts[number] for number in members)
            record["weight_rms"][role] = (sum(float(weights[number]) for number in members) / total) ** 0.5
            record["update_rms"][role] = (sum(float(updates[number]) for number in members) / total) ** 0.5
            pieces = [by_matrix[self._offsets[n] : self._offsets[n + 1]] for n in members if n in muons]
            if pieces:
                record["momentum_norm"][role] = sum(norm**2 for piece in pieces for norm in piece) ** 0.5
        return record

    def _add_momentum(self, into: Tensor, momentum: Tensor, number: int, share: float) -> None:
        own, start = local(momentum).detach(), self._offsets[number]
        if own.numel() == 0:
            return
        if own.dim() != 3:
            into[start] += _square(own).to(self._device) * share
            return
        rows = held_indices(momentum)[0].to(self._device) + start
        into.index_add_(0, rows, own.double().square().sum((1, 2)).to(self._device) * share)

    def _muons(self) -> list[Muon]:
        return [optimizer for optimizer in self._optimizers if isinstance(optimizer, Muon)]

    def _momentum(self) -> dict[str, Tensor]:
        return {
            name: muon.state[parameter][MOMENTUM]
            for muon in self._muons()
            for group in muon.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if MOMENTUM in muon.state.get(parameter, {})
        }

    def _sample(self, matrices: int) -> list[Matrix]:
        known = [
            Matrix(parameter.fqn, self._parameters[parameter.fqn], group)
            for muon in self._muons()
            for group in muon.param_groups
            for parameter in muon.plan.parameters
            if parameter.fqn in group["param_names"]
            and parameter.fqn in self._parameters
            and _is_plain(parameter, self._parameters[parameter.fqn])
        ]
        places = [number * (len(known) - 1) // max(matrices - 1, 1) for number in range(matrices)] if known else []
        return [known[place] for place in dict.fromkeys(places)]


def _is_plain(planned: Parameter, parameter: Tensor) -> bool:
    matrices = len(planned.stack.matrices)
    return parameter.dim() in (2, 3) and matrices == (parameter.shape[0] if parameter.dim() == 3 else 1)


def _role(assignment: Assignment) -> str:
    return assignment.role or ("vector" if len(assignment.shape) < 2 else "other")


def _offsets(assignments: Sequence[Assignment]) -> list[int]:
    return [*accumulate((a.shape[0] if len(a.shape) == 3 else 1 for a in assignments), initial=0)]


def _square(tensor: Tensor) -> Tensor:
    return tensor.detach().float().norm().double().square()
