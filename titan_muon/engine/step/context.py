"""What this rank has of a plan, for a step and its features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...options import MuonOptions
from ..exchange.agreement import Agreement
from ..exchange.exchange import Buffers, Exchange
from ..faults.report import FaultReport
from ..layout.types import Plan
from ..orthogonalize import Dispatch, Iteration, Method
from ..program.program import Program
from ..tensors.dtensor import on_device
from ..tensors.storage import Storage, TrainedParam


@dataclass(frozen=True)
class StepContext:
    """The parts that a step and its features are made from.

    Attributes:
        params, storage, iterations: by parameter of the plan.
        methods: by work of the plan.
    """

    plan: Plan
    program: Program
    params: tuple[TrainedParam, ...]
    storage: tuple[Storage, ...]
    iterations: tuple[Iteration, ...]
    methods: tuple[Method, ...]
    buffers: Buffers
    exchange: Exchange
    report: FaultReport
    agreement: Agreement
    options: MuonOptions
    device: torch.device

    def on_device(self, tensor: Tensor) -> Tensor:
        return on_device(tensor, self.device)

    def rounds(self, parameter: int) -> bool:
        """Whether updates round the parameter stochastically."""
        return self.options.rounding == "stochastic" and self.storage[parameter].param.dtype == torch.bfloat16

    def numbers(self, numbers: list[int]) -> Tensor:
        """(count,) int64 on the device."""
        return self.on_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"))

    def parameters_of(self, bucket: int) -> frozenset[int]:
        """The parameters with a piece on this rank in a bucket."""
        return frozenset(self.plan.matrices[p.matrix].parameter for p in self.program.buckets[bucket].stored)


def methods_of(plan: Plan, iterations: Sequence[Iteration], dispatch: Dispatch) -> Iterator[Method]:
    """The Newton-Schulz method of each work. `iterations`: by parameter."""
    first = {matrix.work: matrix for matrix in reversed(plan.matrices)}
    for matrix in (first[work] for work in range(len(plan.works))):
        yield dispatch.choose(matrix.rows, matrix.cols, iterations[matrix.parameter].steps)
