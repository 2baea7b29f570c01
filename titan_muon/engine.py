"""The engine: runs one rank's program, the acts of a step in the plan's order, with the features that wrap stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .comm.agreement import Agreement, PlanReport, digest_of
from .comm.buffers import Buffers
from .comm.collectives import Collectives
from .comm.exchange import Exchange
from .comm.faults import Fault, FaultReport, fault_of
from .features import features_of, needs_exclusive_groups
from .options import HYPERPARAMETERS, MuonOptions
from .orthogonalize import DTYPES
from .plan.program import collective_ranks, make_program, replicated_plain
from .plan.terms.groups import components
from .plan.terms.layout import Geometries
from .plan.terms.schedule import Act
from .plan.terms.slices import teams_in
from .plan.terms.types import Plan
from .planning import arithmetic_of, device_of
from .rules import rule_of
from .state.groups import iteration_changed
from .state.rule_states import MatrixStates
from .step.feature import Feature
from .step.gradients import Step
from .step.ranges import trace_range, with_ranges
from .step.stages import RankStages
from .tensors.dtensor import mesh_axes
from .tensors.storage import TrainedParam

EQUAL_OPTIONS = (
    "rule",
    "beta2",
    "cautious",
    "exchange",
    "owners",
    "replicas",
    "split_over",
    "tensor_parallel",
    "wire_dtype",
    "state",
    "state_dtype",
    "rounding",
    "missing_grad",
    "nonfinite",
    "overlap",
)
"""Options of MuonOptions that ranks compare. The others may differ, as `machine.file` does between nodes."""


class Engine:
    """Runs one rank's program. Rebuilt as a whole when storage moves.

    Args:
        rank: stages of this rank.
        features: features that wrap the stages, each those before it.

    Attributes:
        stages: the stages with all features.
    """

    def __init__(self, rank: RankStages, features: Sequence[Feature]) -> None:
        # Ranges are innermost, so that a trace shows when a feature runs a stage.
        self.rank, self.features, self.stages = rank, tuple(features), with_ranges(rank.stages)
        self._names = frozenset(trained.fqn for trained in rank.params)
        for feature in self.features:
            self.stages = feature.wrap(self.stages, rank)

    def run(self, step: Step, *extra: Feature) -> None:
        """Run every stage of a step. `extra` are features of this step alone, which wrap no stage."""
        rank, stages, features = self.rank, self.stages, (*self.features, *extra)
        stages_of = {
            Act.GATHER: (stages.advance, stages.gather),
            Act.ORTHOGONALIZE: (stages.orthogonalize, stages.send_back),
            Act.APPLY: (stages.apply,),
        }
        rank.begin(step)
        for feature in features:
            feature.before(step)
        for act, bucket in rank.program.acts:
            for stage in stages_of[act]:
                stage(bucket, step)
        for feature in features:
            feature.after()
        with trace_range("tell"):
            # Read by the check of the next step.
            rank.report.send()
        rank.end()
        if not any(feature.holds_buffers for feature in features):
            rank.buffers.memory.free()

    def flush(self, *, discard: bool = False) -> None:
        """Finish what the last step has left, see `Feature.flush`."""
        for feature in self.features:
            feature.flush(discard=discard)

    def faults(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> tuple[list[Fault], bool]:
        """The fault of each parameter on this rank before a step, and whether a parameter or its momentum has moved.

        Args:
            groups: the optimizer's parameter groups.
            state: the optimizer's state.
        """
        with trace_range("check"):
            return self._faults(groups, state)

    def _faults(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> tuple[list[Fault], bool]:
        rank = self.rank
        given = {name: p for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}
        faults: list[Fault] = []
        group, changed, moved = None, False, False
        for trained, storage, iteration in zip(rank.params, rank.storage, rank.arithmetic.iterations, strict=True):
            # The parameters of a group follow each other, so one look at the group serves them all.
            if trained.group is not group:
                group, changed = trained.group, iteration_changed(trained.group, iteration)
            average = state.get(trained.param, {}).get("momentum_buffer")
            in_place = storage.is_of(trained)
            fault = fault_of(trained, given.get(trained.fqn), average, in_place=in_place)
            faults.append(Fault.NEWTON_SCHULZ_CHANGED if changed else fault)
            moved = moved or not in_place or average is not trained.average
        if faults and self.thawed(groups):
            # A thawed parameter has no place in the report: the first planned parameter stands for it.
            faults[0] = Fault.THAWED
        for feature in self.features:
            faults = list(feature.faults(faults))
        return faults, moved

    def thawed(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Names of parameters that need a gradient and are not in the plan, since they were frozen when it was made."""
        return [
            name
            for group in groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if parameter.requires_grad and name not in self._names
        ]

    def plans(self, params: Sequence[TrainedParam]) -> bool:
        """Whether the plan is one for these parameters: the same tensors, with the same Newton-Schulz iterations."""
        # What is trained changes too: parameters are frozen and thawed between checkpoints.
        if [each.fqn for each in params] != [each.fqn for each in self.rank.params]:
            return False
        pairs = zip(params, self.rank.params, self.rank.arithmetic.iterations, strict=True)
        return all(new.param is old.param and not iteration_changed(new.group, i) for new, old, i in pairs)

    def rebuilt(
        self,
        params: Sequence[TrainedParam],
        options: MuonOptions,
        agreement: Agreement,
        states: MatrixStates | None = None,
    ) -> Engine:
        """The same plan and buffers for parameters whose storage, momentum or hyperparameters were replaced.

        `states` are the states of the rule, if they were replaced too.
        """
        rank = self.rank.rebuilt(params, options, states)
        same = options.offload == self.rank.options.offload
        return Engine(rank, self.features if same else tuple(features_of(options, rank, agreement, self.features)))


def engine_of(
    plan: Plan,
    geometries: Geometries,
    params: Sequence[TrainedParam],
    options: MuonOptions,
    collectives: Collectives,
    agreement: Agreement,
    states: MatrixStates,
    previous: Sequence[Feature] = (),
) -> Engine:
    """The engine of a plan on this rank. The ranks have agreed, so that all process groups exist.

    Args:
        plan: plan of the step.
        geometries: pieces of the plan's parameters.
        params: trained parameters with their momentum, in the plan's order.
        options: options of Muon.
        collectives: transport of the buffers.
        agreement: owner of the process groups.
        states: states of the rule, by matrix.
        previous: features of the engine that this one replaces.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    program = make_program(plan, rank, geometries)
    buffers = Buffers(program, device_of(params), DTYPES[options.wire_dtype])
    exchange = Exchange(program, buffers, collectives, agreement, exclusive=needs_exclusive_groups(options))
    report = FaultReport(len(params), buffers.device, agreement, replicated_plain(plan))
    arithmetic = arithmetic_of(params, plan, options)
    stages = RankStages(plan, program, params, arithmetic, rule_of(options), buffers, exchange, report, options, states)
    return Engine(stages, tuple(features_of(options, stages, agreement, previous)))


def report_of(
    plan: Plan,
    geometries: Geometries,
    params: Sequence[TrainedParam],
    options: MuonOptions,
    groups: Sequence[Mapping[str, Any]],
) -> PlanReport:
    """The part of a plan that ranks must agree on before the first step, and the process groups that it needs."""
    # A learning rate in a tensor prints its device, which differs between ranks.
    hyperparameters = [
        {key: group[key].item() if isinstance(group[key], Tensor) else group[key] for key in HYPERPARAMETERS}
        for group in groups
    ]
    parts = {
        "parameters": [(p.fqn, p.layout.shape, p.layout.placements, p.layout.mesh.ranks) for p in plan.parameters],
        "hyperparameters": hyperparameters,
        "options": {name: getattr(options, name) for name in EQUAL_OPTIONS},
        "plan": plan.digest(),
    }
    teams = {team for bucket in plan.buckets for team in teams_in(bucket, plan.matrices).values()}
    travelling, lines = collective_ranks(plan, geometries)
    exclusive = travelling if needs_exclusive_groups(options) else set()
    buckets = tuple(sorted({*(travelling - exclusive), *teams, *lines}))
    sharing = tuple(sorted(set(components(_sharing(plan, skips=options.missing_grad == "skip")).values())))
    # Groups of mesh axes exist already. By rule, not by looking: all ranks of the world must make the same groups, also
    # the ranks outside of a mesh.
    world = tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
    existing = {world, *(axis for trained in params for axis in mesh_axes(trained.param))}
    return PlanReport(
        ranks=tuple(sorted({rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks})),
        buckets=buckets,
        groups=tuple(sorted({*buckets, *sharing} - existing)),
        exclusive=tuple(sorted(exclusive)),
        sharing=sharing,
        parts=tuple((name, digest_of(part)) for name, part in parts.items()),
    )


def _sharing(plan: Plan, *, skips: bool) -> Iterator[tuple[int, ...]]:
    """The sets of ranks that must agree in each step on which gradients there are."""
    yield from (bucket.group for bucket in plan.buckets)
    # Replicas of a plain tensor may get a gradient on some ranks alone, and a step that may skip must skip on all of
    # them. Replicas of a DTensor get theirs from one collective, all or none, so such a step needs no word.
    for index, ranks in enumerate(plan.local):
        if len(ranks) > 1 and (skips or plan.parameters[plan.matrices[index].parameter].plain):
            yield ranks
