"""The stages of a step on this rank's tensors, for any plan. It decides nothing: `Muon.step` calls it turn by turn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..comm.exchange import BucketBuffers, Exchange
from ..comm.faults import Fault, FaultReport
from ..comm.step_memory import StepMemory
from ..options import Offload
from ..orthogonalize import Iteration, Method, Slice, zero_nonfinite_
from ..plan.cost.batches import batches
from ..plan.program import Program
from ..plan.terms.layout import Geometries, Span, spans
from ..plan.terms.types import Plan
from ..state.host import Window
from ..tensors.storage import TrainedParam, storage_of
from . import update
from .batch import Batch, assembling, parting
from .foreach import Advance, Apply, Copies, Piece, advances, applies, but_for, call_bytes, scratch_bytes
from .gradients import Gradients
from .residence import Offloaded, Resident, Rows, rows_of, stage_uses
from .rounding import Draws
from .scaling import Scaling
from .update import Tensors

HOME = -1
"""In place of a bucket's number: the matrices that are whole on this rank."""


@dataclass(frozen=True)
class HomeRun:
    """What is done with a batch of matrices that are whole on this rank."""

    batch: Batch
    advances: tuple[Advance, ...]
    applies: tuple[Apply, ...]


@dataclass(frozen=True)
class BucketRun:
    """What is done with a bucket on this rank; of each batch, the copies that make it whole and those that part it.

    `repeats` copy what is packed once and goes to several ranks.
    """

    advances: tuple[Advance, ...]
    repeats: Copies
    batches: tuple[tuple[Copies, Batch, Copies], ...]
    applies: tuple[Apply, ...]


@dataclass(frozen=True)
class RankPlan:
    """A plan and this rank's part in it: all that is known before any rank has heard of another.

    Attributes:
        params: trained parameters, in the plan's order.
        iterations: Newton-Schulz iteration of each of them.
        methods: algorithm of each of the plan's works.
        plan: plan of the step, equal on every rank.
        program: this rank's part of it.
        geometries: pieces of every parameter on every rank.
        device: device on which matrices are orthogonalized.
    """

    params: tuple[TrainedParam, ...]
    iterations: tuple[Iteration, ...]
    methods: tuple[Method, ...]
    plan: Plan
    program: Program
    geometries: Geometries
    device: torch.device


class Executor:
    """The stages of a Muon step but the first, on this rank. All views but those of gradients are made here.

    Args:
        planned: plan of the step, and this rank's part in it.
        exchange: buffers and collectives of that part.
        report: where matrices that are not finite are noted.
        buffers: memory of the exchange's buffers, which a step takes unless it is there.
        zeroes: whether the update of such matrices is zero; otherwise they are let be.
        releases: whether to drop each gradient once its last piece is packed.
        stochastic: whether weights in bfloat16 are rounded stochastically.
        offload: what is on the host.
        dtype: dtype in which matrices are made whole.
    """

    def __init__(
        self,
        planned: RankPlan,
        exchange: Exchange,
        report: FaultReport,
        buffers: StepMemory,
        *,
        zeroes: bool,
        releases: bool,
        stochastic: bool,
        offload: Offload,
        dtype: torch.dtype,
    ) -> None:
        self._planned, self._exchange, self._report, self._buffers = planned, exchange, report, buffers
        self._zeroes, self._releases, self._stochastic = zeroes, releases, stochastic
        plan, program = planned.plan, planned.program
        self._matrices = plan.matrices
        self.storage = tuple(map(storage_of, planned.params, plan.parameters))
        self._groups = tuple(trained.group for trained in planned.params)
        self._most = call_bytes(planned.device.type)
        self._scratch = torch.empty(scratch_bytes(self.storage, self._most), dtype=torch.uint8, device=planned.device)
        self._home_spans = {item.matrix: spans(item.piece) for item in program.home}
        self._last_bucket = self._last_buckets()
        at_home = batches(tuple(self._home_spans), plan.matrices, plan.works)
        in_buckets = [batches(run.matrices, plan.matrices, plan.works) for run in program.buckets]
        largest = max((self._numel(chosen) for run in (at_home, *in_buckets) for chosen in run), default=0)
        workspace = torch.empty(largest, dtype=dtype, device=planned.device)
        self._home = tuple(self._home_run(self._batch(chosen, workspace)) for chosen in at_home)
        with buffers.held():
            self._buckets = tuple(
                self._bucket_run(bucket, [self._batch(chosen, workspace) for chosen in run])
                for bucket, run in zip(exchange.buckets, in_buckets, strict=True)
            )
        self._memory = StepMemory((workspace,))
        # Here and not with the rest: what is updated in one call is the most that it is needed for.
        self._scratch.untyped_storage().resize_(0)
        self.planned = len(program.home) + sum(len(run.matrices) for run in program.buckets)
        self.orthogonalized = 0
        self.residence = self._residence(offload)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """All batches of this rank."""
        return (*(run.batch for run in self._home), *(batch for run in self._buckets for _, batch, _ in run.batches))

    def _numel(self, chosen: Sequence[int]) -> int:
        return len(chosen) * self._matrices[chosen[0]].numel

    def _batch(self, chosen: tuple[int, ...], workspace: Tensor) -> Batch:
        first = self._matrices[chosen[0]]
        whole = workspace[: self._numel(chosen)].view(len(chosen), first.rows, first.cols)
        parameters = torch.tensor([self._matrices[m].parameter for m in chosen])
        if workspace.device.type != "cpu":
            # From pinned memory, so that a step that follows a storage which has moved does not wait for the device.
            parameters = parameters.pin_memory().to(workspace.device, non_blocking=True)
        iteration, method = self._planned.iterations[first.parameter], self._planned.methods[first.work]
        cut = first.slice
        of = None if cut is None else Slice(self._exchange.teams[chosen[0]], cut.cuts_rows)
        return Batch(chosen, whole, parameters, iteration, method, of)

    def _home_run(self, batch: Batch) -> HomeRun:
        # What is whole here is packed where it is orthogonalized, and updated from there.
        pieces = [
            self._piece(matrix, self._home_spans[matrix], batch.whole[place])
            for place, matrix in enumerate(batch.matrices)
        ]
        return HomeRun(batch, *self._element_wise(pieces, pieces))

    def _bucket_run(self, buffers: BucketBuffers, chosen: Sequence[Batch]) -> BucketRun:
        stored = [(self._piece(each.matrix, each.spans, each.view), each.matrix) for each in buffers.stored]
        packed = [
            piece._replace(view=view)
            for piece, matrix in stored
            # A copy of what another rank packs has a momentum of its own to advance, unless the owner alone keeps it.
            if (view := buffers.packed.get(matrix)) is not None or not self._kept_elsewhere(piece)
        ]
        parts = tuple((assembling(batch, buffers), batch, parting(batch, buffers)) for batch in chosen)
        advances, applies = self._element_wise(packed, [piece for piece, _ in stored])
        return BucketRun(advances, Copies.of(buffers.repeated), parts, applies)

    def _piece(self, matrix: int, places: tuple[Span, ...], view: Tensor) -> Piece:
        plan, found = self._planned.plan, self._matrices[matrix]
        draws = Draws.of(plan.parameters[found.parameter].fqn, found.index, found.cols)
        # Of the whole matrix: a piece's own shape would give each rank another learning rate.
        return Piece(found.parameter, plan.out_in(matrix), places, view, draws)

    def _kept_elsewhere(self, piece: Piece) -> bool:
        return bool(self._planned.plan.parameters[piece.parameter].state_ranks)

    def _element_wise(
        self, packed: Sequence[Piece], returned: Sequence[Piece]
    ) -> tuple[tuple[Advance, ...], tuple[Apply, ...]]:
        return (
            advances(packed, self._groups, self.storage, self._most),
            applies(returned, self._groups, self.storage, self._most, self._scratch, stochastic=self._stochastic),
        )

    def _last_buckets(self) -> Mapping[int, int]:
        """The bucket in which the last piece of each parameter is packed; what is whole at home is in none."""
        return {
            self._matrices[piece.matrix].parameter: index
            for index, buffers in enumerate(self._exchange.buckets)
            for piece in buffers.stored
        }

    def _residence(self, offload: Offload) -> Resident:
        if offload == "none":
            return Resident()
        at_home, in_buckets = (
            [Rows(rows_of(run.advances), rows_of(run.applies)) for run in runs] for runs in (self._home, self._buckets)
        )
        uses = stage_uses(self._planned.program, at_home, in_buckets)
        return Offloaded(uses, self.storage, offload, Window(self._planned.device))

    def begin(self, gradients: Gradients) -> None:
        """Take the step's memory, and bring what it uses first if that is on the host."""
        self._buffers.take()
        self._memory.take()
        if gradients.scaling is not None:
            self._report.add_skipped(gradients.scaling.skipped)
        self._report.add_gradients(gradients.stored)
        self.orthogonalized = 0
        self.residence.begin(gradients)

    def advance_momentum(self, bucket: int, gradients: Gradients, *, packs: bool = True) -> None:
        """Stage 2: advance the momentum of each stored piece, and pack into the home buffer what leaves from here.

        Without `packs` that has left already, by `pack_ahead`.
        """
        found = self._buckets[bucket].advances
        # Not even the NaN of a gradient that is missing may be packed then: the buffer is on its way.
        self._advance(found if packs else [replace(each, packed=()) for each in found], gradients)
        if packs:
            self._buckets[bucket].repeats.run()
        self._release(bucket, gradients)

    def pack_ahead(self, bucket: int, gradients: Gradients) -> None:
        """Pack into the home buffer what stage 2 would, and leave momentum as it is."""
        for each in self._buckets[bucket].advances:
            for advance in self._with_gradients(each, gradients):
                grads, group = self.residence.grads(advance, gradients), advance.group
                if advance.packed:
                    update.pack_ahead(advance.averages, grads, advance.packed, group["momentum"], group["nesterov"])
        self._buckets[bucket].repeats.run()

    def orthogonalize(self, bucket: int, gradients: Gradients) -> None:
        """Stage 4: make the owned matrices whole, orthogonalize them in batches, and fill the buffer that goes back."""
        cleared = self._exchange.buckets[bucket].cleared
        if cleared is not None:
            cleared.zero_()
        for assembled, batch, parted in self._buckets[bucket].batches:
            assembled.run()
            self._newton_schulz(batch, gradients)
            parted.run()

    def apply(self, bucket: int, gradients: Gradients) -> None:
        """Stage 6: decay each stored piece and add its update."""
        self._apply(self._buckets[bucket].applies, gradients)

    def applies_of_now(self, bucket: int, gradients: Gradients) -> tuple[Apply, ...]:
        """Stage 6 with the hyperparameters of now, for `update` at any time before the next step."""
        return tuple(run.of_now() for run in but_for(self._buckets[bucket].applies, gradients.left))

    def update(self, applies: Iterable[Apply]) -> None:
        """Decay pieces and add their updates."""
        for run in applies:
            self._update(run, run.params, None)

    def step_home(self, gradients: Gradients) -> None:
        """Stages 2, 4 and 6 of the matrices that are whole on this rank."""
        for run in self._home:
            self._advance(run.advances, gradients)
            self._newton_schulz(run.batch, gradients)
            self._apply(run.applies, gradients)
        self._release(HOME, gradients)

    def finish(self) -> None:
        """Stage 7: start telling all ranks what was wrong, behind what goes back to the host last. Buffers are kept.

        Raises RuntimeError if not as many matrices were orthogonalized as planned.
        """
        self.residence.end()
        self._report.send()
        self._memory.free()
        if self.orthogonalized != self.planned:
            raise RuntimeError(f"{self.orthogonalized} matrices orthogonalized and {self.planned} planned on this rank")

    def heal(self, faults: Sequence[Fault]) -> None:
        """Set elements to zero that are not finite, in the momentum of what was found so or had no gradient somewhere.

        They would make every later update of their matrices zero.
        """
        if not self._zeroes or not any(faults):
            return
        self.residence.synchronize()
        for fault, storage in zip(faults, self.storage, strict=True):
            if fault in (Fault.NOT_FINITE, Fault.NO_GRADIENT):
                storage.average.nan_to_num_(0.0, 0.0, 0.0)

    def _advance(self, chosen: Iterable[Advance], gradients: Gradients) -> None:
        with self.residence.there("advance"):
            for each in chosen:
                for advance in self._with_gradients(each, gradients):
                    averages, grads = self.residence.averages(advance), self.residence.grads(advance, gradients)
                    if gradients.scaling is not None:
                        grads = gradients.scaling.unscaled(grads, averages)
                    group = advance.group
                    update.momentum(averages, grads, advance.packed, group["momentum"], group["nesterov"])

    def _with_gradients(self, advance: Advance, gradients: Gradients) -> Iterable[Advance]:
        """The parts that have a gradient, by its dtype; what the others would have packed is set to NaN."""
        if gradients.uniform:
            return (advance,)
        by_dtype = advance.split(lambda part: gradients.dtype(part.parameter))
        for view in by_dtype.pop(None).packed if None in by_dtype else ():
            # The owner, which may be another rank, then sees a matrix that is not finite, and updates nothing.
            view.fill_(math.nan)
        return by_dtype.values()

    def _apply(self, chosen: Iterable[Apply], gradients: Gradients) -> None:
        with self.residence.there("apply"):
            for run in but_for(chosen, gradients.left):
                self._update(run, self.residence.params(run), gradients.scaling)

    def _update(self, run: Apply, params: Tensors, scaling: Scaling | None) -> None:
        # Taken for the call alone, by views that are always there: it may be as large as a parameter.
        memory = self._scratch.untyped_storage()
        memory.resize_(run.scratch_bytes)
        if scaling is None:
            run.update(params)
        else:
            scaling.unless_skipped(params, partial(run.update, params))
        memory.resize_(0)

    def _newton_schulz(self, batch: Batch, gradients: Gradients) -> None:
        self.orthogonalized += len(batch.matrices)
        if gradients.left:
            for place, matrix in enumerate(batch.matrices):
                if self._matrices[matrix].parameter in gradients.left:
                    # Nothing was packed: what is there is of another step, or was never written.
                    batch.whole[place].zero_()
        norms = batch.norms()
        if self._zeroes:
            self._report.add_nonfinite(batch.parameters, zero_nonfinite_(batch.whole, norms))
        batch.orthogonalize(norms)

    def _release(self, bucket: int, gradients: Gradients) -> None:
        """Drop the gradients whose last matrix was read in this bucket, or at home."""
        if not self._releases:
            return
        for index, trained in enumerate(self._planned.params):
            if gradients.stored[index] is not None and self._last_bucket.get(index, HOME) == bucket:
                # Both hold the gradient's memory, and either alone would keep it.
                gradients.stored[index] = None
                trained.param.grad = None
