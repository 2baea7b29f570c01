"""What a matrix costs its owner: the method by shape, on the planned machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..options import Machine, MuonOptions, OptionError
from ..orthogonalize import Dispatch, Iteration, kernels_for, measured_choices
from ..plan.terms.machine import MachineRates, Work, WorkOf, machine_of
from .algorithm import Algorithm


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


def work_of(iterations: Sequence[Iteration], dispatch: Dispatch, wire_bytes: int, algorithm: Algorithm) -> WorkOf:
    """The cost of a matrix by parameter and shape. `iterations`: by parameter."""

    def of(index: int, rows: int, cols: int, slices: int = 1, /) -> Work:
        steps, own = iterations[index].steps, algorithm.for_parameter(index)
        method = dispatch.choose(rows, cols, steps, slices)
        # So that equal digests imply equal computations.
        of_method = Work(
            method=f"{method}; {iterations[index]}",
            flops=method.flops(rows, cols, steps),
            reason=method.reason,
            batch=method.batch,
            bytes=method.work_bytes(rows, cols, dispatch.device, wire_bytes),
            dtype=method.dtype,
            team=method.team(rows, cols, steps),
            operators=method.operators(len(steps)),
            state_bytes=sum(spec.bytes for spec in own.states(rows, cols, transposed=False) if spec.saved),
        )
        work = own.work(rows, cols, of_method)
        # A batch has one method, and so one algorithm.
        names = " + ".join(own.options.algorithms)
        return work if own is algorithm else replace(work, method=f"{names}: {work.method}")

    return of
