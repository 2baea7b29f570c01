"""The methods of matrices, and what this rank has of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..comm.agreement import Agreement
from ..comm.buffers import Buffers
from ..comm.exchange import Exchange
from ..comm.report import FaultReport
from ..options import Machine, MuonOptions, OptionError
from ..orthogonalize import Dispatch, Iteration, Method, kernels_for, measured_choices
from ..plan.program import Program
from ..plan.terms.machine import MachineRates, machine_of
from ..plan.terms.types import Plan
from ..tensors.device import on_device
from ..tensors.storage import Storage, TrainedParam


def dispatch_of(device: torch.device, options: MuonOptions) -> Dispatch:
    """The choice of Newton-Schulz methods."""
    machine = planning_machine(options.machine, device.type)
    kernels, choices = kernels_for(options.ns_kernel, device), measured_choices(device)
    names = options.orthogonalize, options.ns_dtype, device.type
    return Dispatch(*names, kernels, machine=machine, float16=choices.float16)


def planning_machine(options: Machine, device: str) -> MachineRates:
    """The rates for a device type. Raises OptionError for an unreadable or invalid file."""
    measured = None
    if options.file is not None:
        try:
            measured = Path(options.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"= {options.file!r} cannot be read ({error}); name the machine.json that `make gpu` wrote"
            raise OptionError("machine.file", problem) from error
    return machine_of(options, device, measured)


def methods_of(plan: Plan, iterations: Sequence[Iteration], dispatch: Dispatch) -> Iterator[Method]:
    """The Newton-Schulz method of each work. `iterations`: by parameter."""
    first = {matrix.work: matrix for matrix in reversed(plan.matrices)}
    for matrix in (first[work] for work in range(len(plan.works))):
        yield dispatch.choose(matrix.rows, matrix.cols, iterations[matrix.parameter].steps)


@dataclass(frozen=True)
class Rank:
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

    @property
    def device(self) -> torch.device:
        return self.buffers.device

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
