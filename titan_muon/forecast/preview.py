"""`preview`: the plan of a user's model on many ranks, without processes, GPUs or weights."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..assignment.groups import named_parameters_of
from ..assignment.table import decay_lines, frozen_lines, parameter_table
from ..features.private import keeps_parameters_on_host
from ..hybrid import Hybrid
from ..muon import Muon
from ..options import Machine, OptionError, check
from ..owned import is_owned
from ..planner.machine import ERROR
from .fake_world import fake_world, root_size
from .lines import adamw_lines, memory_lines, optimizer_lines, step_lines
from .model import Estimate, PlannedModel, estimate_of, plan_of


@dataclass(frozen=True)
class Preview:
    """Plan, modelled time and memory of a Muon step. `print` shows all of them."""

    model: PlannedModel
    estimate: Estimate

    def __str__(self) -> str:
        return self.text()

    def text(self, *, full: bool = False) -> str:
        """The report. `full`: a line for each parameter and each owner."""
        model, estimate, optimizers = self.model, self.estimate, self.model.optimizers
        muon = optimizers.muon
        # Without the splits of known layouts, which have a line of their own.
        known = {a.split for a in model.assigned}
        splits = [split for split in (() if muon is None else muon.options.split) if split not in known]
        lines = [
            parameter_table(model.assigned, model.parameters, model.plan, full=full),
            "",
            *optimizer_lines(optimizers.whole, splits, model.world_size),
            *decay_lines(optimizers.groups),
            *frozen_lines(optimizers.frozen),
            f"planned for {estimate.machine.name}; times are modelled, and measured steps took {ERROR[0]:g} to "
            f"{ERROR[1]:g} times as long",
        ]
        if model.world_size > 1 and not any(isinstance(p, DTensor) for p in model.parameters.values()):
            lines.append("every rank holds the whole model, as under DDP; fully_shard in parallelize would shard it")
        lines += ["", *step_lines(model, estimate), *adamw_lines(estimate), *memory_lines(estimate, full=full)]
        return "\n".join(lines)


def preview(
    build: Callable[[], nn.Module],
    parallelize: Callable[[nn.Module], nn.Module | None] | None = None,
    world_size: int = 8,
    machine: str | Machine | None = None,
    *,
    optimizer: Callable[[nn.Module], Hybrid] = Hybrid,
    device: str = "cuda",
) -> Preview:
    """The plan of a training script on `world_size` ranks: owners, bytes, modelled times, memory, and refusals.

    Runs in a process without torch.distributed, and allocates nothing. `parallelize` runs as on rank 0 of a job, with
    the other ranks absent.

    Args:
        build: returns the model, with the meta device as PyTorch's default.
        parallelize: shards the model by `fully_shard`, `parallelize_module` and `own`, and returns the model, or None
            after a change in place. Device meshes may be of absent GPUs. By default every rank has the whole model, as
            under DDP. For a pipeline: one stage, on the ranks of a stage.
        machine: name or numbers of the machine, by default those of Muon's option `machine`.
        optimizer: takes the parallelized model, and returns the Hybrid of the script.
        device: type of the devices to plan for.

    Raises:
        ValueError: for a model outside of the meta device; for an error in `build` or `parallelize`, with its
            function; for a mesh of other ranks; in a process with a process group; and as `Hybrid` and `Hybrid.build`.
    """
    rates = Machine(name=machine) if isinstance(machine, str) else machine  # type: ignore[arg-type]
    if rates is not None:
        check(Machine, vars(rates), "machine.")
    if world_size < 1:
        raise ValueError(f"world_size = {world_size} is not accepted; it takes 1 or more")
    with fake_world(world_size), _meshes_of_absent_devices():
        with torch.device("meta"):
            model = _called("build", build)
        _check_meta(model)
        model = model if parallelize is None else _called("parallelize", parallelize, model) or model
        _check_meshes(model, world_size)
        with warnings.catch_warnings(action="ignore"):
            # The report has these sentences.
            hybrid = optimizer(model)
        if not isinstance(hybrid, Hybrid):
            raise ValueError(f"optimizer: returned {type(hybrid).__name__}; return titan_muon.Hybrid(model, ...)")
        muon = hybrid.parts.muon
        _check_offload(model, muon)
        plan = plan_of(muon, device, rates)
        if plan is None and any(a.by_default for a in hybrid.assignments):
            raise OptionError("rules:", "Muon takes no parameter of this model; add a rule with optimizer = 'muon'")
        planned = PlannedModel(world_size, range(world_size), device, named_parameters_of([model]), hybrid.parts, plan)
        if rates is None:
            rates = Machine() if muon is None else muon.options.machine
        return Preview(planned, estimate_of(planned, rates))


def _meshes_of_absent_devices() -> AbstractContextManager[object]:
    """Context: meshes of absent devices are meshes of the CPU."""
    original: Any = DeviceMesh.__init__

    def on_present_device(mesh: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        present = torch.get_device_module(device_type).is_available()
        original(mesh, device_type if present else "cpu", *args, **kwargs)

    return patch.object(DeviceMesh, "__init__", on_present_device)


def _called(argument: str, function: Callable[..., Any], *args: nn.Module) -> Any:
    """The result of a user's function. Raises ValueError for any error, with the function and the line."""
    try:
        return function(*args)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        where = f"{own[-1].name} (line {own[-1].lineno} of {own[-1].filename})" if own else repr(function)
        raise ValueError(f"{argument}: {where} raised {type(error).__name__}: {error}") from error


def _check_meta(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"build: returned {type(model).__name__}; return the model, a torch.nn.Module")
    for fqn, parameter in named_parameters_of([model]).items():
        if parameter.device.type != "meta":
            raise ValueError(
                f"build: {fqn} is on {parameter.device}, and a preview needs the meta device; make the model inside of "
                "build, without .to(), .cuda() and weights from a file (Transformers: "
                "AutoModelForCausalLM.from_config(config))"
            )


def _check_meshes(model: nn.Module, world_size: int) -> None:
    for fqn, parameter in named_parameters_of([model]).items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) and not is_owned(parameter) else None
        if mesh is not None and (size := root_size(mesh)) != world_size:
            raise ValueError(
                f"parallelize: {fqn} is on a mesh of {size} ranks, and world_size = {world_size}; make the mesh "
                f"from dist.get_world_size(), or pass world_size = {size}"
            )


def _check_offload(model: nn.Module, muon: Muon | None) -> None:
    """Raise ValueError for parameters on the host, because meta tensors hide the host from the optimizers."""
    on_host = any(keeps_parameters_on_host(part) for part in model.modules() if isinstance(part, FSDPModule))
    if on_host and muon is not None and muon.options.offload != "parameters":
        raise ValueError(
            "parallelize: CPUOffloadPolicy keeps parameters on the host, which a model on the meta device does not "
            "show; pass optimizer=lambda model: Hybrid(model, muon={'offload': 'parameters'}, "
            "adamw={'offload': 'parameters'})"
        )
