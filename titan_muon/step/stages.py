"""The stages of a step on this rank's tensors."""

# [Note: stages of a step]
# advance        holders advance the momentum of every stored shard and pack the shards into the send buffer.
# gather         holders start to send the shards to the owners.
# orthogonalize  owners wait, assemble their matrices, run Newton-Schulz and split the results.
# send_back      owners start to send the results to the holders.
# apply          holders wait, decay their weights and add the update.
# A local bucket has whole matrices on one rank, and the same stages without communication.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.buffers import BucketBuffers, Buffers, StepMemory
from ..comm.exchange import Exchange
from ..comm.faults import Fault
from ..comm.report import FaultReport
from ..options import MuonOptions
from ..orthogonalize import Iteration, Method, largest_value, zero_nonfinite_
from ..plan.cost.batches import batches
from ..plan.program import Program
from ..plan.terms.layout import Span, spans
from ..plan.terms.types import Plan
from ..tensors.dtensor import on_device
from ..tensors.storage import TrainedParam, storage_of
from .batch import Batch, MaskedBatch, assembling, splitting
from .foreach import (
    Advance,
    Apply,
    Copies,
    StoredPiece,
    advances,
    applies,
    scratch_bytes,
    without_parameters,
)
from .gradients import Step
from .rounding import Draws
from .rule import Rule
from .update import Tensors

FINITE = torch.finfo(torch.float32).max
MARGIN = 1.5
"""Factor on the largest norm of an update, for rounding in bfloat16."""

Stage = Callable[[int, Step], None]
"""A stage of the bucket with this index in the program."""


class Stages(NamedTuple):
    """See [Note: stages of a step]."""

    advance: Stage
    gather: Stage
    orthogonalize: Stage
    send_back: Stage
    apply: Stage


@dataclass(frozen=True)
class BatchRun:
    """A batch, with the copies before and after."""

    assemble: Copies
    batch: Batch
    split: Copies


@dataclass(frozen=True)
class UpdateBounds:
    """The largest Frobenius norms of arriving updates, (count,) float32.

    `views` are parts of `memory`. `parameters`: (count,), on the device.
    """

    memory: Tensor
    views: tuple[Tensor, ...]
    parameters: Tensor
    norms: Tensor


@dataclass(frozen=True)
class BucketRun:
    """The calls of one bucket.

    Attributes:
        repeats: copies of packed shards for further ranks.
        cleared: buffer to zero before splitting results, or None.
        releases: parameters to release after packing.
    """

    advances: tuple[Advance, ...]
    repeats: Copies
    batches: tuple[BatchRun, ...]
    applies: tuple[Apply, ...]
    cleared: Tensor | None
    releases: tuple[int, ...]
    bounds: UpdateBounds


class Calls(NamedTuple):
    """How to run a call. A feature wraps or replaces a call. `pack` leaves the averages."""

    advance: Callable[[Advance, Tensors, Tensors, Rule], None]
    pack: Callable[[Advance, Tensors, Tensors, Rule], None]
    update: Callable[[Apply, Tensors, Rule], None]


@dataclass(frozen=True)
class Arithmetic:
    """Iterations by parameter, and methods by work."""

    iterations: tuple[Iteration, ...]
    methods: tuple[Method, ...]


class RankStages:
    """The stages of a Muon step on this rank, with views of every tensor except gradients.

    Attributes:
        params: in the plan's order.
        states: states of the rule, by matrix and name, to which a feature of the rule may add.
        runs: by bucket.
        orthogonalized: number of matrices in the current step.
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
        self.states = dict(states)
        self.calls, self.orthogonalized = Calls(Advance.run, Advance.pack, self._update), 0
        self.arithmetic = arithmetic
        self.storage = tuple(map(storage_of, params, plan.parameters))
        self._groups = tuple(trained.group for trained in params)
        size = scratch_bytes(self.storage, buffers.device.type)
        self._scratch = torch.empty(size, dtype=torch.uint8, device=buffers.device)
        by_bucket = [batches(run.matrices, plan.matrices, plan.works) for run in program.buckets]
        largest = max((self._numel(matrices) for run in by_bucket for matrices in run), default=0)
        workspace = torch.empty(largest, dtype=buffers.dtype, device=buffers.device)
        releases = self._last_packed() if options.release_grads else [()] * len(program.buckets)
        with buffers.memory.held():
            self.runs = tuple(
                self._bucket_run(index, [self._batch(matrices, workspace) for matrices in run], releases[index])
                for index, run in enumerate(by_bucket)
            )
        self._workspace = StepMemory((workspace,), kept=options.keep_buffers)
        self._scratch.untyped_storage().resize_(0)
        self.stages = Stages(self.advance, self.gather, self.orthogonalize, self.send_back, self.apply)

    def rebuilt(
        self,
        params: Sequence[TrainedParam],
        options: MuonOptions,
        states: Mapping[int, Mapping[str, Tensor]] | None,
    ) -> RankStages:
        kept = (self.buffers, self.exchange, self.report)
        states = self.states if states is None else states
        return RankStages(self.plan, self.program, params, self.arithmetic, self._plain_rule, *kept, options, states)

    @property
    def device(self) -> torch.device:
        return self.buffers.device

    @property
    def step_bytes(self) -> int:
        return 0 if self.options.keep_buffers else self.buffers.memory.nbytes + self._workspace.nbytes

    @property
    def batches(self) -> tuple[Batch, ...]:
        return tuple(batch_run.batch for run in self.runs for batch_run in run.batches)

    def mask(self, flags: Tensor, places: Sequence[int]) -> None:
        """Zero flagged matrices before they are orthogonalized. `places`: by matrix of the plan, the flag's index."""

        def masked(batch: Batch) -> MaskedBatch:
            numbers = self.on_device(torch.tensor([places[matrix] for matrix in batch.matrices], device="cpu"))
            fields = (batch.matrices, batch.whole, batch.parameters, batch.iteration, batch.method)
            return MaskedBatch(*fields, batch, numbers, flags)

        self.runs = tuple(
            replace(run, batches=tuple(replace(batch_run, batch=masked(batch_run.batch)) for batch_run in run.batches))
            for run in self.runs
        )

    def parameters_of(self, bucket: int) -> frozenset[int]:
        return frozenset(self.plan.matrices[p.matrix].parameter for p in self.program.buckets[bucket].stored)

    def _numel(self, matrices: Sequence[int]) -> int:
        return len(matrices) * self.plan.matrices[matrices[0]].numel

    def _batch(self, matrices: tuple[int, ...], workspace: Tensor) -> Batch:
        first = self.plan.matrices[matrices[0]]
        whole = workspace[: self._numel(matrices)].view(len(matrices), first.rows, first.cols)
        parameters = torch.tensor([self.plan.matrices[m].parameter for m in matrices], device="cpu")
        method = self.arithmetic.methods[first.work]
        return Batch(matrices, whole, self.on_device(parameters), self.arithmetic.iterations[first.parameter], method)

    def _bucket_run(self, bucket: int, batches: Sequence[Batch], releases: tuple[int, ...]) -> BucketRun:
        buffers = self.buffers.buckets[bucket]
        if buffers is None:
            # Local matrices are packed straight into the workspace.
            (batch,) = batches
            stored = self.program.buckets[bucket].stored
            pieces = [self._piece(p.matrix, spans(p.piece), view) for p, view in zip(stored, batch.whole, strict=True)]
            stored_views = [(p.matrix, view) for p, view in zip(stored, batch.whole, strict=True)]
            no_copies = Copies((), ())
            advanced, applied = self._calls(pieces, pieces)
            runs = (BatchRun(no_copies, batch, no_copies),)
            return BucketRun(
                advanced, no_copies, runs, applied, None, releases, self._bounds(batch.whole, stored_views)
            )
        return self._travelling_run(buffers, batches, releases)

    def _travelling_run(self, buffers: BucketBuffers, batches: Sequence[Batch], releases: tuple[int, ...]) -> BucketRun:
        stored = [(self._piece(piece.matrix, piece.spans, piece.view), piece.matrix) for piece in buffers.stored]
        packed = [
            piece._replace(view=view)
            for piece, matrix in stored
            # Replicas that do not send still advance their momentum, unless state = "owner".
            if (view := buffers.packed.get(matrix)) is not None or not self.plan.parameters[piece.parameter].state_ranks
        ]
        runs = tuple(BatchRun(assembling(batch, buffers), batch, splitting(batch, buffers)) for batch in batches)
        advanced, applied = self._calls(packed, [piece for piece, _ in stored])
        bounds = self._bounds(buffers.arrived, [(piece.matrix, piece.view) for piece in buffers.stored])
        return BucketRun(advanced, Copies.of(buffers.repeated), runs, applied, buffers.cleared, releases, bounds)

    def _bounds(self, memory: Tensor, pieces: Sequence[tuple[int, Tensor]]) -> UpdateBounds:
        norms, parameters = [], []
        for number, view in pieces:
            matrix = self.plan.matrices[number]
            # A part has at most the singular values of the whole matrix.
            rank = min(view.shape) if self.rule.limits == "spectrum" else min(matrix.whole_shape)
            largest = MARGIN * largest_value(self.arithmetic.iterations[matrix.parameter].steps) * math.sqrt(rank)
            norms.append(min(largest, FINITE) if self.rule.limits != "nothing" else FINITE)
            parameters.append(matrix.parameter)
        numbers = torch.tensor(parameters, dtype=torch.int64, device="cpu")
        limits = torch.tensor(norms, dtype=torch.float32, device="cpu")
        return UpdateBounds(memory, tuple(view for _, view in pieces), self.on_device(numbers), self.on_device(limits))

    def on_device(self, tensor: Tensor) -> Tensor:
        return on_device(tensor, self.device)

    def _piece(self, number: int, places: tuple[Span, ...], view: Tensor) -> StoredPiece:
        matrix = self.plan.matrices[number]
        draws = Draws.of(self.plan.parameters[matrix.parameter].fqn, matrix.index, matrix.cols)
        return StoredPiece(number, matrix.parameter, self.plan.out_in(number), places, view, draws)

    def _calls(
        self, packed: Sequence[StoredPiece], returned: Sequence[StoredPiece]
    ) -> tuple[tuple[Advance, ...], tuple[Apply, ...]]:
        stochastic, device = self.options.rounding == "stochastic", self.device.type
        return (
            advances(packed, self._groups, self.storage, device),
            applies(returned, self._groups, self.storage, device, self._scratch, stochastic=stochastic),
        )

    def _last_packed(self) -> list[tuple[int, ...]]:
        last: dict[int, int] = {}
        for bucket in dict.fromkeys(bucket for _, bucket in self.program.acts):
            last.update(dict.fromkeys(sorted(self.parameters_of(bucket)), bucket))
        by_bucket: list[list[int]] = [[] for _ in self.program.buckets]
        for parameter, bucket in last.items():
            by_bucket[bucket].append(parameter)
        return [tuple(parameters) for parameters in by_bucket]

    def begin(self, step: Step) -> None:
        self.buffers.memory.take()
        self._workspace.take()
        # A failed step may have left a ScaledRule.
        self.rule = self._plain_rule
        self.report.add_gradients(step.grads)
        self.orthogonalized = 0

    def free(self) -> None:
        """Free the buffers until the next step, also with `keep_buffers`."""
        self.buffers.memory.free(kept=True)
        self._workspace.free(kept=True)

    def end(self) -> None:
        """End a step. Raises RuntimeError if the number of matrices differs from the plan."""
        self._workspace.free()
        planned = sum(len(run.matrices) for run in self.program.buckets)
        if self.orthogonalized != planned:
            raise RuntimeError(f"{self.orthogonalized} matrices orthogonalized and {planned} planned on this rank")

    def advance(self, bucket: int, step: Step) -> None:
        run = self.runs[bucket]
        self.advance_parts(run.advances, step)
        run.repeats.run()
        self.release(bucket, step)

    def gather(self, bucket: int, step: Step) -> None:
        self.exchange.gather(bucket)

    def orthogonalize(self, bucket: int, step: Step) -> None:
        self.exchange.wait(bucket)
        run = self.runs[bucket]
        if run.cleared is not None:
            run.cleared.zero_()
        for batch_run in run.batches:
            batch_run.assemble.run()
            self._newton_schulz(batch_run.batch, step)
            batch_run.split.run()

    def send_back(self, bucket: int, step: Step) -> None:
        self.exchange.return_results(bucket)

    def apply(self, bucket: int, step: Step) -> None:
        self.receive(bucket)
        for call in without_parameters(self.runs[bucket].applies, step.excluded):
            self.calls.update(call, call.params, self.rule)

    def receive(self, bucket: int, *, late: bool = False) -> None:
        """Wait for the updates of a bucket, and report updates that no orthogonalization can have made."""
        self.exchange.wait(bucket)
        bounds = self.runs[bucket].bounds
        if bounds.views:
            norms = torch.stack(torch._foreach_norm(bounds.views, 2))
            # The comparison is false for NaN.
            broken = (norms <= bounds.norms).logical_not_()
            self.report.add_too_large(bounds.parameters, broken, late=late)
            any_broken = broken.any()
            # Reading a flag on the CPU does not wait.
            if any_broken.device.type != "cpu" or any_broken:
                # The next step raises on all ranks. A mask for each view would take a launch for each.
                bounds.memory.masked_fill_(any_broken, 0)

    def advance_parts(self, calls: Iterable[Advance], step: Step) -> None:
        for call in calls:
            for advance in self.with_gradients(call, step):
                self.calls.advance(advance, advance.averages, advance.grads(step), self.rule)

    def with_gradients(self, advance: Advance, step: Step) -> Iterable[Advance]:
        """Calls by gradient dtype. Fills parts without a gradient with NaN."""
        if step.uniform:
            return (advance,)
        by_dtype = advance.split(lambda part: step.dtype(part.parameter))
        for view in by_dtype.pop(None).packed if None in by_dtype else ():
            # The owner then finds a non-finite matrix and makes a zero update.
            view.fill_(math.nan)
        return by_dtype.values()

    def _update(self, call: Apply, params: Tensors, rule: Rule) -> None:
        memory = self._scratch.untyped_storage()
        memory.resize_(call.scratch_bytes)
        try:
            call.run(params, rule)
        finally:
            memory.resize_(0)

    def _newton_schulz(self, batch: Batch, step: Step) -> None:
        self.orthogonalized += len(batch.matrices)
        if step.excluded:
            for place, matrix in enumerate(batch.matrices):
                if self.plan.matrices[matrix].parameter in step.excluded:
                    # Nothing was packed, and the workspace has old values.
                    batch.whole[place].zero_()
        norms = batch.norms()
        self.report.add_where(batch.parameters, zero_nonfinite_(batch.whole, norms), Fault.NOT_FINITE)
        batch.orthogonalize(norms)
        if self.rule.states:
            self._finish(batch)

    def _finish(self, batch: Batch) -> None:
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
            states = [self.states[matrix] for matrix in batch.matrices[start:stop]]
            stacked = {spec.name: _stacked([state[spec.name] for state in states]) for spec in self.rule.states}
            whole = batch.whole[start:stop]
            self.rule.finish(whole, stacked, self._groups[first], transposed=transposed[start])
            for name, advanced in stacked.items() if len(states) > 1 else ():
                torch._foreach_copy_([state[name] for state in states], list(advanced.unbind()))
            start = stop

    def release(self, bucket: int, step: Step) -> None:
        for index in self.runs[bucket].releases:
            if step.grads[index] is not None:
                step.grads[index] = None
                self.params[index].param.grad = None

    def heal(self, faults: Sequence[Fault]) -> None:
        """Zero non-finite momentum of faulty parameters, because later updates would stay zero."""
        for fault, storage in zip(faults, self.storage, strict=True):
            if fault in (Fault.NOT_FINITE, Fault.NO_GRADIENT):
                storage.average.nan_to_num_(0.0, 0.0, 0.0)


def _stacked(states: Sequence[Tensor]) -> Tensor:
    """A view of a single state, which may be as large as a matrix."""
    return torch.stack(list(states)) if len(states) > 1 else states[0][None]
