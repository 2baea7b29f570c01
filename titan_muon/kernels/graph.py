"""`cuda_graph`: a step as one launch."""

# [Note: one launch]
# - The vector of a step (tables.py) has all that changes between steps: addresses of gradients, rates, momentum, seeds
#   and the flag of a skipped step. So the buckets of a step are the same operators on the same memory, and a CUDA graph
#   repeats them, collectives included. Before, one copy refreshes the vector. The report follows.
# - What changes the operators is the kind of a step: dtypes of gradients, whether the device may skip it, and what an
#   algorithm reads on the host. Each kind has a graph of its own. Steps of a kind are eager at first, so that kernels
#   are compiled and libraries have their workspaces.
# - NCCL wants a collective captured on all its ranks or on none. So a fault of one rank makes no kind: the vector has
#   a flag for a missing gradient, and unaligned gradients are copied before.
#   Excluded parameters, on which all ranks agree, make a step eager.
# - Graphs, of one pool of memory, end with the engine's buffers and process groups.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Never

import torch

from ..engine.step.algorithm import Algorithm, Group, PlanContext
from ..engine.step.feature import BuiltStep, Feature
from ..engine.step.foreach import group_numbers
from ..engine.step.gradients import StepGradients
from ..engine.step.step import MuonStep, Runner, trace_range
from ..engine.tensors.names import warn
from ..engine.tensors.process_groups import backends
from ..options import OptionError
from .fused import Kernels, foreach_reason

EAGER_STEPS = 3
"""Eager steps of a kind before its capture."""


def captured(run: Callable[[], None], other: Any | None) -> Any:
    """A CUDA graph of the kernels of `run`. `other`: a graph with which it shares memory, because they run in turn."""
    graph: Any = torch.cuda.CUDAGraph()
    # NCCL's watchdog calls CUDA in another thread.
    with torch.cuda.graph(graph, pool=other and other.pool(), capture_error_mode="thread_local"):
        run()
    return graph


class CapturedStep:
    """Runs steps, the repeated kinds as graphs. See [Note: one launch].

    `algorithms`: with their parameter groups.
    """

    def __init__(
        self, step: MuonStep, passes: Kernels, algorithms: Sequence[tuple[Algorithm, Group]], device: torch.device
    ) -> None:
        self._step = replace(step, hooks=[hook for hook in step.hooks if hook.captured])
        self._outside = [hook for hook in step.hooks if not hook.captured]
        self._passes, self._algorithms = passes, algorithms
        self._skipped = torch.zeros((), dtype=torch.bool, device=device)
        # By kind, with the collectives and bytes that a replay sends.
        self._graphs: dict[Hashable, tuple[Any, int, int]] = {}
        self._eager = Counter[Hashable]()

    def run(self, gradients: StepGradients) -> None:
        for hook in self._outside:
            hook.begin(gradients)
        self._step.mask.agree()
        if gradients.scaling is not None:
            self._skipped.copy_(gradients.scaling.skipped)
            gradients = replace(gradients, scaling=replace(gradients.scaling, skipped=self._skipped))
        self._run_kind(self._kind(gradients), gradients)
        for hook in reversed(self._outside):
            hook.end()

    def _kind(self, gradients: StepGradients) -> Hashable:
        """The kind of a step, or None with excluded parameters and without matrices."""
        if gradients.excluded or not self._step.views:
            return None
        read = tuple(algorithm.kind(group) for algorithm, group in self._algorithms)
        return gradients.scaling is not None, self._passes.dtypes, read

    def _run_kind(self, kind: Hashable, gradients: StepGradients) -> None:
        if kind is None or (kind not in self._graphs and self._eager[kind] < EAGER_STEPS):
            self._step.run(gradients)
            self._eager[kind] += 1
            return
        traffic = self._step.exchange.traffic
        if kind in self._graphs:
            graph, calls, sent = self._graphs[kind]
            traffic.calls, traffic.bytes_sent = traffic.calls + calls, traffic.bytes_sent + sent
        else:
            calls, sent = traffic.calls, traffic.bytes_sent
            with trace_range("capture"):
                other = next((graph for graph, _, _ in self._graphs.values()), None)
                graph = captured(partial(self._step.run, gradients), other)
            self._graphs[kind] = graph, traffic.calls - calls, traffic.bytes_sent - sent
        with trace_range("replay"):
            graph.replay()

    def release(self) -> None:
        """Give up the graphs, before the memory and the process groups that they use."""
        for graph, _, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._eager.clear()


NOT_CAPTURED: Mapping[str, tuple[object, str]] = {
    "offload": ("none", "copies between host and device wait for each other by events of the step before"),
    "overlap": ("none", "updates of a forward are in another launch"),
    "release_grads": (False, "a graph repeats no release of a gradient"),
}
"""Options that a captured step cannot have: the value that it takes, and why."""
WHOLE_MATRIX = ("update", "prepare", "orthogonalize", "rescale")


def captures(kind: str) -> bool:
    """Whether steps on a type of device can be captured."""
    return kind == "cuda"


def _refuse(problem: str) -> Never:
    raise OptionError("cuda_graph", f"= True {problem}")


class GraphFeature(Feature):
    """A step as one launch."""

    def check(self, context: PlanContext) -> None:
        """Raise OptionError for options and algorithms that cannot be captured, and for another device."""
        options = context.options
        for name, (needed, reason) in NOT_CAPTURED.items():
            if (value := getattr(options, name)) != needed:
                _refuse(f"does not take {name} = {value!r}, because {reason}; set {needed!r}, or cuda_graph = False")
        if not captures(context.device):
            _refuse(f"captures a step on a GPU, not on {context.device}; set False")
        if options.fused is not True:
            reason = foreach_reason(options, context.algorithm, [tensor for _, tensor in context.named])
            why = reason or "fused = False"
            _refuse(f"needs the kernels of fused, because operators get rates from the host ({why}); set False")
        if any(undeclared(type(part)) for part in context.algorithm.parts):
            _refuse(
                f"does not know what algorithm = {options.algorithm!r} reads in a step; define kind(), or set False"
            )

    def runner(self, parts: BuiltStep) -> Runner | None:
        """The step as graphs."""
        on_gpu = parts.rank.device.type == "cuda"
        if on_gpu and parts.rank.plan.buckets and backends().get("cuda") == "gloo":
            _refuse("needs NCCL, because gloo exchanges on the host; set False")
        warn("cuda_graph = True: a step is one CUDA graph, which is not measured on a GPU")
        assert isinstance(parts.passes, Kernels), "see `check`"
        groups = zip(group_numbers(parts.rank), parts.rank.params, strict=True)
        of_group = {
            g: (parts.passes.algorithm.for_parameter(n), trained.group) for n, (g, trained) in enumerate(groups)
        }
        return CapturedStep(parts.step, parts.passes, list(of_group.values()), parts.rank.device)


def undeclared(algorithm: type[Algorithm]) -> bool:
    """Whether an algorithm of another package has methods of whole matrices of its own, and no `kind`."""
    own = [kind for kind in algorithm.__mro__ if not kind.__module__.startswith("titan_muon.")]
    changes = any(name in vars(kind) for kind in own[:-1] for name in WHOLE_MATRIX)
    return changes and not any("kind" in vars(kind) for kind in own)
