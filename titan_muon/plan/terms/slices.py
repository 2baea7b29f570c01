"""Matrices that several ranks orthogonalize together: how they are cut into slices, and which ranks can share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod

from .layout import take
from .types import Bucket, Interval, Matrix, MatrixRows, Parameter, Slice

Ranks = tuple[int, ...]


def teams(group: Ranks, count: int, ranks_per_node: int) -> list[Ranks]:
    """Sets of `count` ranks of a group that can orthogonalize a matrix together: of one node, and disjoint."""
    # Always the same few sets: each needs a process group, which all ranks of the world make.
    found = []
    for _, members in groupby(group, key=lambda rank: rank // ranks_per_node):
        node = tuple(members)
        found += [node[start : start + count] for start in range(0, len(node) - count + 1, count)]
    return found


def divides(matrix: MatrixRows, shape: tuple[int, int], count: int) -> bool:
    """Whether `count` ranks can have equal slices of a matrix of this shape, and equal rows of its Gram matrix."""
    # A matrix that takes turns with others in its storage would be in as many parts as it has rows.
    return matrix.row_step == matrix.col_step == 1 and shape[0] % count == shape[1] % count == 0


def sliced(parameter: Parameter, counts: Mapping[int, int]) -> Parameter:
    """The parameter with each matrix of its stack that is in `counts` cut into so many."""
    stack, cols = parameter.stack, prod(parameter.layout.shape[parameter.stack.row_dims :])
    found: list[MatrixRows] = []
    for index, matrix in enumerate(stack.matrices):
        count = counts.get(index, 1)
        shape = matrix.shape(cols)
        parts = [_part(matrix, shape, place, count) for place in range(count)]
        found += parts if count > 1 else [matrix]
    return replace(parameter, stack=replace(stack, matrices=tuple(found)))


def slices_of(matrix: Matrix, index: int, work: int, flops: int, count: int) -> list[Matrix]:
    """The slices of a matrix whose first one has number `index` in its parameter's stack."""
    cuts_rows = _cuts_rows((matrix.rows, matrix.cols))
    rows, cols = (matrix.rows // count, matrix.cols) if cuts_rows else (matrix.rows, matrix.cols // count)
    return [
        Matrix(matrix.parameter, index + place, rows, cols, flops, work, Slice(place, count, cuts_rows))
        for place in range(count)
    ]


def _cuts_rows(shape: tuple[int, int]) -> bool:
    """Whether rows are cut: the longer side is, since all of the shorter one has to be in each slice."""
    return shape[0] >= shape[1]


def _part(matrix: MatrixRows, shape: tuple[int, int], place: int, count: int) -> MatrixRows:
    label = f"{matrix.label}/{place}"
    if _cuts_rows(shape):
        length = shape[0] // count
        return replace(matrix, label=label, rows=take(matrix.rows, place * length, (place + 1) * length))
    length, cols = shape[1] // count, matrix.cols or (Interval(0, shape[1]),)
    return replace(matrix, label=label, cols=take(cols, place * length, (place + 1) * length))


def teams_in(bucket: Bucket, matrices: Sequence[Matrix]) -> dict[int, Ranks]:
    """For the first slice of each matrix that is sliced in a bucket: the owners of all its slices, in order."""
    owners: dict[int, list[int]] = {}
    for number, owner in sorted(zip(bucket.matrices, bucket.owners, strict=True)) if bucket.owners else ():
        part = matrices[number].slice
        if part is not None:
            owners.setdefault(number - part.place, []).append(owner)
    for first, ranks in owners.items():
        part = matrices[first].slice
        # A rank's place in its process group is its place among the slices, and that goes by ascending ranks.
        assert part is not None, f"matrix {first} is the first of its slices"
        assert len(ranks) == part.count, f"all slices of matrix {first} travel in one bucket"
        assert ranks == sorted(set(ranks)), f"the slices of matrix {first} have one owner each, in order of ranks"
    return {first: tuple(ranks) for first, ranks in owners.items()}
