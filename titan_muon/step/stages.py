"""The stages of a step on this rank's tensors, for any plan, without features."""

# [Note: stages of a step]
# advance        the momentum of every stored shard advances, and the shards are packed into the send buffer.
# gather         the shards start to travel to the owners of their matrices.
# orthogonalize  the owner waits, assembles its matrices, runs Newton-Schulz and splits the results.
# send_back      the results start to travel to every rank that stores a shard.
# apply          every rank waits, decays its weights and adds the update.
# The matrices of a local bucket are whole on one rank. The bucket has the same stages, and nothing travels.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.buffers import BucketBuffers, Buffers, StepMemory
from ..comm.exchange import Exchange
from ..comm.faults import Fault, FaultReport
from ..options import MuonOptions
from ..orthogonalize import Iteration, Method, zero_nonfinite_
from ..plan.cost.batches import batches
from ..plan.program import Program
from ..plan.terms.layout import Span, spans
from ..plan.terms.types import Plan
from ..tensors.storage import TrainedParam, storage_of
from .batch import Batch, assembling, parting
from .foreach import Advance, Apply, Copies, StoredPiece, advances, applies, but_for, call_bytes, scratch_bytes
from .gradients import Step
from .rounding import Draws
from .rule import Rule
from .update import Tensors

Stage = Callable[[int, Step], None]
"""One stage of the bucket with this index in the program."""


class Stages(NamedTuple):
    """The stages of a bucket, see [Note: stages of a step]."""

    advance: Stage
    gather: Stage
    orthogonalize: Stage
    send_back: Stage
    apply: Stage


@dataclass(frozen=True)
class BatchRun:
    """A batch of whole matrices, with the copies that assemble it and those that split its results."""

    assemble: Copies
    batch: Batch
    split: Copies


@dataclass(frozen=True)
class BucketRun:
    """The calls of one bucket on this rank. `repeats` copy a shard that is packed once and sent to several ranks."""

    advances: tuple[Advance, ...]
    repeats: Copies
    batches: tuple[BatchRun, ...]
    applies: tuple[Apply, ...]
    cleared: Tensor | None
    releases: tuple[int, ...]


class OnDevice:
    """The tensors of a call where the parameters are: views that were made once, and the step's gradients."""

    def averages(self, advance: Advance) -> Tensors:
        """The momentum of the parts, to be advanced in place."""
        return advance.averages

    def grads(self, advance: Advance, step: Step) -> Tensors:
        """The gradients of the parts."""
        return [part.of(step.grads[part.parameter]) for part in advance.parts]

    def params(self, apply: Apply) -> Tensors:
        """The parts of the parameters, to be updated in place."""
        return apply.params


@dataclass(frozen=True)
class Arithmetic:
    """What is computed for each matrix: by parameter its iteration, and by work of the plan its algorithm."""

    iterations: tuple[Iteration, ...]
    methods: tuple[Method, ...]


class RankStages:
    """The stages of a Muon step on this rank. Every view except those of gradients is made once, here.

    Args:
        plan: plan of the step.
        program: this rank's part of the plan.
        params: trained parameters, in the plan's order.
        arithmetic: iterations and methods of the plan's matrices.
        rule: arithmetic of the update.
        buffers: buffers of the program.
        exchange: collectives of the program.
        report: faults of the step.
        options: options of Muon.
        states: states of the rule, by matrix and name.

    Attributes:
        storage: by parameter, its storage and that of its momentum.
        runs: by bucket, its calls.
        source: where calls find momentum, gradients and weights.
        orthogonalized: number of matrices that the current step has orthogonalized on this rank.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        params: Sequence[TrainedParam],
        arithmetic: Arithmetic,
        rule: Rule,
        buffers: Buffers,
        exchange: Exchange,
        report: FaultReport,
        options: MuonOptions,
        states: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        self.plan, self.program, self.params = plan, program, tuple(params)
        self.rule = self._plain_rule = rule
        self.buffers, self.exchange, self.report, self.options = buffers, exchange, report, options
        self._states = states
        self.source, self.orthogonalized = OnDevice(), 0
        self.arithmetic = arithmetic
        self.storage = tuple(map(storage_of, params, plan.parameters))
        self._groups = tuple(trained.group for trained in params)
        self._most = call_bytes(buffers.device.type)
        self._scratch = torch.empty(scratch_bytes(self.storage, self._most), dtype=torch.uint8, device=buffers.device)
        by_bucket = [batches(run.matrices, plan.matrices, plan.works) for run in program.buckets]
        largest = max((self._numel(chosen) for run in by_bucket for chosen in run), default=0)
        # A local matrix is rounded to the dtype on the wire, or layouts would differ in their bits.
        dtype = torch.float32 if options.wire_dtype == "float32" else torch.bfloat16
        workspace = torch.empty(largest, dtype=dtype, device=buffers.device)
        releases = self._last_packed() if options.release_grads else [()] * len(program.buckets)
        with buffers.memory.held():
            self.runs = tuple(
                self._bucket_run(index, [self._batch(chosen, workspace) for chosen in run], releases[index])
                for index, run in enumerate(by_bucket)
            )
        self._workspace = StepMemory((workspace,))
        # Scratch has memory only during a call, because it can be as large as a parameter.
        self._scratch.untyped_storage().resize_(0)
        self.stages = Stages(self.advance, self.gather, self.orthogonalize, self.send_back, self.apply)

    def rebuilt(
        self,
        params: Sequence[TrainedParam],
        options: MuonOptions,
        states: Mapping[int, Mapping[str, Tensor]] | None,
    ) -> RankStages:
        """The stages of the same program for parameters whose storage or hyperparameters were replaced."""
        return RankStages(
            self.plan,
            self.program,
            params,
            self.arithmetic,
            self._plain_rule,
            self.buffers,
            self.exchange,
            self.report,
            options,
            self._states if states is None else states,
        )

    @property
    def device(self) -> torch.device:
        """Device on which matrices are orthogonalized."""
        return self.buffers.device

    @property
    def batches(self) -> tuple[Batch, ...]:
        """All batches of this rank."""
        return tuple(each.batch for run in self.runs for each in run.batches)

    def parameters_of(self, bucket: int) -> frozenset[int]:
        """The parameters of which this rank stores a shard in the bucket."""
        return frozenset(self.plan.matrices[p.matrix].parameter for p in self.program.buckets[bucket].stored)

    def _numel(self, chosen: Sequence[int]) -> int:
        return len(chosen) * self.plan.matrices[chosen[0]].numel

    def _batch(self, chosen: tuple[int, ...], workspace: Tensor) -> Batch:
        matrices = self.plan.matrices
        first = matrices[chosen[0]]
        whole = workspace[: self._numel(chosen)].view(len(chosen), first.rows, first.cols)
        parameters = torch.tensor([matrices[m].parameter for m in chosen], device="cpu")
        if workspace.device.type != "cpu":
            # From pinned memory, so that a step that follows moved storage does not wait for the device.
            parameters = parameters.pin_memory().to(workspace.device, non_blocking=True)
        method = self.arithmetic.methods[first.work]
        return Batch(chosen, whole, parameters, self.arithmetic.iterations[first.parameter], method)

    def _bucket_run(self, bucket: int, chosen: Sequence[Batch], releases: tuple[int, ...]) -> BucketRun:
        buffers = self.buffers.buckets[bucket]
        if buffers is None:
            # The shards of a local bucket are packed into the workspace, and updated from there: no copy.
            (batch,) = chosen
            stored = self.program.buckets[bucket].stored
            pieces = [self._piece(p.matrix, spans(p.piece), view) for p, view in zip(stored, batch.whole, strict=True)]
            nothing = Copies((), ())
            advanced, applied = self._calls(pieces, pieces)
            return BucketRun(advanced, nothing, (BatchRun(nothing, batch, nothing),), applied, None, releases)
        return self._travelling_run(buffers, chosen, releases)

    def _travelling_run(self, buffers: BucketBuffers, chosen: Sequence[Batch], releases: tuple[int, ...]) -> BucketRun:
        stored = [(self._piece(each.matrix, each.spans, each.view), each.matrix) for each in buffers.stored]
        packed = [
            piece._replace(view=view)
            for piece, matrix in stored
            # Replicas that do not send still advance their momentum, unless state = "owner".
            if (view := buffers.packed.get(matrix)) is not None or not self.plan.parameters[piece.parameter].state_ranks
        ]
        runs = tuple(BatchRun(assembling(batch, buffers), batch, parting(batch, buffers)) for batch in chosen)
        advanced, applied = self._calls(packed, [piece for piece, _ in stored])
        return BucketRun(advanced, Copies.of(buffers.repeated), runs, applied, buffers.cleared, releases)

    def _piece(self, matrix: int, places: tuple[Span, ...], view: Tensor) -> StoredPiece:
        found = self.plan.matrices[matrix]
        draws = Draws.of(self.plan.parameters[found.parameter].fqn, found.index, found.cols)
        # The shape of the whole matrix: the shape of a shard would give each rank another learning rate.
        return StoredPiece(found.parameter, self.plan.out_in(matrix), places, view, draws)

    def _calls(
        self, packed: Sequence[StoredPiece], returned: Sequence[StoredPiece]
    ) -> tuple[tuple[Advance, ...], tuple[Apply, ...]]:
        stochastic = self.options.rounding == "stochastic"
        return (
            advances(packed, self._groups, self.storage, self._most),
            applies(returned, self._groups, self.storage, self._most, self._scratch, stochastic=stochastic),
        )

    def _last_packed(self) -> list[tuple[int, ...]]:
        """By bucket, the parameters whose last shard is packed in it."""
        last: dict[int, int] = {}
        for bucket in dict.fromkeys(bucket for _, bucket in self.program.acts):
            last.update(dict.fromkeys(sorted(self.parameters_of(bucket)), bucket))
        found: list[list[int]] = [[] for _ in self.program.buckets]
        for parameter, bucket in last.items():
            found[bucket].append(parameter)
        return [tuple(parameters) for parameters in found]

    def begin(self, step: Step) -> None:
        """Take the step's memory, and note the sizes of the gradients of replicas."""
        self.buffers.memory.take()
        self._workspace.take()
        # A failed step may have left the rule of a GradScaler.
        self.rule = self._plain_rule
        self.report.add_gradients(step.grads)
        self.orthogonalized = 0

    def end(self) -> None:
        """Give the workspace back. Raises RuntimeError if fewer or more matrices were orthogonalized than planned."""
        self._workspace.free()
        planned = sum(len(run.matrices) for run in self.program.buckets)
        if self.orthogonalized != planned:
            raise RuntimeError(f"{self.orthogonalized} matrices orthogonalized and {planned} planned on this rank")

    def advance(self, bucket: int, step: Step) -> None:
        """Advance the momentum of each stored shard, and pack into the send buffer what leaves from here."""
        run = self.runs[bucket]
        self.advance_parts(run.advances, step)
        run.repeats.run()
        self.release(bucket, step)

    def gather(self, bucket: int, step: Step) -> None:
        """Start to send the shards to the owners of their matrices."""
        self.exchange.gather(bucket)

    def orthogonalize(self, bucket: int, step: Step) -> None:
        """Assemble the owned matrices, orthogonalize them in batches, and fill the buffer that goes back."""
        self.exchange.wait(bucket)
        run = self.runs[bucket]
        if run.cleared is not None:
            run.cleared.zero_()
        for each in run.batches:
            each.assemble.run()
            self._newton_schulz(each.batch, step)
            each.split.run()

    def send_back(self, bucket: int, step: Step) -> None:
        """Start to send the results to every rank that stores a shard."""
        self.exchange.return_results(bucket)

    def apply(self, bucket: int, step: Step) -> None:
        """Wait for the results, decay each stored shard and add its update."""
        self.exchange.wait(bucket)
        for run in but_for(self.runs[bucket].applies, step.excluded):
            self.update(run, self.source.params(run))

    def advance_parts(self, calls: Iterable[Advance], step: Step) -> None:
        """Advance the momentum of these parts."""
        for each in calls:
            for advance in self.with_gradients(each, step):
                averages, grads = self.source.averages(advance), self.source.grads(advance, step)
                self.rule.advance(averages, grads, advance.packed, advance.group)

    def with_gradients(self, advance: Advance, step: Step) -> Iterable[Advance]:
        """The parts that have a gradient, by its dtype. The others pack NaN."""
        if step.uniform:
            return (advance,)
        by_dtype = advance.split(lambda part: step.dtype(part.parameter))
        for view in by_dtype.pop(None).packed if None in by_dtype else ():
            # The owner, which may be another rank, then finds a matrix that is not finite, and updates nothing.
            view.fill_(math.nan)
        return by_dtype.values()

    def update(self, run: Apply, params: Tensors) -> None:
        """Decay parts of parameters and add their updates."""
        memory = self._scratch.untyped_storage()
        memory.resize_(run.scratch_bytes)
        run.update(params, self.rule)
        memory.resize_(0)

    def _newton_schulz(self, batch: Batch, step: Step) -> None:
        self.orthogonalized += len(batch.matrices)
        if step.excluded:
            for place, matrix in enumerate(batch.matrices):
                if self.plan.matrices[matrix].parameter in step.excluded:
                    # Nothing was packed: the workspace has values of another step.
                    batch.whole[place].zero_()
        norms = batch.norms()
        self.report.add_nonfinite(batch.parameters, zero_nonfinite_(batch.whole, norms))
        batch.orthogonalize(norms)
        if self.rule.states:
            self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        """Have the rule finish the batch, in runs of matrices of one parameter group."""
        parameters = [self.plan.matrices[matrix].parameter for matrix in batch.matrices]
        transposed = [self.plan.parameters[index].stack.transposed for index in parameters]
        start = 0
        for stop in range(1, len(parameters) + 1):
            first, last = parameters[start], parameters[min(stop, len(parameters) - 1)]
            if (
                stop < len(parameters)
                and self._groups[first] is self._groups[last]
                and (transposed[start] == transposed[stop])
            ):
                continue
            states = [self._states[matrix] for matrix in batch.matrices[start:stop]]
            stacked = {spec.name: torch.stack([each[spec.name] for each in states]) for spec in self.rule.states}
            whole = batch.whole[start:stop]
            self.rule.finish(whole, stacked, self._groups[first], transposed=transposed[start])
            for name, advanced in stacked.items():
                torch._foreach_copy_([each[name] for each in states], list(advanced.unbind()))
            start = stop

    def release(self, bucket: int, step: Step) -> None:
        """Drop the gradients whose last shard was packed in this bucket, by `release_grads`."""
        for index in self.runs[bucket].releases:
            if step.grads[index] is not None:
                # Both hold the gradient's memory, and either alone would keep it.
                step.grads[index] = None
                self.params[index].param.grad = None

    def heal(self, faults: Sequence[Fault]) -> None:
        """Replace non-finite momentum by zero in parameters with a missing or non-finite gradient.

        A non-finite momentum would make every later update of its matrices zero.
        """
        for fault, storage in zip(faults, self.storage, strict=True):
            if fault in (Fault.NOT_FINITE, Fault.NO_GRADIENT):
                storage.average.nan_to_num_(0.0, 0.0, 0.0)
