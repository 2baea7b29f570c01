"""Sliced matrices: several ranks of a node orthogonalize a matrix together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod

from .layout import select
from .pieces import Ranks
from .types import Bucket, Interval, Matrix, MatrixRows, Parameter, Slice


def teams(group: Ranks, count: int, ranks_per_node: int) -> list[Ranks]:
    """Disjoint sets of `count` ranks of a node: few, because each needs a process group."""
    sets = []
    for _, members in groupby(group, key=lambda rank: rank // ranks_per_node):
        node = tuple(members)
        sets += [node[start : start + count] for start in range(0, len(node) - count + 1, count)]
    return sets


def divides(matrix: MatrixRows, shape: tuple[int, int], count: int) -> bool:
    """Whether the matrix divides into `count` equal slices, and the Gram matrix into equal row blocks."""
    # An interleaved matrix would need as many segments as rows.
    return matrix.row_step == matrix.col_step == 1 and shape[0] % count == shape[1] % count == 0


def sliced(parameter: Parameter, counts: Mapping[int, int]) -> Parameter:
    """The parameter with matrix i of the stack cut into `counts[i]` slices."""
    stack, cols = parameter.stack, prod(parameter.layout.shape[parameter.stack.row_dims :])
    matrices: list[MatrixRows] = []
    for index, matrix in enumerate(stack.matrices):
        count = counts.get(index, 1)
        shape = matrix.shape(cols)
        parts = [_part(matrix, shape, place, count) for place in range(count)]
        matrices += parts if count > 1 else [matrix]
    return replace(parameter, stack=replace(stack, matrices=tuple(matrices)))


def slices_of(matrix: Matrix, index: int, work: int, flops: int, count: int) -> list[Matrix]:
    """The slices; `index`: of the first slice in the parameter's stack."""
    cuts_rows = _cuts_rows((matrix.rows, matrix.cols))
    rows, cols = (matrix.rows // count, matrix.cols) if cuts_rows else (matrix.rows, matrix.cols // count)
    return [
        Matrix(matrix.parameter, index + place, rows, cols, flops, work, Slice(place, count, cuts_rows))
        for place in range(count)
    ]


def _cuts_rows(shape: tuple[int, int]) -> bool:
    """Whether rows are cut: always the longer side, because each slice needs all of the shorter side."""
    return shape[0] >= shape[1]


def _part(matrix: MatrixRows, shape: tuple[int, int], place: int, count: int) -> MatrixRows:
    label = f"{matrix.label}/{place}"
    if _cuts_rows(shape):
        length = shape[0] // count
        return replace(matrix, label=label, rows=select(matrix.rows, place * length, (place + 1) * length))
    length, cols = shape[1] // count, matrix.cols or (Interval(0, shape[1]),)
    return replace(matrix, label=label, cols=select(cols, place * length, (place + 1) * length))


def teams_in(bucket: Bucket, matrices: Sequence[Matrix]) -> dict[int, Ranks]:
    """The owners of all slices of each sliced matrix in a bucket, by first slice."""
    owners: dict[int, list[int]] = {}
    for number, owner in sorted(zip(bucket.matrices, bucket.owners, strict=True)) if bucket.owners else ():
        part = matrices[number].slice
        if part is not None:
            owners.setdefault(number - part.place, []).append(owner)
    for first, ranks in owners.items():
        part = matrices[first].slice
        # Process groups sort ranks, and a rank's position in the group is its slice.
        assert part is not None, f"matrix {first} is the first of its slices"
        assert len(ranks) == part.count, f"all slices of matrix {first} travel in one bucket"
        assert ranks == sorted(set(ranks)), f"the slices of matrix {first} have one owner each, in order of ranks"
    return {first: tuple(ranks) for first, ranks in owners.items()}
