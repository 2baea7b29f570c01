"""The engine: runs a rank's program, act by act, with features wrapped around stages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .comm.agreement import Agreement, PlanReport, digest_of
from .comm.buffers import Buffers, fragmentation
from .comm.collectives import Collectives
from .comm.exchange import Exchange
from .comm.faults import Fault, check_faults, fault_of, names_with
from .comm.report import Carried, FaultReport
from .features import features_of, needs_exclusive_groups, skips_missing
from .options import HYPERPARAMETERS, SHARED, MuonOptions
from .orthogonalize import DTYPES, Iteration
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
from .step.update import highest_rate
from .tensors.dtensor import mesh_axes
from .tensors.names import named_parameters
from .tensors.storage import TrainedParam
from .tensors.warning import warn

LOCAL_OPTIONS = (
    "orthogonalize",
    "ns_dtype",
    "ns_kernel",
    "release_grads",
    "keep_buffers",
    "split",
    "buffer_bytes",
    "machine",
    "offload",
)
"""Options that may differ between ranks, for example `machine.file` between nodes."""


def check_not_captured(device: torch.device) -> None:
    """Raise ValueError if a CUDA graph is being captured on the current stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "Muon.step cannot be captured in a CUDA graph, because the host reads the faults of the last step; capture "
            "forward and backward alone, and call step() after the replay"
        )


class Engine:
    """Runs a rank's program."""

    def __init__(self, rank: RankStages, features: Sequence[Feature]) -> None:
        # Ranges are innermost, so that a trace shows when a feature runs a stage.
        self.rank, self.features, self.stages = rank, tuple(features), with_ranges(rank.stages)
        self._names = frozenset(trained.fqn for trained in rank.params)
        for feature in self.features:
            self.stages = feature.wrap(self.stages, rank)

    def run(self, step: Step, *extra: Feature) -> None:
        """Run a step. `extra`: features of this step alone, which wrap no stages."""
        rank, stages, features = self.rank, self.stages, (*self.features, *extra)
        stages_of = {
            Act.GATHER: (stages.advance, stages.gather),
            Act.ORTHOGONALIZE: (stages.orthogonalize, stages.send_back),
            Act.APPLY: (stages.apply,),
        }
        rank.report.begin_step()
        rank.begin(step)
        for feature in features:
            feature.before(step)
        for act, bucket in rank.program.acts:
            for stage in stages_of[act]:
                stage(bucket, step)
        for feature in features:
            feature.after()
        with trace_range("tell"):
            rank.report.send()
        rank.end()
        if not any(feature.holds_buffers for feature in features):
            rank.buffers.memory.free()

    def warm_up(self) -> None:
        """Run the exchange once, without a step, where `engine_of` has allocated the buffers. Collective."""
        rank = self.rank
        if rank.device.type != "cpu":
            rank.exchange.warm_up(rank.plan)
            rank.buffers.memory.free()

    def flush(self, *, discard: bool = False) -> None:
        for feature in self.features:
            feature.flush(discard=discard)

    def faults(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> tuple[list[Fault], bool]:
        """The fault of each parameter before a step, and whether any storage has moved."""
        rank = self.rank
        check_not_captured(rank.device)
        current = dict(named_parameters(groups))
        faults: list[Fault] = []
        group, of_group, moved = None, Fault.NONE, False
        for trained, storage, iteration in zip(rank.params, rank.storage, rank.arithmetic.iterations, strict=True):
            if trained.group is not group:
                group, of_group = trained.group, self._group_fault(trained.group, iteration)
            average = state.get(trained.param, {}).get("momentum_buffer")
            in_place = storage.is_of(trained)
            fault = fault_of(trained, current.get(trained.fqn), average, in_place=in_place)
            faults.append(fault if of_group is Fault.NONE else of_group)
            moved = moved or not in_place or average is not trained.average
        if faults and self.thawed(groups):
            # A thawed parameter has no place in the report.
            faults[0] = Fault.THAWED
        for feature in self.features:
            faults = list(feature.faults(faults))
        return faults, moved

    def _group_fault(self, group: Mapping[str, Any], planned: Iteration) -> Fault:
        if iteration_changed(group, planned):
            return Fault.NEWTON_SCHULZ_CHANGED
        if self.rank.options.decay_follows_lr and highest_rate(group) is None:
            return Fault.HIGHEST_RATE_UNKNOWN
        return Fault.NONE

    def raise_pending(self, faults: Sequence[Fault] = (), *, alone: bool = False) -> None:
        """Raise ValueError for the last report and `faults`, and warn of faults that the options allow.

        Args:
            faults: of Muon's parameters, equal on all ranks as the report.
            alone: read without the other ranks, also this rank's faults since the report. The next step then raises on
                all ranks.
        """
        rank = self.rank
        rank.report.uncount_skipped()
        reported = rank.report.read()
        if alone:
            faults = rank.report.late()
        else:
            rank.report.clear()
        reported = [max(pair) for pair in zip_longest(reported, faults, fillvalue=Fault.NONE)]
        if not any(reported):
            return
        own = reported[: len(rank.params)]
        for feature in self.features:
            feature.told(own)
        rank.heal(own)
        allowed = [fault for feature in self.features for fault in feature.allowed]
        names = rank.report.names[: len(own)]
        check_faults(names, own, allowed, "" if alone else rank.report.details(reported))
        rank.report.tell_carried(reported)
        if broken := names_with(names, own, Fault.NOT_FINITE):
            warn(f"{broken}: not finite; the update of those matrices was zero in a step")

    def thawed(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Names of trained parameters that were frozen when the plan was made."""
        return [name for name, p in named_parameters(groups) if p.requires_grad and name not in self._names]

    def plans(self, params: Sequence[TrainedParam]) -> bool:
        # Names too, because parameters are frozen and thawed between checkpoints.
        if [param.fqn for param in params] != [param.fqn for param in self.rank.params]:
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
        """The same plan and buffers for new storage, momentum, hyperparameters or rule `states`."""
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
    *,
    muon: Optimizer,
    carried: Mapping[str, Carried],
) -> Engine:
    """The engine of a plan. `previous`: features of the old engine. `carried`: optimizers in Muon's report, by name."""
    program = make_program(plan, agreement.rank, geometries)
    buffers = Buffers(program, device_of(params), DTYPES[options.wire_dtype], kept=options.keep_buffers)
    exchange = Exchange(program, buffers, collectives, agreement, exclusive=needs_exclusive_groups(options))
    names = [trained.fqn for trained in params]
    report = FaultReport(names, {"muon": muon}, carried, buffers.device, agreement, replicated_plain(plan))
    arithmetic = arithmetic_of(params, plan, options)
    stages = RankStages(plan, program, params, arithmetic, rule_of(options), buffers, exchange, report, options, states)
    if warning := fragmentation(buffers.device.type, stages.step_bytes, os.environ):
        warn(warning)
    engine = Engine(stages, tuple(features_of(options, stages, agreement, previous)))
    if buffers.device.type != "cpu":
        # Here, because a rank without enough memory must fail before the others communicate.
        buffers.memory.take()
    return engine


def report_of(
    plan: Plan,
    geometries: Geometries,
    params: Sequence[TrainedParam],
    options: MuonOptions,
    groups: Sequence[Mapping[str, Any]],
    carried: Mapping[str, Carried],
    all_ranks: tuple[int, ...],
    *,
    optional: bool = False,
) -> PlanReport:
    """The part of a plan to agree on before the first step. `all_ranks`: of the process group."""
    # A learning rate in a tensor prints its device, which differs between ranks.
    hyperparameters = [
        {key: group[key].item() if isinstance(group[key], Tensor) else group[key] for key in HYPERPARAMETERS}
        for group in groups
    ]
    parts = {
        "parameters": [(p.fqn, p.layout.shape, p.layout.placements, p.layout.mesh.ranks) for p in plan.parameters],
        "hyperparameters": hyperparameters,
        "options": {name: getattr(options, name) for name in SHARED if name not in LOCAL_OPTIONS},
        "others": [(name, other.names(), len(other.param_groups)) for name, other in carried.items()],
        "plan": plan.digest(),
    }
    teams = {team for bucket in plan.buckets for team in teams_in(bucket, plan.matrices).values()}
    travelling, replica_groups = collective_ranks(plan, geometries)
    exclusive = travelling if needs_exclusive_groups(options) else set()
    buckets = tuple(sorted({*(travelling - exclusive), *teams, *replica_groups}))
    sharing = tuple(sorted(set(components(_sharing(plan, every=skips_missing(options))).values())))
    # From layouts, because all ranks, also outside a mesh, must create equal groups.
    existing = {all_ranks}
    for trained, parameter in zip(params, plan.parameters, strict=True):
        existing.update(mesh_axes(trained.param, parameter.layout))
    return PlanReport(
        ranks=tuple(sorted({rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks})),
        buckets=buckets,
        groups=tuple(sorted({*buckets, *sharing} - existing)),
        exclusive=tuple(sorted(exclusive)),
        sharing=sharing,
        parts=tuple((name, digest_of(part)) for name, part in parts.items()),
        optional=optional,
    )


def _sharing(plan: Plan, *, every: bool) -> Iterator[tuple[int, ...]]:
    """Sets of ranks that decide together about missing gradients."""
    yield from (bucket.group for bucket in plan.buckets)
    # Replicas of a plain tensor may get a gradient only on some ranks. Replicas of a DTensor get all or none.
    for index, ranks in enumerate(plan.local):
        if len(ranks) > 1 and (every or plan.parameters[plan.matrices[index].parameter].plain):
            yield ranks
