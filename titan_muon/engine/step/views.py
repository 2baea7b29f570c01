"""The tensors of a bucket's calls: every tensor of a step except gradients, as views that are made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ..exchange.exchange import BufferPiece, StepMemory
from ..faults.report import Flags
from ..layout.intervals import spans
from ..orthogonalize import DTYPES, frobenius_norms, prepared
from ..program.program import batches
from ..state.states import MatrixStates
from .foreach import (
    Copies,
    MomentumCall,
    StepContext,
    UpdateCall,
    group_numbers,
    joined,
    momentum_calls,
    scratch_bytes,
    update_calls,
)

NO_COPIES = Copies((), ())
FEWER = 8
"""A strided copy takes a launch of its own, and a launch takes the host as long as 8 tensors in a list."""

Pair = tuple[Tensor, Tensor]
"""(rows, cols) view of a buffer, and the view of assembled matrices to copy from or to."""


@dataclass(frozen=True)
class BatchPart:
    """Matrices of a batch with one parameter group and orientation.

    Attributes:
        first: place of the first matrix in the batch.
        keys: by matrix, a number that is equal in every plan; consecutive in a stack.
        states: by name, a tensor for each matrix.
    """

    whole: Tensor
    group: Mapping[str, Any]
    transposed: bool
    first: int
    keys: tuple[int, ...]
    states: Mapping[str, Sequence[Tensor]]

    def stacked(self) -> dict[str, Tensor]:
        """(count, ...) states. A single state, which may be as large as a matrix, is a view."""
        return {
            name: torch.stack(list(states)) if len(states) > 1 else states[0][None]
            for name, states in self.states.items()
        }

    def store(self, stacked: Mapping[str, Tensor]) -> None:
        for name, states in self.states.items():
            if len(states) > 1:
                torch._foreach_copy_(list(states), list(stacked[name].unbind()))


@dataclass(eq=False)
class Batch:
    """Matrices of one shape, orthogonalized together.

    Attributes:
        whole: (count, rows, cols) assembled matrices, in memory shared by all batches of a rank.
        results: the same memory, for the results.
        parameters: (count,) parameter indices.
        broken: (count,) bool, flags of matrices that are not finite.
        place: of the first matrix among the rank's batches.
        dtype: of the products of Newton-Schulz, and of the norms.
        iterate: Newton-Schulz, from `orthogonalize.prepared`.
        parts: by parameter group, if the algorithm needs whole matrices or has states.
    """

    matrices: tuple[int, ...]
    whole: Tensor
    results: Tensor
    parameters: tuple[int, ...]
    broken: Tensor
    place: int
    dtype: torch.dtype
    iterate: Callable[..., Tensor]
    parts: tuple[BatchPart, ...]

    def norms(self) -> Tensor:
        """(count,) Frobenius norms of the matrices, for algorithms that change them before Newton-Schulz."""
        return frobenius_norms(self.whole, self.dtype)


@dataclass(frozen=True)
class BucketViews:
    """The calls of a bucket.

    Attributes:
        index: of the bucket in the program.
        gathers: on the parts that this rank stores, before the gather.
        batches: copies of gathered pieces into whole matrices, the matrices, and copies of results into pieces.
        updates: on the parts that this rank stores, after the return.
        cleared: buffer to zero before splitting results, or None.
        releases: parameters to release after packing.
    """

    index: int
    gathers: tuple[MomentumCall, ...]
    batches: tuple[tuple[Copies, Batch, Copies], ...]
    updates: tuple[UpdateCall, ...]
    cleared: Tensor | None
    releases: tuple[int, ...]


def build_views(
    rank: StepContext, whole: bool, states: MatrixStates
) -> tuple[tuple[BucketViews, ...], StepMemory, Flags]:
    """The views of a rank's buckets, the memory that assembled matrices share, and flags for `FaultReport.watch`.

    `whole`, `states`: of the algorithm; states by matrix and name.
    """
    builder = _Builder(rank, whole, states)
    with rank.buffers.memory.held():
        buckets = tuple(builder.bucket(index, run) for index, run in enumerate(builder.batches))
    builder.scratch.untyped_storage().resize_(0)
    memory = StepMemory((builder.workspace,), kept=rank.options.keep_buffers)
    return buckets, memory, Flags(builder.found, rank.numbers(builder.parameters))


class _Builder:
    """`batches`: the matrices of each batch, by bucket."""

    def __init__(self, rank: StepContext, whole: bool, states: MatrixStates) -> None:
        self.rank, self.states, self.whole = rank, states, whole
        matrices, device = rank.plan.matrices, rank.device
        self.batches = [batches(run.matrices, matrices, rank.plan.works) for run in rank.program.buckets]
        sizes = [
            len(batch) * matrices[batch[0]].numel * dtype.itemsize
            for run, dtype in zip(self.batches, rank.buffers.dtypes, strict=True)
            for batch in run
        ]
        self.workspace = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
        self.scratch = torch.empty(scratch_bytes(rank), dtype=torch.uint8, device=device)
        self.numbers = group_numbers(rank)
        self.place, self.parameters = 0, list[int]()
        count = sum(len(run.matrices) for run in rank.program.buckets)
        self.found = torch.zeros(count, dtype=torch.bool, device=device)
        self.releases = _last_packed(rank) if rank.options.release_grads else [()] * len(rank.program.buckets)

    def bucket(self, index: int, run: Sequence[tuple[int, ...]]) -> BucketViews:
        rank, dtype = self.rank, self.rank.buffers.dtypes[index]
        made = [self.batch(matrices, dtype, index) for matrices in run]
        buffers, parameters, planned = rank.buffers.buckets[index], rank.plan.parameters, rank.plan.matrices
        if buffers is None:
            # Local matrices are packed straight into the workspace.
            (batch,) = made
            stored = zip(rank.program.buckets[index].stored, batch.whole, strict=True)
            pieces = [BufferPiece(parcel.matrix, spans(parcel.piece), view) for parcel, view in stored]
            return BucketViews(
                index,
                momentum_calls(self.joined(pieces), rank),
                ((NO_COPIES, batch, NO_COPIES),),
                update_calls(self.joined(self.returned(pieces, index), draws=True), rank, self.scratch),
                None,
                self.releases[index],
            )
        packed = [
            piece._replace(view=view)
            for piece in buffers.stored
            # Replicas that do not send still update their momentum, unless state = "owner".
            if (view := buffers.packed.get(piece.matrix)) is not None
            or not parameters[planned[piece.matrix].parameter].state_ranks
        ]
        return BucketViews(
            index,
            momentum_calls(self.joined(packed), rank),
            tuple(
                (
                    _copies(batch, buffers.sources, assembling=True),
                    batch,
                    _copies(batch, buffers.targets, assembling=False),
                )
                for batch in made
            ),
            update_calls(self.joined(self.returned(buffers.stored, index), draws=True), rank, self.scratch),
            buffers.cleared,
            self.releases[index],
        )

    def result_dtype(self, matrix: int, bucket: int) -> torch.dtype:
        """The dtype of a matrix's results."""
        rank, buffers = self.rank, self.rank.buffers.buckets[bucket]
        # A reduce-scatter adds zeros of other ranks, in the dtype of the buffers.
        is_summed = buffers is not None and buffers.cleared is not None
        in_float16 = rank.plan.works[rank.plan.matrices[matrix].work].float16_results and not is_summed
        return torch.float16 if in_float16 else rank.buffers.dtypes[bucket]

    def returned(self, pieces: Sequence[BufferPiece], bucket: int) -> list[BufferPiece]:
        """Stored pieces, with views of their results."""
        placed = ((piece, piece.view) for piece in pieces)
        return [
            piece if view is None else piece._replace(view=view.view(self.result_dtype(piece.matrix, bucket)))
            for piece, view in placed
        ]

    def batch(self, matrices: tuple[int, ...], dtype: torch.dtype, bucket: int) -> Batch:
        rank, planned = self.rank, self.rank.plan.matrices
        first = planned[matrices[0]]
        memory = self.workspace[: len(matrices) * first.numel * dtype.itemsize].view(dtype)
        whole = memory.view(len(matrices), first.rows, first.cols)
        parameters = [planned[matrix].parameter for matrix in matrices]
        iteration, method = rank.iterations[first.parameter], rank.methods[first.work]
        batch = Batch(
            matrices,
            whole,
            whole.view(self.result_dtype(matrices[0], bucket)),
            tuple(parameters),
            self.found[self.place : self.place + len(matrices)],
            self.place,
            DTYPES[method.dtype],
            prepared(iteration, method, len(matrices)),
            tuple(self.parts(matrices, whole)),
        )
        self.place += len(matrices)
        self.parameters += parameters
        return batch

    def parts(self, matrices: tuple[int, ...], whole: Tensor) -> Iterator[BatchPart]:
        planned, start = self.rank.plan, 0

        def kind(matrix: int) -> tuple[int, bool]:
            parameter = planned.matrices[matrix].parameter
            return self.numbers[parameter], planned.parameters[parameter].stack.transposed

        for (_, transposed), same in groupby(matrices, key=kind):
            members = list(same)
            held = [self.states[matrix] for matrix in members if matrix in self.states]
            if held or self.whole:
                states = {name: [state[name] for state in held] for name in held[0]} if held else {}
                group = self.rank.params[planned.matrices[members[0]].parameter].group
                keys = tuple(map(self.key, members))
                yield BatchPart(whole[start : start + len(members)], group, transposed, start, keys, states)
            start += len(members)

    def key(self, number: int) -> int:
        matrix = self.rank.plan.matrices[number]
        return crc32(self.rank.plan.parameters[matrix.parameter].fqn.encode()) + matrix.index

    def joined(self, pieces: Sequence[BufferPiece], *, draws: bool = False) -> Sequence[BufferPiece]:
        """Fewer pieces, unless the work needs to know the matrix. `draws`: whether the work may draw by matrix."""
        plan = self.rank.plan
        numbers = (plan.matrices[piece.matrix].parameter for piece in pieces)
        drawn = draws and any(self.rank.rounding_of(number) is not None for number in numbers)
        if drawn or self.rank.options.by_matrix:
            return pieces
        # The factor on the learning rate depends on the shape.
        return joined(pieces, lambda matrix: (plan.matrices[matrix].parameter, plan.out_in(matrix)))


def _copies(batch: Batch, pieces: Mapping[int, Sequence[BufferPiece]], *, assembling: bool) -> Copies:
    """Gathered pieces into whole matrices, or orthogonalized matrices into the pieces to return."""
    pairs = strided((part, whole) for _, part, whole in pieces_of(batch, pieces))
    parts, matrices = tuple(part for part, _ in pairs), tuple(whole for _, whole in pairs)
    return Copies(matrices, parts) if assembling else Copies(parts, matrices)


def pieces_of(batch: Batch, pieces: Mapping[int, Sequence[BufferPiece]]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The matrices of a batch in order, with each part of their pieces and its place in the batch."""
    for place, matrix in enumerate(batch.matrices):
        for piece in pieces[matrix]:
            assert piece.view is not None, "an owner has every piece of its matrices"
            for span in piece.spans:
                yield place, piece.view[span.piece], batch.whole[place][span.whole]


def strided(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs, or far fewer pairs with more dims that copy the same elements."""
    listed = sorted(pairs, key=lambda pair: pair[0].storage_offset())
    # The matrices of a rank, then the ranks.
    fewer = _at_equal_distances(_at_equal_distances(listed))
    return [_in_words(pair) for pair in fewer] if FEWER * len(fewer) <= len(listed) else listed


def _at_equal_distances(pairs: Sequence[Pair]) -> list[Pair]:
    """Each run of equal views at equal distances as a pair of views with one more dim."""
    result, start = list[Pair](), 0
    while start < len(pairs):
        stop, distances = start + 1, _distances(pairs[start : start + 2])
        while distances and _distances(pairs[stop : stop + 2]) == distances:
            stop += 1
        stop += bool(distances)
        result.append(_repeated(pairs[start], stop - start, distances) if distances else pairs[start])
        start = stop
    return result


def _distances(pairs: Sequence[Pair]) -> tuple[int, ...]:
    """From a pair to the next, in elements of both views; empty without a next pair of equal views."""
    if len(pairs) < 2:
        return ()
    distances = tuple(after.storage_offset() - before.storage_offset() for before, after in zip(*pairs, strict=True))
    equal = all((a.shape, a.stride()) == (b.shape, b.stride()) for a, b in zip(*pairs, strict=True))
    return distances if equal and min(distances) > 0 else ()


def _repeated(pair: Pair, count: int, distances: tuple[int, ...]) -> Pair:
    one, other = (
        view.as_strided((count, *view.shape), (distance, *view.stride()))
        for view, distance in zip(pair, distances, strict=True)
    )
    return one, other


def _in_words(pair: Pair) -> Pair:
    """The pair as 8-byte integers, if they are aligned: a strided copy on a GPU moves an element for each thread."""
    words = 8 // pair[0].element_size()
    for view in pair:
        *far, near = view.stride()
        if near != 1 or any(number % words for number in (view.size(-1), view.storage_offset(), *far)):
            return pair
    return pair[0].view(torch.int64), pair[1].view(torch.int64)


def _last_packed(rank: StepContext) -> list[tuple[int, ...]]:
    """By bucket, the parameters whose last piece the bucket packs."""
    last: dict[int, int] = {}
    for bucket in dict.fromkeys(bucket for _, bucket in rank.program.acts):
        last.update(dict.fromkeys(sorted(rank.parameters_of(bucket)), bucket))
    by_bucket: list[list[int]] = [[] for _ in rank.program.buckets]
    for parameter, bucket in last.items():
        by_bucket[bucket].append(parameter)
    return [tuple(parameters) for parameters in by_bucket]
