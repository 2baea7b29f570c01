"""Orthogonalization by whole tensor-parallel groups, a slice per rank."""

from __future__ import annotations

from collections.abc import Sequence

from ...options import MuonOptions, OptionError
from ..terms.blocks import in_blocks
from ..terms.layout import Geometries
from ..terms.slices import divides, slices_of
from ..terms.types import Parameter
from ..terms.work import WorkOf
from .owners import Task
from .problem import Problem
from .slices import ALWAYS, SliceOption, balance, cut, loads, options_of, picoseconds, slices_fault, timed


def read_in_mode(parameters: Sequence[Parameter], options: MuonOptions) -> tuple[Sequence[Parameter], Geometries]:
    """The parameters in the mode `options.tensor_parallel`, and the pieces.

    Raises OptionError if tensor parallelism cuts no matrix, or if the options contradict the mode.
    """
    geometries = Geometries(parameters)
    if options.tensor_parallel == "owner":
        return parameters, geometries
    if not any(geometry.cut_by_peers for geometry in geometries.shared):
        raise OptionError(
            "tensor_parallel",
            f"= {options.tensor_parallel!r} is about matrices that a mesh axis named 'tp' cuts, and there is none: "
            "name that axis of the DTensors' mesh so, or set 'owner'",
        )
    if fault := _fault(options):
        raise _refused(options, f"{fault}, or tensor_parallel = 'owner'")
    if options.tensor_parallel == "blockwise":
        blocks = in_blocks(parameters, geometries)
        return blocks, Geometries(blocks)
    return parameters, geometries


def distributes(options: MuonOptions) -> bool:
    """Whether whole tensor-parallel groups orthogonalize cut matrices."""
    return options.tensor_parallel == "distributed"


def _refused(options: MuonOptions, problem: str) -> OptionError:
    return OptionError("tensor_parallel", f"= {options.tensor_parallel!r}: {problem}")


def _fault(options: MuonOptions) -> str:
    if not distributes(options):
        return ""
    if options.split_over != 1:
        return f"split_over = {options.split_over!r} assigns slices to other ranks; choose 1"
    if options.replicas != "split":
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
    return cut(problem, choices, balance(problem, timed(problem), loads(problem), choices, ALWAYS))


def _team_option(problem: Problem, task: Task, work_of: WorkOf) -> SliceOption:
    costs, members = problem.costs, frozenset(problem.groups[task.group])
    matrix, peers = costs.pieces.matrices[task.matrix], costs.pieces.geometry(task.matrix).peers
    teams = tuple(dict.fromkeys(ranks for ranks in peers.values() if members.issuperset(ranks)))
    if not teams:
        raise _unfit(problem, task, "has parts only on some ranks of each tensor-parallel group")
    count, shape = len(teams[0]), (matrix.rows, matrix.cols)
    if not divides(problem.parameters[matrix.parameter].stack.matrices[matrix.index], shape, count):
        raise _unfit(problem, task, f"cannot be cut into {count} equal slices, because {count} must divide both sides")
    # Slices follow ascending ranks, in any order on the mesh axis.
    on_node = tuple(tuple(sorted(r)) for r in teams if len({rank // costs.machine.ranks_per_node for rank in r}) == 1)
    if not on_node:
        reason = "is cut over several nodes (machine.ranks_per_node), with slow links between slices"
        raise _unfit(problem, task, reason)
    work = work_of(matrix.parameter, *shape, count)
    return SliceOption(count, work, picoseconds(costs, slices_of(matrix, 0, 0, 0, count)[0], work), on_node)


def _unfit(problem: Problem, task: Task, reason: str) -> OptionError:
    matrix = problem.costs.pieces.matrices[task.matrix]
    parameter = problem.parameters[matrix.parameter]
    name = f"{parameter.fqn} ({matrix.rows} x {matrix.cols})"
    return _refused(problem.options, f"{name} {reason}; set 'owner', which takes any matrix")
