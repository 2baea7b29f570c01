"""The stages of a step on this rank's tensors, for any plan. It decides nothing: `Muon.step` calls it turn by turn."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import update
from .exchange import BucketBuffers, Exchange
from .faults import FaultReport
from .offload import Window
from .options import Offload
from .orthogonalize import Iteration, Method, orthogonalize, zero_nonfinite_
from .params import TrainedParam
from .plan.batches import batches
from .plan.layout import Geometries, Span, spans
from .plan.program import Program
from .plan.types import Plan
from .residence import Offloaded, Resident, Views, stage_uses, uses_of
from .step_memory import StepMemory

TOGETHER_BYTES = 2**25
"""Most bytes of pieces whose momentum an accelerator advances in one launch; as many are new memory meanwhile."""

HOME = -1
"""In place of a bucket's number: the matrices that are whole on this rank."""


@dataclass(frozen=True)
class Batch:
    """Matrices of this rank that are orthogonalized together.

    Attributes:
        matrices: their indices in the plan.
        whole: (count, rows, cols) tensor in which they are made whole; all batches take turns in one memory.
        parameters: (count,) indices of their parameters, on the device.
        iteration: Newton-Schulz iteration that is computed.
        method: algorithm that computes it.
    """

    matrices: tuple[int, ...]
    whole: Tensor
    parameters: Tensor
    iteration: Iteration
    method: Method


@dataclass(frozen=True)
class MomentumPiece:
    """A rectangle of this rank's momentum and its gradient; `packed` takes Newton-Schulz's input, if it leaves here."""

    group: Mapping[str, Any]
    stored: Tensor
    grad: Tensor
    packed: Tensor | None

    @property
    def kind(self) -> Hashable:
        """What pieces must have alike to be advanced in one call."""
        group, packs = self.group, self.packed is not None
        return group["momentum"], group["nesterov"], self.stored.dtype, self.grad.dtype, packs


@dataclass(frozen=True)
class UpdatePiece:
    """A rectangle of this rank's parameter, its orthogonalized update, and the scale of the learning rate."""

    group: Mapping[str, Any]
    scale: float
    stored: Tensor
    update: Tensor

    @property
    def kind(self) -> Hashable:
        """What pieces must have alike to be updated in one call."""
        return self.group["lr"], self.scale, self.group["weight_decay"], self.stored.dtype, self.update.dtype


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
    """The stages of a Muon step but the first, on this rank.

    Args:
        planned: plan of the step, and this rank's part in it.
        exchange: buffers and collectives of that part.
        report: where matrices that are not finite are noted.
        zeroes: whether the update of such matrices is zero; otherwise they are let be.
        releases: whether to drop each gradient once its last piece is packed.
        offload: what is on the host.
        dtype: dtype in which matrices are made whole.
    """

    def __init__(
        self,
        planned: RankPlan,
        exchange: Exchange,
        report: FaultReport,
        *,
        zeroes: bool,
        releases: bool,
        offload: Offload,
        dtype: torch.dtype,
    ) -> None:
        self._planned, self._exchange, self._report = planned, exchange, report
        self._zeroes, self._releases = zeroes, releases
        plan, program = planned.plan, planned.program
        self._matrices = plan.matrices
        # The CPU's caches like one piece at a time; an accelerator likes few launches.
        self._together = 0 if planned.device.type == "cpu" else TOGETHER_BYTES
        self._home_spans = {item.matrix: spans(item.piece) for item in program.home}
        self._last_bucket = self._last_buckets()
        at_home = batches(tuple(self._home_spans), plan.matrices, plan.works)
        in_buckets = [batches(run.matrices, plan.matrices, plan.works) for run in program.buckets]
        largest = max((self._numel(chosen) for run in (at_home, *in_buckets) for chosen in run), default=0)
        workspace = torch.empty(largest, dtype=dtype, device=planned.device)
        self.home_batches = tuple(self._batch(chosen, workspace) for chosen in at_home)
        self.bucket_batches = tuple(tuple(self._batch(chosen, workspace) for chosen in run) for run in in_buckets)
        self._memory = StepMemory((*exchange.buffers, workspace))
        self.planned = len(program.home) + sum(len(run.matrices) for run in program.buckets)
        self.orthogonalized = 0
        self.residence = self._residence(offload)

    def _numel(self, chosen: Sequence[int]) -> int:
        return len(chosen) * self._matrices[chosen[0]].numel

    def _batch(self, chosen: tuple[int, ...], workspace: Tensor) -> Batch:
        first = self._matrices[chosen[0]]
        whole = workspace[: self._numel(chosen)].view(len(chosen), first.rows, first.cols)
        parameters = torch.tensor([self._matrices[m].parameter for m in chosen], device=workspace.device)
        iteration, method = self._planned.iterations[first.parameter], self._planned.methods[first.work]
        return Batch(chosen, whole, parameters, iteration, method)

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
        parameter, spans = {m: planned.parameter for m, planned in enumerate(self._matrices)}, self._home_spans
        at_home = [uses_of((parameter[m], spans[m]) for m in batch.matrices) for batch in self.home_batches]
        in_buckets = [uses_of((parameter[p.matrix], p.spans) for p in b.stored) for b in self._exchange.buckets]
        return Offloaded(stage_uses(self._planned.program, at_home, in_buckets), offload, Window(self._planned.device))

    def begin(self, views: Views) -> None:
        """Take the step's memory, and bring what it uses first if that is on the host."""
        self._memory.take()
        self.orthogonalized = 0
        self.residence.begin(views)

    def advance_momentum(self, bucket: int, views: Views) -> None:
        """Stage 2: advance the momentum of each stored piece, and pack into the home buffer what leaves from here."""
        buffers = self._exchange.buckets[bucket]
        with self.residence.there("advance"):
            self._advance(
                piece
                for stored in buffers.stored
                for piece in self._momentum_pieces(
                    stored.matrix, stored.spans, buffers.packed.get(stored.matrix), views
                )
            )
        self._release((stored.matrix for stored in buffers.stored), views, bucket)

    def orthogonalize(self, bucket: int, views: Views) -> None:
        """Stage 4: make the owned matrices whole, orthogonalize them in batches, and fill the buffer that goes back."""
        buffers = self._exchange.buckets[bucket]
        if buffers.cleared is not None:
            buffers.cleared.zero_()
        for batch in self.bucket_batches[bucket]:
            _assemble(batch, buffers)
            # Not a variable: a result would outlive its turn, and two batches be in memory.
            _disassemble(self._newton_schulz(batch, views), batch, buffers)

    def apply(self, bucket: int, views: Views) -> None:
        """Stage 6: decay each stored piece and add its update."""
        with self.residence.there("apply"):
            self._update(
                piece
                for stored in self._exchange.buckets[bucket].stored
                for piece in self._update_pieces(stored.matrix, stored.spans, stored.view, views)
            )

    def step_home(self, views: Views) -> None:
        """Stages 2, 4 and 6 of the matrices that are whole on this rank."""
        for batch in self.home_batches:
            with self.residence.there("advance"):
                self._advance(
                    piece
                    for place, matrix in enumerate(batch.matrices)
                    for piece in self._momentum_pieces(matrix, self._home_spans[matrix], batch.whole[place], views)
                )
            # Not a variable, as in `orthogonalize`.
            self._apply_home(batch, self._newton_schulz(batch, views), views)
        self._release(self._home_spans, views, HOME)

    def _apply_home(self, batch: Batch, result: Tensor, views: Views) -> None:
        with self.residence.there("apply"):
            self._update(
                piece
                for place, matrix in enumerate(batch.matrices)
                for piece in self._update_pieces(matrix, self._home_spans[matrix], result[place], views)
            )

    def finish(self) -> None:
        """Stage 7: start telling all ranks what was wrong, behind what goes back to the host last.

        Raises RuntimeError if not as many matrices were orthogonalized as planned.
        """
        self.residence.end()
        self._report.send()
        self._memory.free()
        if self.orthogonalized != self.planned:
            raise RuntimeError(f"{self.orthogonalized} matrices orthogonalized and {self.planned} planned on this rank")

    def _momentum_pieces(
        self, matrix: int, places: Sequence[Span], packed: Tensor | None, views: Views
    ) -> Iterator[MomentumPiece]:
        index = self._matrices[matrix].parameter
        stored, group = views[index], self._planned.params[index].group
        if stored is None or stored.missing:
            if packed is not None:
                # The owner, which may be another rank, then sees a matrix that is not finite, and updates nothing.
                packed.fill_(math.nan)
            return
        assert stored.grad is not None, "a gradient is released after its last piece is packed"
        for span in places:
            target = None if packed is None else packed[span.piece]
            average, grad = (self.residence.rectangle(name, index, stored, span) for name in ("average", "grad"))
            yield MomentumPiece(group, average, grad, target)

    def _advance(self, pieces: Iterable[MomentumPiece]) -> None:
        for alike in _grouped(pieces, self._together):
            update.momentum(
                [piece.stored for piece in alike],
                [piece.grad for piece in alike],
                [piece.packed for piece in alike if piece.packed is not None],
                alike[0].group["momentum"],
                alike[0].group["nesterov"],
                self._zeroes,
            )

    def _update_pieces(
        self, matrix: int, places: Sequence[Span], result: Tensor, views: Views
    ) -> Iterator[UpdatePiece]:
        index = self._matrices[matrix].parameter
        stored, group = views[index], self._planned.params[index].group
        if stored is None:
            return
        # Of the whole matrix: a piece's own shape would give each rank another learning rate.
        scale = update.lr_scale(group["lr_scale"], *self._planned.plan.out_in(matrix))
        for span in places:
            param = self.residence.rectangle("param", index, stored, span)
            yield UpdatePiece(group, scale, param, result[span.piece])

    def _update(self, pieces: Iterable[UpdatePiece]) -> None:
        for alike in _grouped(pieces, self._together):
            group, scale = alike[0].group, alike[0].scale
            params, updates = [piece.stored for piece in alike], [piece.update for piece in alike]
            update.apply(params, updates, group["lr"], scale, group["weight_decay"])

    def _newton_schulz(self, batch: Batch, views: Views) -> Tensor:
        self.orthogonalized += len(batch.matrices)
        for place, matrix in enumerate(batch.matrices):
            if views[self._matrices[matrix].parameter] is None:
                # Nothing was packed: what is there is of another step, or was never written.
                batch.whole[place].zero_()
        if self._zeroes:
            self._report.add_nonfinite(batch.parameters, zero_nonfinite_(batch.whole))
        return orthogonalize(batch.whole, batch.iteration, batch.method)

    def _release(self, read: Iterable[int], views: Views, bucket: int) -> None:
        """Drop the gradients whose last matrix was read in this bucket, or at home."""
        if not self._releases:
            return
        for index in {self._matrices[matrix].parameter for matrix in read}:
            stored = views[index]
            if stored is not None and self._last_bucket.get(index, HOME) == bucket:
                # Both hold the gradient's memory, and either alone would keep it.
                views[index] = replace(stored, grad=None)
                self._planned.params[index].param.grad = None


P = TypeVar("P", MomentumPiece, UpdatePiece)


def _grouped(pieces: Iterable[P], most: int) -> Iterator[list[P]]:
    """Pieces of one kind, in lists of at most `most` bytes, or of one piece."""
    waiting: dict[Hashable, list[P]] = {}
    held: dict[Hashable, int] = {}
    for piece in pieces:
        kind, size = piece.kind, piece.stored.nbytes
        if kind in waiting and held[kind] + size > most:
            yield waiting.pop(kind)
        held[kind] = size + (held[kind] if kind in waiting else 0)
        waiting.setdefault(kind, []).append(piece)
    yield from waiting.values()


def _assemble(batch: Batch, buffers: BucketBuffers) -> None:
    """Copy the pieces that were gathered into whole matrices."""
    copies = [
        (batch.whole[place][span.whole], source.view[span.piece])
        for place, matrix in enumerate(batch.matrices)
        for source in buffers.sources[matrix]
        for span in source.spans
    ]
    torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])


def _disassemble(result: Tensor, batch: Batch, buffers: BucketBuffers) -> None:
    """Copy orthogonalized matrices into the pieces that go back."""
    copies = [
        (target.view[span.piece], result[place][span.whole])
        for place, matrix in enumerate(batch.matrices)
        for target in buffers.targets[matrix]
        for span in target.spans
    ]
    torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])
