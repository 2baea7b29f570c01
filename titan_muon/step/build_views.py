"""Makes the views of each bucket from a plan: every tensor of a step except gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..comm.buffers import BucketBuffers, StepMemory
from ..orthogonalize import largest_value, products_of
from ..plan.cost.walk import batches
from ..plan.terms.layout import Span, spans
from ..state.matrix_states import MatrixStates
from .algorithm import Algorithm
from .foreach import Copies, StoredPiece, momentum_calls, numbered, scratch_bytes, update_calls
from .rank import Rank
from .rounding import RandomBits
from .views import Batch, BatchPart, BucketViews, UpdateBounds

FINITE = torch.finfo(torch.float32).max
MARGIN = 1.5
"""Factor on the largest norm of an update, for rounding in bfloat16."""
NO_COPIES = Copies((), ())

BatchType = Callable[[Batch], Batch]


@dataclass(frozen=True)
class StepViews:
    """The views of each bucket, and the memory that assembled matrices share."""

    buckets: tuple[BucketViews, ...]
    workspace: StepMemory


def build_views(rank: Rank, algorithm: Algorithm, states: MatrixStates, batch_type: BatchType | None) -> StepViews:
    """The views of a rank's buckets.

    `states`: of the algorithm, by matrix and name. `batch_type`: changes batches of sliced matrices, None without any.
    """
    buffers, matrices = rank.buffers, rank.plan.matrices
    by_bucket = [batches(run.matrices, matrices, rank.plan.works) for run in rank.program.buckets]
    sizes = [len(batch) * matrices[batch[0]].numel for run in by_bucket for batch in run]
    workspace = torch.empty(max(sizes, default=0), dtype=buffers.dtype, device=buffers.device)
    size = scratch_bytes(rank.storage, buffers.device.type)
    scratch = torch.empty(size, dtype=torch.uint8, device=buffers.device)
    builder = _Builder(rank, algorithm, states, workspace, scratch, batch_type)
    with buffers.memory.held():
        buckets = tuple(builder.bucket(index, run) for index, run in enumerate(by_bucket))
    scratch.untyped_storage().resize_(0)
    return StepViews(buckets, StepMemory((workspace,), kept=rank.options.keep_buffers))


class _Builder:
    def __init__(
        self,
        rank: Rank,
        algorithm: Algorithm,
        states: MatrixStates,
        workspace: Tensor,
        scratch: Tensor,
        batch_type: BatchType | None,
    ) -> None:
        self.rank, self.algorithm, self.states, self.batch_type = rank, algorithm, states, batch_type
        self.workspace, self.scratch, self.place = workspace, scratch, 0
        self.groups = tuple(trained.group for trained in rank.params)
        self.numbers = numbered(self.groups)
        self.releases = _last_packed(rank) if rank.options.release_grads else [()] * len(rank.program.buckets)

    def bucket(self, index: int, run: Sequence[tuple[int, ...]]) -> BucketViews:
        """`run`: the matrices of each batch."""
        made, buffers = [self.batch(matrices) for matrices in run], self.rank.buffers.buckets[index]
        if buffers is not None:
            return self.travelling(index, buffers, made)
        # Local matrices are packed straight into the workspace.
        (batch,) = made
        stored = self.rank.program.buckets[index].stored
        pieces = [self.piece(p.matrix, spans(p.piece), view) for p, view in zip(stored, batch.whole, strict=True)]
        bounds = self.bounds(batch.whole, [(p.matrix, view) for p, view in zip(stored, batch.whole, strict=True)])
        calls = self.gathers(pieces), NO_COPIES, ((NO_COPIES, batch, NO_COPIES),), self.updates(pieces)
        return BucketViews(index, *calls, None, self.releases[index], bounds)

    def travelling(self, index: int, buffers: BucketBuffers, made: Sequence[Batch]) -> BucketViews:
        parameters = self.rank.plan.parameters
        pieces = [self.piece(piece.matrix, piece.spans, piece.view) for piece in buffers.stored]
        packed = [
            piece._replace(view=view)
            for piece in pieces
            # Replicas that do not send still update their momentum, unless state = "owner".
            if (view := buffers.packed.get(piece.matrix)) is not None or not parameters[piece.parameter].state_ranks
        ]
        steps = tuple((_assembling(batch, buffers), batch, _splitting(batch, buffers)) for batch in made)
        bounds = self.bounds(buffers.arrived, [(piece.matrix, piece.view) for piece in buffers.stored])
        calls = self.gathers(packed), Copies.of(buffers.repeated), steps, self.updates(pieces)
        return BucketViews(index, *calls, buffers.cleared, self.releases[index], bounds)

    def batch(self, matrices: tuple[int, ...]) -> Batch:
        rank, planned = self.rank, self.rank.plan.matrices
        first = planned[matrices[0]]
        whole = self.workspace[: len(matrices) * first.numel].view(len(matrices), first.rows, first.cols)
        parameters = [planned[matrix].parameter for matrix in matrices]
        method = rank.methods[first.work]
        batch = Batch(
            matrices,
            whole,
            tuple(parameters),
            rank.numbers(parameters),
            self.place,
            rank.iterations[first.parameter],
            method,
            products_of(method.products),
            tuple(self.parts(matrices, whole)),
        )
        self.place += len(matrices)
        return batch if self.batch_type is None else self.batch_type(batch)

    def parts(self, matrices: tuple[int, ...], whole: Tensor) -> Iterator[BatchPart]:
        planned, start = self.rank.plan, 0

        def kind(matrix: int) -> tuple[int, bool]:
            parameter = planned.matrices[matrix].parameter
            return self.numbers[parameter], planned.parameters[parameter].stack.transposed

        for (_, transposed), same in groupby(matrices, key=kind):
            members = list(same)
            held = [self.states[matrix] for matrix in members if matrix in self.states]
            if held:
                states = {name: [state[name] for state in held] for name in held[0]}
                group = self.groups[planned.matrices[members[0]].parameter]
                yield BatchPart(whole[start : start + len(members)], group, transposed, states)
            start += len(members)

    def piece(self, number: int, places: tuple[Span, ...], view: Tensor) -> StoredPiece:
        plan = self.rank.plan
        matrix = plan.matrices[number]
        draws = RandomBits.of(plan.parameters[matrix.parameter].fqn, matrix.index, matrix.cols)
        return StoredPiece(number, matrix.parameter, plan.out_in(number), places, view, draws)

    def gathers(self, pieces: Sequence[StoredPiece]):  # type: ignore[no-untyped-def]
        return momentum_calls(pieces, self.groups, self.rank.storage, self.rank.device.type)

    def updates(self, pieces: Sequence[StoredPiece]):  # type: ignore[no-untyped-def]
        stochastic = self.rank.options.rounding == "stochastic"
        device = self.rank.device.type
        return update_calls(pieces, self.groups, self.rank.storage, device, self.scratch, stochastic=stochastic)

    def bounds(self, memory: Tensor, pieces: Sequence[tuple[int, Tensor]]) -> UpdateBounds:
        norms, parameters, limits = list[float](), list[int](), self.algorithm.limits
        for number, view in pieces:
            matrix = self.rank.plan.matrices[number]
            # A part has at most the singular values of the whole matrix.
            rank = min(view.shape) if limits == "spectrum" else min(matrix.whole_shape)
            largest = MARGIN * largest_value(self.rank.iterations[matrix.parameter].steps) * math.sqrt(rank)
            norms.append(min(largest, FINITE) if limits != "nothing" else FINITE)
            parameters.append(matrix.parameter)
        largest_norms = self.rank.on_device(torch.tensor(norms, dtype=torch.float32, device="cpu"))
        return UpdateBounds(memory, tuple(view for _, view in pieces), self.rank.numbers(parameters), largest_norms)


def _assembling(batch: Batch, buffers: BucketBuffers) -> Copies:
    """Gathered pieces into whole matrices."""
    return Copies.of(
        (batch.whole[place][span.whole], source.view[span.piece])
        for place, matrix in enumerate(batch.matrices)
        for source in buffers.sources[matrix]
        for span in source.spans
    )


def _splitting(batch: Batch, buffers: BucketBuffers) -> Copies:
    """Orthogonalized matrices into the pieces to return."""
    return Copies.of(
        (target.view[span.piece], batch.whole[place][span.whole])
        for place, matrix in enumerate(batch.matrices)
        for target in buffers.targets[matrix]
        for span in target.spans
    )


def _last_packed(rank: Rank) -> list[tuple[int, ...]]:
    """By bucket, the parameters whose last piece the bucket packs."""
    last: dict[int, int] = {}
    for bucket in dict.fromkeys(bucket for _, bucket in rank.program.acts):
        last.update(dict.fromkeys(sorted(rank.parameters_of(bucket)), bucket))
    by_bucket: list[list[int]] = [[] for _ in rank.program.buckets]
    for parameter, bucket in last.items():
        by_bucket[bucket].append(parameter)
    return [tuple(parameters) for parameters in by_bucket]
