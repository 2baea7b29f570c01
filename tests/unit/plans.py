"""Random parameters, layouts and plans for property tests, and the storage of a layout by PyTorch's placements."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from random import Random

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.machines import rates
from titan_muon.engine.layout.intervals import Pieces
from titan_muon.engine.layout.types import (
    Bucket,
    Cut,
    Interval,
    Layout,
    MatrixRows,
    MatrixStack,
    Mesh,
    Parameter,
    Placement,
    Plan,
    Replicate,
    Separate,
    Shard,
    StridedShard,
)
from titan_muon.engine.layout.work import Elements, Work, WorkOf, standard_elements, standard_flops
from titan_muon.engine.planning import PlanRequest, plan_by_rule
from titan_muon.engine.program.patterns import PATTERNS
from titan_muon.engine.program.two_hops import owning_ranks
from titan_muon.matrices.stacks import stack_of
from titan_muon.options import MuonOptions, Overlap, Split
from titan_muon.planner.machine import MachineRates, planning_machine
from titan_muon.planner.planner import plan_by_search

LONG = int(os.environ.get("TITAN_MUON_LONG", "1"))
"""Times the usual number of examples and seeds: `make test-long`."""


def examples(count: int) -> settings:
    """`count` examples, the same in every run: a failure is never a matter of luck."""
    return settings(
        max_examples=count * LONG,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


EXCHANGES = ("all_to_all", "all_gather", "all_gather_reduce_scatter")
# Machines limited by links, calls or products.
MACHINES = (
    rates(),
    rates(node_gb=1e-6, tflops=1e-9),
    rates(node_latency_us=1e6, tflops=1e-3),
    rates(node_gb=1e3, node_latency_us=0.0, tflops=1e-12),
)
REPLICAS = ("split", "redundant")


def mesh_shapes(size: int, most: int) -> list[tuple[int, ...]]:
    """All shapes of 1 to 4 axes, some of size 1, for up to `most` ranks; `size` limits an axis."""
    shapes: list[tuple[int, ...]] = [()]
    expanded = []
    for _ in range(4):
        shapes = [(*shape, n) for shape in shapes for n in range(1, size + 1) if prod(shape) * n <= most]
        expanded += shapes
    return expanded


MESHES = {world: mesh_shapes(world, world) for world in (1, 2, 3, 4, 6, 8)}
FULL_MESHES = {
    world: [shape for shape in shapes if prod(shape) == world and (1 not in shape or world == 1)]
    for world, shapes in MESHES.items()
}
LARGE_MESHES = mesh_shapes(8, 24)


def placed(shape: Sequence[int], mesh: Mesh, dims: Sequence[int | None], strided: Sequence[bool]) -> Layout:
    """A layout with dim `dims[i]` sharded over axis i (None: replicated).

    Where `strided[i]`, from right to left, as FSDP2 shards over tensor parallelism.
    """
    placements: list[Placement] = []
    for axis, dim in enumerate(dims):
        factor = prod(n for n, other in zip(mesh.shape[axis + 1 :], dims[axis + 1 :], strict=True) if other == dim)
        if dim is None:
            placements.append(Replicate())
        else:
            placements.append(StridedShard(dim, factor) if strided[axis] and factor > 1 else Shard(dim))
    return Layout(tuple(shape), mesh, tuple(placements))


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int], mesh: Mesh) -> Layout:
    axes = {"min_size": len(mesh.shape), "max_size": len(mesh.shape)}
    dims = draw(st.lists(st.sampled_from([None, *range(len(shape)), 0]), **axes))
    layout = placed(shape, mesh, dims, draw(st.lists(st.booleans(), **axes)))
    if draw(st.integers(0, 5)) == 0:
        separate = (Separate() if p == Replicate() else p for p in layout.placements)
        layout = replace(layout, placements=tuple(separate))
    return layout


@st.composite
def meshes(draw: st.DrawFn, world: int) -> Mesh:
    """A mesh of some of the ranks of a world: from the first on, spread out, or in any order."""
    shape = draw(st.sampled_from((FULL_MESHES if draw(st.integers(0, 3)) else MESHES)[world]))
    count = prod(shape)
    if count == world or draw(st.booleans()):
        start, step = draw(st.integers(0, world - count)), 1
    else:
        start, step = 0, world // count
    ranks = [start + i * step for i in range(count)]
    if draw(st.integers(0, 3)) == 0:
        ranks = list(draw(st.permutations(ranks)))
    return Mesh(shape, tuple(ranks))


@st.composite
def stacks(draw: st.DrawFn, fqn: str) -> tuple[tuple[int, ...], MatrixStack]:
    """A whole matrix, experts, heads, projections with alternating rows, or a `dims` notation."""
    kind = draw(st.sampled_from(["matrix", "experts", "heads", "fused", "dims"]))
    if kind == "experts":
        experts = draw(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)))
        return experts, stack_of(fqn, experts)
    if kind == "dims":
        return draw(in_dims(fqn))
    shape = draw(st.tuples(st.integers(1, 13), st.integers(1, 9)))
    if kind == "matrix":
        return shape, stack_of(fqn, shape)
    cuts = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0]), max_size=4))})
    parts = [Interval(a, b) for a, b in pairwise(cuts)]
    if kind == "heads":
        return shape, MatrixStack(1, tuple(MatrixRows(str(i), (part,)) for i, part in enumerate(parts)))
    projections = [rows for rows in (tuple(parts[0::2]), tuple(parts[1::2])) if rows]
    # The second projection may come first.
    projections = draw(st.permutations(projections))
    return shape, MatrixStack(1, tuple(MatrixRows(str(i), rows) for i, rows in enumerate(projections)))


@st.composite
def in_dims(draw: st.DrawFn, fqn: str) -> tuple[tuple[int, ...], MatrixStack]:
    """Up to five axes: counts, rows or columns, in up to three dims."""
    before, after = (draw(st.lists(st.sampled_from(side), max_size=most)) for side, most in (("nr", 2), ("nc", 1)))
    sides = [*before, "r", "c", *after]
    if draw(st.booleans()):
        sides.reverse()
    names = [f"{side}{i}" for i, side in enumerate(sides)]
    sizes = {name: draw(st.integers(1, 4)) for name in names}
    dims: list[list[str]] = []
    for name in names:
        # Rows and columns cannot share a dim.
        mixed = dims and {name[0], *(other[0] for other in dims[-1])} >= {"r", "c"}
        if not dims or mixed or draw(st.booleans()):
            dims.append([])
        dims[-1].append(name)
    left = " ".join(f"({' '.join(axes)})" for axes in dims)
    count, rows, cols = (" ".join(name for name in names if name[0] == side) for side in "nrc")
    shape = tuple(prod(sizes[name] for name in axes) for axes in dims)
    split = Split(match="*", dims=f"{left} -> {count} | ({rows}) ({cols})", lengths=sizes)
    return shape, stack_of(fqn, shape, [split])


def elements_of(full: Tensor, matrix: MatrixRows) -> Tensor:
    """A matrix of a parameter with the 2D view `full`."""
    cols = matrix.cols or (Interval(0, full.shape[1]),)
    strips = torch.cat([full[start : stop : matrix.row_step] for start, stop in matrix.rows])
    return torch.cat([strips[:, start : stop : matrix.col_step] for start, stop in cols], dim=1)


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[Parameter]:
    """Parameters of an optimizer, on separate meshes, or all on one."""
    world = draw(st.sampled_from([4, 1, 2, 3, 4, 4, 6, 6, 8, 8]))
    shared = draw(meshes(world))
    parameters = []
    for index in range(draw(st.sampled_from([1, 2, 3, 3, 4, 4, 5]))):
        fqn = f"layers.{index // 2}.weight{index}"
        shape, stack = draw(stacks(fqn))
        plain = draw(st.integers(0, 7)) == 7
        if plain:
            layout = Layout(shape, Mesh((world,), tuple(range(world))), (Replicate(),))
        else:
            layout = draw(layouts(shape, draw(meshes(world)) if draw(st.booleans()) else shared))
        parameters.append(Parameter(fqn, f"layers.{index // 2}", layout, stack, plain))
    return parameters


def mesh_of(*shape: int) -> Mesh:
    """The first ranks."""
    return Mesh(shape, tuple(range(prod(shape))))


def parameter_of(name: str, shape: tuple[int, ...], mesh: Mesh, *placements: Placement) -> Parameter:
    """A matrix, or a stack of experts."""
    return Parameter(name, name.rpartition(".")[0], Layout(shape, mesh, placements), stack_of(name, shape))


FLAT, SQUARE = mesh_of(4), mesh_of(2, 2)


def matrix(index: int, rows: int, cols: int, mesh: Mesh = FLAT, *placements: Placement) -> Parameter:
    """The matrix of a layer, by default cut into rows."""
    return parameter_of(f"layers.{index}.w", (rows, cols), mesh, *(placements or (Shard(0),)))


def work(parameter: int, rows: int, cols: int) -> Work:
    """The standard iteration in bfloat16, on up to three matrices at a time."""
    return Work("standard", standard_flops(rows, cols, 5), "", 3, 2 * standard_elements(rows, cols))


def mixed_work(parameter: int, rows: int, cols: int) -> Work:
    """Every second parameter travels in float32."""
    return replace(work(parameter, rows, cols), wire_bytes=2 + 2 * (parameter % 2))


def plan_of(parameters: Sequence[Parameter], machine: MachineRates | None = None, **options: object) -> Plan:
    return searched(parameters, work, MuonOptions(**options), machine)


def searched(
    parameters: Sequence[Parameter], work_of: WorkOf, options: MuonOptions, machine: MachineRates | None = None
) -> Plan:
    """The plan by the search, by default on a GPU machine."""
    request = PlanRequest(parameters, work_of, options, Elements())
    return plan_by_search(request, planning_machine(options.machine) if machine is None else machine)


@st.composite
def large(draw: st.DrawFn, mesh: Mesh) -> list[Parameter]:
    """One to three matrices on a mesh, larger than all remaining matrices, with sides in multiples of 8."""
    shapes = draw(st.lists(st.sampled_from([(24, 16), (16, 32), (16, 16)]), min_size=1, max_size=3))
    return [
        Parameter(f"large{index}", "large", draw(layouts(shape, mesh)), stack_of("large", shape))
        for index, shape in enumerate(shapes)
    ]


@st.composite
def plans(draw: st.DrawFn, exchanges: Sequence[str] = EXCHANGES, overlaps: Sequence[Overlap] = ("none",)) -> Plan:
    """Plans of both planners; half of the plans have matrices in random buckets, with random owners."""
    parameters = draw(parameter_lists())
    exchange = draw(st.sampled_from(exchanges))
    # In half of the plans some matrix sets the step's end.
    if draw(st.booleans()):
        parameters += draw(large(parameters[0].layout.mesh))
    machine = draw(st.sampled_from(MACHINES))
    options = MuonOptions(
        exchange=exchange,
        replicas=draw(st.sampled_from(REPLICAS)),
        buffer_gib=draw(st.sampled_from(["auto", 256 / 2**30, 1024 / 2**30, 4096 / 2**30])),
        overlap=draw(st.sampled_from(overlaps)),
        planner=draw(st.sampled_from(["search", "search", "rule"])),
    )
    try:
        plan = either_plan(parameters, machine, options)
    except ValueError:
        # Buffers may be too small.
        plan = either_plan(parameters, machine, replace(options, buffer_gib="auto"))
    way = draw(st.sampled_from([lambda same: same, hierarchical, hopping(2), hopping(3), hopping(4)]))
    return way(recut(plan, Random(draw(st.integers(0, 10**6)))) if draw(st.booleans()) else plan)


def either_plan(parameters: Sequence[Parameter], machine: MachineRates | None, options: MuonOptions) -> Plan:
    """The plan by the planner of the options."""
    if options.planner == "rule":
        return plan_by_rule(PlanRequest(parameters, mixed_work, options, Elements()))
    return searched(parameters, mixed_work, options, machine)


def hierarchical(plan: Plan) -> Plan:
    """The plan with results spread over replicas by all-gathers, wherever the planner may choose so."""
    chosen = (replace(b, exchange="hierarchical") if b.exchange == "all_to_all" else b for b in plan.buckets)
    return replace(plan, buckets=tuple(chosen))


def hopping(ranks_per_node: int) -> Callable[[Plan], Plan]:
    """The plan in two hops through nodes, wherever the planner may choose so."""

    def hops(plan: Plan) -> Plan:
        pieces, two_hops = Pieces.from_plan(plan, ranks_per_node), PATTERNS["two_hops"]
        buckets = []
        for bucket in plan.buckets:
            may_own = {*bucket.owners} <= {*owning_ranks(bucket.group, ranks_per_node)}
            falls_back = any(two_hops.fallback(pieces.kinds[m], bucket.group, pieces) for m in bucket.matrices)
            takes = bucket.exchange == "all_to_all" and may_own and not falls_back
            buckets.append(replace(bucket, exchange="two_hops") if takes else bucket)
        return replace(plan, buckets=tuple(buckets), ranks_per_node=ranks_per_node)

    return hops


def recut(plan: Plan, random: Random) -> Plan:
    """The plan with matrices in random buckets, orders, owners and buffer sets. Every such plan must run."""
    buckets = []
    for bucket in plan.buckets:
        wholes = list(bucket.matrices)
        random.shuffle(wholes)
        while wholes:
            count = random.randint(1, min(3, len(wholes)))
            chosen, wholes = wholes[:count], wholes[count:]
            owners = tuple(random.choice(bucket.group) for _ in chosen) if bucket.owners else ()
            buckets.append(Bucket(bucket.exchange, bucket.group, tuple(chosen), owners))
    if not buckets:
        return plan
    random.shuffle(buckets)
    # Rounds of one to a few buckets, several of them possibly in one group.
    numbers = accumulate((random.random() < 0.6 for _ in buckets[1:]), initial=0)
    numbered = tuple(replace(bucket, round=int(number)) for bucket, number in zip(buckets, numbers, strict=True))
    return replace(plan, buckets=numbered, buffer_sets=random.randint(1, 5))


def ranks_of(plan: Plan) -> list[int]:
    return sorted({rank for parameter in plan.parameters for rank in parameter.layout.mesh.ranks})


def torch_local(layout: Layout, coordinate: Sequence[int], full: Tensor) -> Tensor:
    """PyTorch's shard of a full tensor on the rank at a coordinate, without a process group; of dim 0 the set rows."""
    local = full
    if layout.rows:
        start, stop = layout.rows[torch.arange(len(layout.rows)).view(layout.mesh.shape)[tuple(coordinate)]]
        local = full[start:stop]
    for placement, count, index in zip(layout.placements, layout.mesh.shape, coordinate, strict=True):
        if not isinstance(placement, Cut) or (layout.rows and placement.dim == 0):
            continue
        cut: TorchShard | _StridedShard = TorchShard(placement.dim)
        if isinstance(placement, StridedShard):
            cut = _StridedShard(placement.dim, split_factor=placement.split_factor)
        local = cut._split_tensor(local, count, with_padding=False)[0][index]
    return local


def coordinates(mesh: Mesh) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each rank of a mesh and the coordinate, by PyTorch's arithmetic."""
    where = torch.arange(len(mesh.ranks)).view(mesh.shape)
    for position, rank in enumerate(mesh.ranks):
        yield rank, tuple((where == position).nonzero()[0].tolist())
