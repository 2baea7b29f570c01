"""Owners: balanced by FLOPs within a soft cap on bytes, the same on every rank; and keepers of replicated momentum."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plans import examples, matrix, mesh_of, parameter_lists, parameter_of, ranks_of, searched, work
from titan_muon.engine.layout.intervals import Geometries, Pieces
from titan_muon.engine.layout.types import Bucket, Parameter, Plan, Replicate, Separate, Shard
from titan_muon.engine.layout.work import Work, standard_flops
from titan_muon.engine.planning import OwnerOf, Task, in_order
from titan_muon.engine.program.program import make_program
from titan_muon.options import MuonOptions
from titan_muon.planner.owners import (
    BYTES_OVER_MEAN,
    balanced,
    momentum_ranks,
    state_elements,
    state_totals,
    with_state_ranks,
)
from titan_muon.planner.ownership import OwnedItem, Ownership, assign_owners
from titan_muon.planner.totals import Totals

# Matrices that travel


def tasks_of(flops: list[int], group: int = 0, per_layer: int = 1) -> list[Task]:
    return [Task(i, group, f, f, f"layers.{i // per_layer}") for i, f in enumerate(flops)]


def most(owners: OwnerOf, tasks: list[Task]) -> int:
    """FLOPs of the rank with most."""
    total = Counter[int]()
    for task in tasks:
        total[owners[task.matrix, task.group]] += task.flops
    return max(total.values())


@examples(100)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 12))
def test_balanced_is_within_four_thirds_of_the_best(flops: list[int], ranks: int) -> None:
    """Graham's bound, against max(mean, largest, two of the ranks + 1 largest), a lower bound of the optimum."""
    tasks = tasks_of(flops)
    path = most(balanced(tasks, [tuple(range(ranks))], {}), tasks)
    ordered = sorted(flops, reverse=True)
    pair = ordered[ranks - 1] + ordered[ranks] if len(flops) > ranks else 0
    mean = -(-sum(flops) // ranks)
    assert path <= 4 / 3 * max(mean, ordered[0], pair) + ordered[0]
    if len(flops) <= ranks:
        assert path == ordered[0]


@examples(75)
@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=60), st.integers(1, 8))
def test_bytes_stay_below_the_cap_unless_every_rank_is_full(sizes: list[tuple[int, int]], ranks: int) -> None:
    tasks = [Task(i, 0, flops, bytes_, "l") for i, (flops, bytes_) in enumerate(sizes)]
    owners = balanced(tasks, [tuple(range(ranks))], {})
    mean, largest = sum(b for _, b in sizes) / ranks, max(b for _, b in sizes)
    held = Counter[int]()
    for task in tasks:
        held[owners[task.matrix, 0]] += task.bytes
    cap = max(BYTES_OVER_MEAN * mean, largest)
    # Once all ranks are at the cap, FLOPs decide.
    if max(held.values()) > cap:
        assert all(held[rank] + largest > cap for rank in range(ranks))


def test_a_large_group_evens_out_a_small_group_and_matrices_of_a_layer_are_spread() -> None:
    """Only ranks 0 and 1 can own the experts; the dense matrices then go to ranks 2 and 3."""
    tasks = [*(Task(i, 0, 10, 10, "d") for i in range(4)), *(Task(i, 1, 10, 10, "e") for i in range(4, 8))]
    assert most(balanced(tasks, ((0, 1, 2, 3), (0, 1)), {}), tasks) == 20
    alike = tasks_of([400, 300, 200, 100] * 4, per_layer=4)
    owners = balanced(alike, ((0, 1, 2, 3),), {})
    assert len({(task.layer, owners[task.matrix, 0]) for task in alike}) == len(alike)


def test_the_states_of_matrices_spread_over_the_ranks() -> None:
    """Two matrices have large states and little work. By FLOPs, one rank would own both."""
    parameters = [matrix(i, side, side, mesh_of(2)) for i, side in enumerate((512, 64, 64))]
    holders = []
    for size in (0, 10**8):
        works = [
            Work("soap", side**3, bytes=1, state_bytes=state) for side, state in ((512, 0), (64, size), (64, size))
        ]
        plan = searched(parameters, lambda parameter, rows, cols, works=works: works[parameter], MuonOptions())
        owner = {m: o for bucket in plan.buckets for m, o in zip(bucket.matrices, bucket.owners, strict=True)}
        holders.append(len({owner[1], owner[2]}))
    assert holders == [1, 2]


def test_an_owner_gets_neighbours_at_the_cost_of_before() -> None:
    """Six ranks cut the rows of each of 12 experts. The search deals the experts in turn."""
    plan = searched([parameter_of("layers.0.experts", (12, 12, 8), mesh_of(6), Shard(1))], work, MuonOptions())
    for bucket in plan.buckets:
        assert list(bucket.matrices) == sorted(bucket.matrices)
        assert len(list(groupby(bucket.owners))) == len({*bucket.owners})
    pieces = Pieces(plan.matrices, Geometries(plan.parameters))
    dealt = Bucket("all_to_all", tuple(range(6)), tuple(reversed(range(12))), tuple(n % 6 for n in range(12)))
    ordered = in_order(dealt, pieces, {})
    totals = [Totals(pieces).of(bucket) for bucket in (dealt, ordered)]
    assert totals[0] == totals[1]
    assert ordered.owners == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5)
    assert in_order(dealt, pieces, {0: (5,)}).owners[0] == 5, "an owner keeps a matrix that only it may own"


# Owned parameters and stacks

ATTENTION_8B = {"wq": (4096, 4096), "wk": (1024, 4096), "wv": (1024, 4096), "wo": (4096, 4096)}
LLAMA_8B = ATTENTION_8B | {"w1": (14336, 4096), "w2": (4096, 14336), "w3": (14336, 4096)}


def item(fqn: str, layer: str, rows: int, cols: int) -> OwnedItem:
    return OwnedItem(fqn, layer, standard_flops(rows, cols, 5), 4 * rows * cols)


def model(layers: int, shapes: dict[str, tuple[int, int]]) -> list[OwnedItem]:
    return [item(f"{i}.{name}", str(i), *shape) for i in range(layers) for name, shape in shapes.items()]


@st.composite
def items(draw: st.DrawFn) -> list[OwnedItem]:
    side = st.integers(1, 60)
    shapes = draw(st.lists(st.tuples(st.integers(0, 5), side, side), min_size=1, max_size=40))
    return [item(f"{i}", str(layer), rows, cols) for i, (layer, rows, cols) in enumerate(shapes)]


@st.composite
def stacks(draw: st.DrawFn) -> list[OwnedItem]:
    """Stacks and matrices with equal FLOPs and bytes per unit."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=20))
    return [
        OwnedItem(f"{i}", str(layer), units * cost, units * cost, units) for i, (units, cost, layer) in enumerate(sizes)
    ]


def owners_by_name(ownership: Ownership) -> dict[str, tuple[int, ...]]:
    return dict(zip((entry.fqn for entry in ownership.items), ownership.owners, strict=True))


@examples(100)
@given(st.one_of(items(), stacks()), st.integers(1, 12), st.randoms(use_true_random=False))
def test_owners_are_in_the_world_and_add_up_in_any_order(drawn: list[OwnedItem], size: int, random: Any) -> None:
    """A stack is on as many ranks as units, in runs like torch.chunk's, none empty."""
    ownership = assign_owners(drawn, size)
    for entry, owners in zip(ownership.items, ownership.owners, strict=True):
        assert all(0 <= owner < size for owner in owners)
        assert len({*owners}) == len(owners) == len(torch.arange(entry.units).chunk(min(entry.units, size)))
    loads = ownership.loads()
    assert len(loads) == size
    assert sum(load.matrices for load in loads) == sum(i.units for i in drawn)
    assert sum(load.bytes for load in loads) == sum(i.bytes for i in drawn)
    assert sum(load.flops for load in loads) == sum(i.flops for i in drawn)
    shuffled = random.sample(drawn, len(drawn))
    assert owners_by_name(assign_owners(shuffled, size)) == owners_by_name(ownership)


@examples(50)
@given(items(), st.integers(2, 12))
def test_no_rank_owns_a_whole_layer(drawn: list[OwnedItem], size: int) -> None:
    ownership, layers = assign_owners(drawn, size), defaultdict[str, list[int]](list)
    for entry, owners in zip(ownership.items, ownership.owners, strict=True):
        layers[entry.layer] += owners
    assert all(len(owners) == 1 or len(set(owners)) > 1 for owners in layers.values())


@pytest.mark.parametrize(("size", "longest", "fullest"), [(2, 1.01, 1.05), (8, 1.01, 1.1), (64, 1.06, 1.1)])
def test_llama_8b_is_even_in_flops_and_in_bytes(size: int, longest: float, fullest: float) -> None:
    """The longest path and the most bytes, over the means."""
    loads = assign_owners(model(32, LLAMA_8B), size).loads()
    flops, held = [load.flops for load in loads], [load.bytes for load in loads]
    assert max(flops) <= longest * sum(flops) / size
    assert max(held) <= fullest * sum(held) / size


def test_named_owners_are_assigned_first() -> None:
    """A named rank, and a layer with a single rank; balanced items make room."""
    rank = [replace(entry, owner=1) for entry in model(1, {"a": (9, 9), "b": (9, 9)})]
    layers = [
        replace(entry, fqn=f"l{entry.fqn}", layer=f"l{entry.layer}", owner="layer")
        for entry in model(2, {"c": (9, 9), "d": (9, 9)})
    ]
    stack = OwnedItem("e", "e", 4, 4, units=4, owner=2)
    others = [item(f"o{i}", f"o{i}", 9, 9) for i in range(2)]
    owners = owners_by_name(assign_owners([*rank, *layers, stack, *others], 4))
    assert owners["0.a"] == owners["0.b"] == (1,)
    assert owners["e"] == (2,)
    assert owners["l0.c"] == owners["l0.d"] != owners["l1.c"] == owners["l1.d"]
    assert (1,) not in (owners["o0"], owners["o1"])
    with pytest.raises(ValueError, match="o0 cannot have owner = 4; 0 to 3 can own it"):
        assign_owners([replace(others[0], owner=4)], 4)


def test_parameters_without_orthogonalization_are_even_in_bytes() -> None:
    """Beside a matrix: by FLOPs, ranks without the matrix would get everything."""
    free = [OwnedItem(f"f{i}", f"f{i}", 0, 100) for i in range(9)]
    loads = assign_owners([OwnedItem("c", "c", 10**6, 100), *free], 2).loads()
    assert [load.bytes for load in loads] == [500, 500]


# Keepers of replicated momentum: each momentum once in the world, on ranks with a send to the owner

OWNER = MuonOptions(state="owner", wire_dtype="float32")
DDP = mesh_of(4), Replicate()
HSDP = mesh_of(2, 2), Replicate(), Shard(0)


def kept_on_owners(parameters: list[Parameter]) -> Plan:
    return searched(parameters, work, OWNER)


def held_by_ranks(plan: Plan) -> dict[int, dict[int, int]]:
    """Elements of momentum by rank and parameter; the sums are those of the summary."""
    placed, geometries = list(enumerate(plan.parameters)), Geometries(plan.parameters)
    held = {
        rank: {n: state_elements(geometries[n], p.state_ranks, rank) for n, p in placed if rank in p.layout.mesh.ranks}
        for rank in ranks_of(plan)
    }
    assert state_totals(plan, geometries) == Counter({rank: sum(mine.values()) for rank, mine in held.items()})
    return held


def advanced(plan: Plan, rank: int) -> Counter[int]:
    """Elements of momentum advanced by a rank in a step, by parameter: the packed elements under `state = "owner"`."""
    program, elements = make_program(plan, rank), Counter[int]()
    for run in program.buckets:
        for parcels, kept in ((run.stored, False), (run.gathering.home, True)):
            for parcel in parcels:
                number = plan.matrices[parcel.matrix].parameter
                elements[number] += parcel.piece.numel if bool(plan.parameters[number].state_ranks) == kept else 0
    return +elements


@examples(50)
@given(parameter_lists())
def test_every_momentum_is_kept_once_on_the_advancing_rank(parameters: list[Parameter]) -> None:
    plan = kept_on_owners([entry for entry in parameters if not entry.separate])
    kept, total = held_by_ranks(plan), Counter[int]()
    for rank in ranks_of(plan):
        assert advanced(plan, rank) == +Counter(kept[rank])
        total.update(kept[rank])
    for number, entry in enumerate(plan.parameters):
        assert total[number] == sum(m.numel for m in plan.matrices if m.parameter == number), entry.fqn


@pytest.mark.parametrize(
    ("placed", "shapes", "uneven"),
    # Small cheap matrices are balanced by bytes: by FLOPs, none would be on the large matrix's rank.
    [(DDP, [(8, 16)] * 12, 1), (HSDP, [(8, 16)] * 12, 1), (DDP, [(64, 64), *[(1, 256)] * 32], 1.5)],
)
def test_momentum_is_divided_evenly(placed: tuple[Any, ...], shapes: list[tuple[int, int]], uneven: float) -> None:
    plan = kept_on_owners([parameter_of(f"layers.{i}.w", shape, *placed) for i, shape in enumerate(shapes)])
    held = [sum(elements.values()) for elements in held_by_ranks(plan).values()]
    assert max(held) <= uneven * sum(held) / 4


@pytest.mark.parametrize(("experts", "parts"), [(8, [2, 2, 2, 2]), (10, [3, 3, 3, 1]), (5, [2, 2, 1]), (2, [1, 1])])
def test_a_stack_is_kept_in_chunks_of_whole_experts_on_the_owners(experts: int, parts: list[int]) -> None:
    plan = kept_on_owners([parameter_of("experts", (experts, 4, 6), *DDP)])
    ranks, kept = plan.parameters[0].state_ranks, held_by_ranks(plan)
    assert len(set(ranks)) == len(parts)
    assert [kept[rank][0] // 24 for rank in ranks] == parts
    owners = [momentum_ranks(plan.parameters[0], expert) for expert in range(experts)]
    assert owners == [(rank,) for rank, part in zip(ranks, parts, strict=True) for _ in range(part)]


def test_keepers_stay_when_the_step_is_planned_again() -> None:
    planned = with_state_ranks([parameter_of(name, (8, 8), *DDP) for name in "abcd"], OWNER, work, {})
    kept = {entry.fqn: entry.state_ranks for entry in planned}
    more = [parameter_of("z", (16, 16), *DDP), *(replace(entry, state_ranks=()) for entry in planned)]
    again = {entry.fqn: entry.state_ranks for entry in with_state_ranks(more, OWNER, work, kept)}
    assert {name: again[name] for name in kept} == kept
    assert len(again["z"]) == 1


def test_a_rank_keeps_the_momentum_of_rank_specific_matrices() -> None:
    plan = kept_on_owners([parameter_of("own", (8, 8), DDP[0], Separate()), parameter_of("copy", (8, 8), *DDP)])
    assert plan.parameters[0].state_ranks == ()
    assert [held[0] for held in held_by_ranks(plan).values()] == [64] * 4
