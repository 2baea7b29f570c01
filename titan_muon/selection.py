"""The parts that options select and Muon hands to the engine: algorithm, methods, planner and features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .algorithms import algorithm_of
from .engine.engine import Selection
from .engine.orthogonalize import Dispatch
from .engine.planning import Planner
from .options import MuonOptions

# Imports are local, so that `from titan_muon import Muon` and a step by the rule import no code of the search.


def select(
    options: MuonOptions, groups: Sequence[Mapping[str, Any]], tensors: Sequence[Tensor], device: torch.device
) -> Selection:
    """The parts for trained parameters, each with a group. Raises OptionError for an unreadable file of a machine."""
    algorithm, note = algorithm_of(options, groups), ""
    if options.fused == "auto":
        if device.type == "cuda":
            from .kernels.fused import foreach_reason

            note = foreach_reason(options, algorithm, tensors)
        options = replace(options, fused=device.type == "cuda" and not note)
    if options.cuda_graph == "auto":
        options = replace(options, cuda_graph=False)
    elif options.cuda_graph:
        # A graph repeats addresses.
        options = replace(options, keep_buffers=True)
        kept = "a step is one CUDA graph, not measured on a GPU, and its buffers and workspace stay between steps"
        note = "; ".join(filter(None, (note, kept)))
    from .features import features_of

    dispatch, planner = _dispatch_and_planner(options, device)
    return Selection(options, algorithm, dispatch, planner, features_of, note)


def _dispatch_and_planner(options: MuonOptions, device: torch.device) -> tuple[Dispatch, Planner]:
    dispatch = Dispatch(options.orthogonalize, options.ns_dtype, device.type)
    if device.type == "cuda" or options.ns_kernel not in ("auto", "plain"):
        from .kernels.measured import kernels_for

        dispatch = replace(dispatch, kernels=kernels_for(options.ns_kernel, device))
    if options.planner == "rule":
        from .engine.rule import plan_by_rule

        return dispatch, plan_by_rule
    from .planner.machine import planning_machine
    from .planner.planner import Search

    machine = planning_machine(options.machine, device.type)
    return replace(dispatch, gpu=machine.methods), Search(machine)
