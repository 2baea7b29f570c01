"""Matrices that tensor parallelism cuts, given to whole tensor-parallel groups: a slice for each rank, or all of it."""

from __future__ import annotations

from dataclasses import replace

from ...options import MuonOptions, OptionError
from ..exchange.all_gather import PATTERNS
from ..terms.layout import Geometries
from ..terms.slices import Ranks, divides, slices_of
from ..terms.work import WorkOf
from .owners import OwnerOf, Task
from .problem import Problem
from .slices import ALWAYS, Offer, Offers, balance, cut, loads, one_owner_fault, picoseconds, slices_fault, timed


def check_tensor_parallel(options: MuonOptions, geometries: Geometries) -> None:
    """Raise OptionError if tensor parallelism cuts no matrix, or if other options are not for its mode."""
    if options.tensor_parallel == "owner":
        return
    if not any(geometry.cut_by_peers for geometry in geometries.shared):
        raise OptionError(
            "tensor_parallel",
            f"= {options.tensor_parallel!r} is about matrices that a mesh axis named 'tp' cuts, and there is none: "
            "name that axis of the DTensors' mesh so, or set 'owner'",
        )
    if fault := _fault(options):
        raise _refused(options, f"{fault}, or tensor_parallel = 'owner'")


def given_to_groups(options: MuonOptions) -> bool:
    """Whether whole tensor-parallel groups are given the matrices that tensor parallelism cuts."""
    return options.tensor_parallel in ("distributed", "duplicated")


def _refused(options: MuonOptions, problem: str) -> OptionError:
    return OptionError("tensor_parallel", f"= {options.tensor_parallel!r}: {problem}")


def _fault(options: MuonOptions) -> str:
    """What other option is not for the mode, and what would be; empty if none."""
    mode = options.tensor_parallel
    if mode == "blockwise":
        return ""
    if options.split_over != 1:
        return f"split_over = {options.split_over!r} gives other ranks slices; choose 1"
    if mode == "distributed" and options.replicas != "split":
        return f"replicas = {options.replicas!r} may repeat the work, each copy for itself; choose 'split'"
    if mode == "duplicated" and options.exchange != "all_to_all":
        return f"exchange = {options.exchange!r} takes no part back from a rank of its own; choose 'all_to_all'"
    return slices_fault(options) if mode == "distributed" else one_owner_fault(options)


def with_peers(problem: Problem, work_of: WorkOf) -> Problem:
    """The problem with what tensor parallelism cuts given to its groups, each matrix to the one that is done first.

    Raises OptionError for a matrix that none of them can have.
    """
    offers = _offers(problem, work_of)
    shared = balance(problem, timed(problem), loads(problem), offers, ALWAYS)
    if problem.options.tensor_parallel == "distributed":
        return cut(problem, offers, shared)
    # What the others of the group do follows from who owns it.
    owners: OwnerOf = {
        (task.matrix, task.group): ranks[0] for task, ranks in zip(problem.tasks, shared.owners, strict=True)
    }
    return replace(problem, pattern=PATTERNS["duplicated"], owners=owners)


def _offers(problem: Problem, work_of: WorkOf) -> Offers:
    pieces, found, known = problem.costs.pieces, Offers(), dict[tuple[int, int], Offer]()
    for task in problem.tasks:
        if pieces.matrices[task.matrix].index not in pieces.geometry(task.matrix).cut_by_peers:
            continue
        kind = pieces.kinds[task.matrix], task.group
        if kind not in known:
            known[kind] = _offer(problem, task, work_of)
        found[task.matrix, task.group] = (known[kind],)
    return found


def _offer(problem: Problem, task: Task, work_of: WorkOf) -> Offer:
    """A matrix for any of the tensor-parallel groups that are within the ranks which assemble it."""
    costs, members = problem.costs, frozenset(problem.groups[task.group])
    matrix, peers = costs.pieces.matrices[task.matrix], costs.pieces.geometry(task.matrix).peers
    teams = tuple(dict.fromkeys(ranks for ranks in peers.values() if members.issuperset(ranks)))
    if not teams:
        raise _unfit(problem, task, "has parts on some ranks of each tensor-parallel group alone")
    if problem.options.tensor_parallel == "duplicated":
        work = costs.works[matrix.work]
        return Offer(1, work, picoseconds(costs, matrix, work), teams)
    count, shape = len(teams[0]), (matrix.rows, matrix.cols)
    if not divides(problem.parameters[matrix.parameter].stack.matrices[matrix.index], shape, count):
        raise _unfit(problem, task, f"cannot be cut into {count} equal slices, whose number has to divide both sides")
    # The slices of a matrix go by ascending ranks, whatever their order on the axis.
    near = tuple(tuple(sorted(ranks)) for ranks in teams if _on_one_node(ranks, costs.machine.ranks_per_node))
    if not near:
        raise _unfit(problem, task, "is cut over several nodes (machine.ranks_per_node), where slices meet slowly")
    work = work_of(matrix.parameter, *shape, count)
    return Offer(count, work, picoseconds(costs, slices_of(matrix, 0, 0, 0, count)[0], work), near)


def _on_one_node(ranks: Ranks, ranks_per_node: int) -> bool:
    return len({rank // ranks_per_node for rank in ranks}) == 1


def _unfit(problem: Problem, task: Task, why: str) -> OptionError:
    matrix = problem.costs.pieces.matrices[task.matrix]
    parameter = problem.parameters[matrix.parameter]
    name = f"{parameter.fqn} ({matrix.rows} x {matrix.cols})"
    return _refused(problem.options, f"{name} {why}; set 'owner', which takes any matrix")
