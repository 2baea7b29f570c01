"""Tensor parallelism: matrices on whole tensor-parallel groups, a slice per rank, or blocks as separate matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...options import MuonOptions, OptionError
from ..terms.layout import Geometries, Geometry, Intervals, flattened, merged, region
from ..terms.machine import WorkOf
from ..terms.types import Cut, Interval, MatrixRows, Parameter
from .owners import Problem, Task
from .slices import ALWAYS, SliceOption, balance, cut, divides, in_picoseconds, options_of, slice_option, slices_fault


def read_in_mode(
    parameters: Sequence[Parameter], geometries: Geometries, options: MuonOptions
) -> tuple[Sequence[Parameter], Geometries]:
    """The parameters in another mode of `tp_mode` than "owner", and the pieces.

    Raises OptionError if tensor parallelism cuts no matrix, or if the options contradict the mode.
    """
    mode = options.tp_mode
    if not any(geometry.cut_by_peers for geometry in geometries.shared):
        raise OptionError(
            "tp_mode",
            f"= {mode!r} is about matrices that a mesh axis named 'tp' cuts, and there is none: "
            "name that axis of the DTensors' mesh so, or set 'owner'",
        )
    if mode == "blockwise":
        blocks = in_blocks(parameters, geometries, tensor_parallel_parts, "tp")
        return blocks, Geometries(blocks)
    if fault := _fault(options):
        raise OptionError("tp_mode", f"= {mode!r}: {fault}, or tp_mode = 'owner'")
    return parameters, geometries


def _fault(options: MuonOptions) -> str:
    if options.split_over != 1:
        return f"split_over = {options.split_over!r} assigns slices to other ranks; choose 1"
    if options.replicas == "redundant":
        return f"replicas = {options.replicas!r} may repeat the work on each replica; choose 'split'"
    return slices_fault(options)


def with_peers(problem: Problem, work_of: WorkOf) -> Problem:
    """The problem with each cut matrix on the tensor-parallel group that ends first. Raises OptionError without one."""
    pieces = problem.costs.pieces
    cut_tasks = (
        task
        for task in problem.tasks
        if pieces.matrices[task.matrix].index in pieces.geometry(task.matrix).cut_by_peers
    )
    choices = options_of(problem, cut_tasks, lambda task: (_team_option(problem, task, work_of),))
    return cut(problem, choices, balance(problem, *in_picoseconds(problem), choices, ALWAYS))


def _team_option(problem: Problem, task: Task, work_of: WorkOf) -> SliceOption:
    per_node, members = problem.costs.machine.ranks_per_node, frozenset(problem.groups[task.group])
    peers = problem.costs.pieces.geometry(task.matrix).peers
    teams = tuple(dict.fromkeys(ranks for ranks in peers.values() if members.issuperset(ranks)))
    if not teams:
        raise _unfit(problem, task, "has parts only on some ranks of each tensor-parallel group")
    count = len(teams[0])
    if not divides(problem, task.matrix, count):
        raise _unfit(problem, task, f"cannot be cut into {count} equal slices, because {count} must divide both sides")
    # Slices follow ascending ranks, in any order on the mesh axis.
    on_node = tuple(tuple(sorted(ranks)) for ranks in teams if len({rank // per_node for rank in ranks}) == 1)
    if not on_node:
        reason = "is cut over several nodes (machine.ranks_per_node), with slow links between slices"
        raise _unfit(problem, task, reason)
    return slice_option(problem, task.matrix, count, on_node, work_of)


def _unfit(problem: Problem, task: Task, reason: str) -> OptionError:
    matrix = problem.costs.pieces.matrices[task.matrix]
    name = f"{problem.parameters[matrix.parameter].fqn} ({matrix.rows} x {matrix.cols})"
    fault = f"= 'distributed': {name} {reason}; set 'owner', which takes any matrix"
    return OptionError("tp_mode", fault)


def blocks_reason(before: Sequence[Parameter], after: Sequence[Parameter]) -> str:
    """Note for the user of the mode "blockwise": the number of cut matrices."""
    pairs = zip(before, after, strict=True)
    cut = sum(len({*old.stack.matrices} - {*new.stack.matrices}) for old, new in pairs if old.stack != new.stack)
    return (
        f"tp_mode = 'blockwise' is inexact: of {cut:,} matrices that tensor parallelism cuts, each block is "
        "orthogonalized as a matrix of its own; the authors of MuonBP (arXiv:2510.16981) orthogonalize whole matrices "
        "every few steps, to keep training stable, and this mode never does"
    )


Part = tuple[Intervals | None, Intervals | None]
"""Rows and columns of a part of a parameter; None: all."""


def in_blocks(
    parameters: Sequence[Parameter],
    geometries: Geometries,
    parts_of: Callable[[Geometry], Sequence[Part]],
    label: str = "",
) -> list[Parameter]:
    """Parameters with blocks instead of matrices: the elements of each matrix in each part. `label`: of the parts."""
    stacks = []
    for geometry in geometries.shared:
        parts, stack = parts_of(geometry), geometry.stack
        blocks = (block for matrix in stack.matrices for block in _blocks(matrix, geometry.col_count, parts, label))
        stacks.append(replace(stack, matrices=tuple(blocks)))
    return [replace(p, stack=stacks[geometries.index[number]]) for number, p in enumerate(parameters)]


def _blocks(matrix: MatrixRows, col_count: int, parts: Sequence[Part], label: str) -> Iterator[MatrixRows]:
    every = matrix.cols or (Interval(0, col_count),)
    for place, (down, across) in enumerate(parts):
        rows = matrix.rows if down is None else within(matrix.rows, matrix.row_step, down)
        cols = every if across is None else within(every, matrix.col_step, across)
        if (rows, cols) == (matrix.rows, every):
            yield matrix
        elif rows and cols:
            kept = matrix.cols if across is None else cols
            yield replace(matrix, label=f"{matrix.label}/{label}{place}", rows=rows, cols=kept)


def tensor_parallel_parts(geometry: Geometry) -> list[Part]:
    """The rows or columns of each place on the axis of tensor parallelism; all in one part, if no matrix is cut."""
    layout, split = geometry.layout, geometry.stack.row_dims
    if not geometry.cut_by_peers:
        return [(None, None)]
    axis, shape = layout.tensor_parallel, layout.shape
    assert axis is not None, "tensor parallelism cuts every stack that has blocks"
    placement = layout.placements[axis]
    assert isinstance(placement, Cut), "a replicated tensor is not cut"
    dim, parts = placement.dim, list[Part]()
    for place in range(layout.mesh.shape[axis]):
        # All ranks of a place together, because FSDP cuts further.
        ranks = (at for at in layout.mesh.coordinates.values() if at[axis] == place)
        stored = merged(sorted({interval for at in ranks for interval in region(layout, at)[dim]}))
        dims = [stored if other == dim else merged([Interval(0, size)]) for other, size in enumerate(shape)]
        if dim < split:
            parts.append((flattened(dims[:split], shape[:split]), None))
        else:
            parts.append((None, flattened(dims[split:], shape[split:])))
    return parts


def within(wanted: Intervals, step: int, part: Intervals) -> Intervals:
    """The indices of `part` among every `step`-th index of the wanted intervals."""
    inside = []
    for start, stop in wanted:
        for low, high in part:
            # At a counted index, because the new interval counts steps from its start.
            first, last = start + step * max(0, -(-(low - start) // step)), min(stop, high)
            if first < last:
                inside.append(Interval(first, last))
    return tuple(inside)
