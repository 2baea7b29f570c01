"""Owners are balanced by cost and bytes together, spread within layers, and equal on every rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plans import examples
from titan_muon.engine.layout.work import standard_flops
from titan_muon.planner.ownership import OwnedItem, OwnedTotals, Ownership, assign_owners, load_lines

LLAMA_8B = {"wq": (4096, 4096), "wk": (1024, 4096), "wv": (1024, 4096), "wo": (4096, 4096)} | {
    "w1": (14336, 4096),
    "w2": (4096, 14336),
    "w3": (14336, 4096),
}


def item(fqn: str, layer: str, rows: int, cols: int) -> OwnedItem:
    return OwnedItem(fqn, layer, standard_flops(rows, cols, 5), 4 * rows * cols)


def model(layers: int, shapes: dict[str, tuple[int, int]]) -> list[OwnedItem]:
    return [item(f"{i}.{name}", str(i), *shape) for i in range(layers) for name, shape in shapes.items()]


@st.composite
def items(draw: st.DrawFn) -> list[OwnedItem]:
    side = st.integers(1, 60)
    shapes = draw(st.lists(st.tuples(st.integers(0, 5), side, side), min_size=1, max_size=40))
    return [item(f"{i}", str(layer), rows, cols) for i, (layer, rows, cols) in enumerate(shapes)]


def check_loads(ownership: Ownership, given_items: list[OwnedItem]) -> None:
    loads = ownership.loads()
    assert len(loads) == ownership.size
    assert sum(load.matrices for load in loads) == sum(i.units for i in given_items)
    assert sum(load.bytes for load in loads) == sum(i.bytes for i in given_items)
    assert sum(load.flops for load in loads) == sum(i.flops for i in given_items)


def by_layer(ownership: Ownership) -> dict[str, list[int]]:
    layers = defaultdict(list)
    for item, owners in zip(ownership.items, ownership.owners, strict=True):
        layers[item.layer] += owners
    return layers


@examples(50)
@given(items(), st.integers(1, 12))
def test_every_item_has_an_owner_and_loads_add_up(given_items: list[OwnedItem], size: int) -> None:
    ownership = assign_owners(given_items, size)
    assert all(0 <= owner < size for (owner,) in ownership.owners)
    check_loads(ownership, given_items)


@examples(50)
@given(items(), st.integers(2, 12))
def test_no_rank_owns_a_whole_layer(given_items: list[OwnedItem], size: int) -> None:
    for owners in by_layer(assign_owners(given_items, size)).values():
        assert len(owners) == 1 or len(set(owners)) > 1


@examples(50)
@given(items(), st.integers(1, 12), st.randoms(use_true_random=False))
def test_owners_do_not_depend_on_the_order_of_items(given_items: list[OwnedItem], size: int, random: object) -> None:
    shuffled = list(given_items)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = (assign_owners(these, size) for these in (given_items, shuffled))
    assert dict(zip(first.items, first.owners, strict=True)) == dict(zip(second.items, second.owners, strict=True))


@pytest.mark.parametrize(("size", "longest", "fullest"), [(2, 1.01, 1.05), (8, 1.01, 1.1), (64, 1.06, 1.1)])
def test_llama_8b_is_even_in_flops_and_in_bytes(size: int, longest: float, fullest: float) -> None:
    """The longest path and the most bytes, over the means."""
    loads = assign_owners(model(32, LLAMA_8B), size).loads()
    flops, held = [load.flops for load in loads], [load.bytes for load in loads]
    assert max(flops) <= longest * sum(flops) / size
    assert max(held) <= fullest * sum(held) / size


@st.composite
def stacks(draw: st.DrawFn) -> list[OwnedItem]:
    """Stacks and matrices with equal FLOPs and bytes per unit."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=20))
    return [
        OwnedItem(f"{i}", str(layer), units * cost, units * cost, units) for i, (units, cost, layer) in enumerate(sizes)
    ]


@examples(50)
@given(stacks(), st.integers(1, 12))
def test_a_stack_is_divided_among_different_ranks(given_items: list[OwnedItem], size: int) -> None:
    """On as many ranks as units, in runs like torch.chunk's, none empty."""
    ownership = assign_owners(given_items, size)
    for item, owners in zip(ownership.items, ownership.owners, strict=True):
        assert len(set(owners)) == len(owners)
        assert len(owners) == len(torch.arange(item.units).chunk(min(item.units, size)))
    check_loads(ownership, given_items)


def test_named_owners_are_assigned_first() -> None:
    """A named rank, and a layer with a single rank; balanced items make room."""
    rank = [replace(entry, owner=1) for entry in model(1, {"a": (9, 9), "b": (9, 9)})]
    layers = [
        replace(entry, fqn=f"l{entry.fqn}", layer=f"l{entry.layer}", owner="layer")
        for entry in model(2, {"c": (9, 9), "d": (9, 9)})
    ]
    stack = OwnedItem("e", "e", 4, 4, units=4, owner=2)
    others = [item(f"o{i}", f"o{i}", 9, 9) for i in range(2)]
    ownership = assign_owners([*rank, *layers, stack, *others], 4)
    owners = dict(zip((entry.fqn for entry in ownership.items), ownership.owners, strict=True))
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


def test_the_table_joins_adjacent_ranks_with_equal_loads() -> None:
    owned = OwnedTotals(2, 2**20, 10**9)
    lines = list(load_lines({0: owned, 1: owned, 2: OwnedTotals(0, 0, 0)}))
    assert [line.split() for line in lines] == [
        ["owner", "matrices", "MiB", "GFLOP"],
        ["0-1", "2", "1.0", "1.0"],
        ["2", "0", "0.0", "0.0"],
    ]
