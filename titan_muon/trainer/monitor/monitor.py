"""Measurements of a monitored step: sizes by role, sampled matrices, small momentum, and exposed communication."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_muon.engine.layout.types import Parameter
from titan_muon.engine.tensors.dtensor import held_indices, local
from titan_muon.muon import Muon
from titan_muon.owned import gather
from titan_muon.plugins.clip import replica_count
from titan_muon.trainer.assign.container import HybridOptimizers
from titan_muon.trainer.device import Stopwatch

MOMENTUM = "momentum_buffer"
ITERATIONS = 20
"""Of the power iteration."""


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
        stage_ranks: ranks with shards of this rank's parameters (world size / pipeline stages).
        matrices: number of sampled matrices. Every rank gathers each matrix twice.
    """

    def __init__(self, optimizers: HybridOptimizers, device: torch.device, stage_ranks: int, matrices: int) -> None:
        self._optimizers, self._device = optimizers, device
        self._muons = [optimizer for optimizer in optimizers if isinstance(optimizer, Muon)]
        # Under pipeline parallelism each rank fills in a part of the whole model's numbers.
        self._whole = optimizers.parts.whole
        self._numbers = {assignment.fqn: number for number, assignment in enumerate(self._whole)}
        self._roles = [a.role or ("vector" if len(a.shape) < 2 else "other") for a in self._whole]
        self._matrices = [assignment.shape[0] if len(assignment.shape) == 3 else 1 for assignment in self._whole]
        self._parameters = optimizers.named_parameters
        self._trained = {name: p for name, p in self._parameters.items() if name in self._numbers}
        self._shares = {name: 1 / replica_count(p, stage_ranks) for name, p in self._trained.items()}
        self._sampled = self._sample(matrices)
        self._waits = Stopwatch(device)
        self._before: dict[str, Tensor] = {}
        self._decayed: dict[str, Tensor] = {}

    def _sample(self, matrices: int) -> list[Matrix]:
        known = [
            Matrix(parameter.fqn, self._parameters[parameter.fqn], group)
            for muon in self._muons
            for group in muon.param_groups
            for parameter in muon.plan.parameters
            if parameter.fqn in group["param_names"]
            and parameter.fqn in self._parameters
            and _is_plain(parameter, self._parameters[parameter.fqn])
        ]
        places = [number * (len(known) - 1) // max(matrices - 1, 1) for number in range(matrices)] if known else []
        return [known[place] for place in dict.fromkeys(places)]

    @torch.no_grad()
    def before_step(self) -> None:
        self._before = {name: local(p).detach().clone() for name, p in self._trained.items()}
        self._decayed = {matrix.name: matrix.decayed() for matrix in self._sampled}
        for muon in self._muons:
            muon.exchange.timer = self._waits

    @torch.no_grad()
    def after_step(self, tokens: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Measurements of the step. `tokens`: tokens of each expert, by layer. The host waits."""
        # With overlap = "forward", updates may be pending.
        self._optimizers.finish_step()
        record: dict[str, Any] = self._sizes()
        for muon in self._muons:
            muon.exchange.timer = nullcontext()
        # Includes waits hidden by `overlap = "forward"`.
        record["exposed_communication_ms"] = 1e3 * self._waits.take()
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

    def _sizes(self) -> dict[str, Any]:
        """Root mean squares of weights and updates, norms of the momentum, by role; matrices with small momentum."""
        weights, updates, *momenta = self._squares()
        by_muon = [assignment.optimizer == "muon" for assignment in self._whole]
        norms = [squares.sqrt().tolist() if muon else [] for squares, muon in zip(momenta, by_muon, strict=True)]
        eps = min((group["eps"] for muon in self._muons for group in muon.param_groups), default=0.0)
        small = sum(norm < eps for of_parameter in norms for norm in of_parameter)
        record: dict[str, Any] = {"weight_rms": {}, "update_rms": {}, "momentum_norm": {}, "matrices_under_eps": small}
        for role in dict.fromkeys(self._roles):
            members = [number for number, other in enumerate(self._roles) if other == role]
            count = sum(prod(self._whole[number].shape) for number in members)
            record["weight_rms"][role] = (float(weights[members].sum()) / count) ** 0.5
            record["update_rms"][role] = (float(updates[members].sum()) / count) ** 0.5
            if of_role := [norm for number in members for norm in norms[number]]:
                record["momentum_norm"][role] = sum(norm**2 for norm in of_role) ** 0.5
        return record

    def _squares(self) -> Sequence[Tensor]:
        """Sums of squares over all ranks, float64 on the host: of each parameter, of its update, and, one tensor for
        each parameter, of each momentum matrix."""
        sizes = [len(self._whole), len(self._whole), *self._matrices]
        squares = torch.zeros(sum(sizes), dtype=torch.float64, device=self._device)
        weights, updates, *momenta = squares.split(sizes)
        states = {parameter: state for muon in self._muons for parameter, state in muon.state.items()}
        for name, parameter in self._trained.items():
            weight, number, share = local(parameter), self._numbers[name], self._shares[name]
            if weight.numel() > 0:
                weights[number] = _square(weight).to(self._device) * share
                updates[number] = _square(weight - self._before[name]).to(self._device) * share
                if MOMENTUM in (state := states.get(parameter, {})):
                    self._add_momentum(momenta[number], state[MOMENTUM], share)
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return squares.cpu().split(sizes)

    def _add_momentum(self, into: Tensor, momentum: Tensor, share: float) -> None:
        own = local(momentum).detach()
        if own.numel() == 0:
            return
        if own.dim() == 3:
            rows = held_indices(momentum)[0].to(self._device)
            into.index_add_(0, rows, own.double().square().sum((1, 2)).to(self._device) * share)
        else:
            into += _square(own).to(self._device) * share


def _is_plain(planned: Parameter, parameter: Tensor) -> bool:
    matrices = len(planned.stack.matrices)
    return parameter.dim() in (2, 3) and matrices == (parameter.shape[0] if parameter.dim() == 3 else 1)


def _square(tensor: Tensor) -> Tensor:
    return tensor.detach().float().norm().double().square()


def largest_singular_value(matrix: Tensor) -> Tensor:
    """(): lower bound of the largest singular value of a (rows, cols) matrix, by power iteration, within a few %."""
    # The same start in every step, so that values can be compared.
    generator = torch.Generator(device="cpu").manual_seed(0)
    vector = torch.randn(matrix.shape[1], generator=generator).to(matrix.device)
    for _ in range(ITERATIONS):
        vector = matrix.mT @ (matrix @ vector)
        vector = vector / vector.norm().clamp(min=torch.finfo(vector.dtype).tiny)
    return (matrix @ vector).norm()


def orthogonality_error(matrix: Tensor) -> Tensor:
    """(): relative distance of a (rows, cols) matrix from a multiple of a matrix with orthonormal rows or columns.

    ||G / s - I||_F / sqrt(r), where G is the smaller Gram matrix, r its size and s the mean of its diagonal. 0: all
    singular values are equal.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    gram = wide @ wide.mT
    scale = gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return (gram / scale - identity).norm() / len(gram) ** 0.5
