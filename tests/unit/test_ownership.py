"""Owners are balanced by cost and bytes together, spread within layers, and the same for every rank that asks."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_muon.plan.cost import standard_flops
from titan_muon.plan.ownership import OwnedItem, OwnedTotals, Ownership, assign_owners, load_lines

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


def by_layer(ownership: Ownership) -> dict[str, list[int]]:
    found = defaultdict(list)
    for each, owners in zip(ownership.items, ownership.owners, strict=True):
        found[each.layer] += owners
    return found


@given(items(), st.integers(1, 12))
def test_every_item_has_an_owner_and_loads_add_up(given_items: list[OwnedItem], size: int) -> None:
    ownership = assign_owners(given_items, size)
    assert all(0 <= owner < size for (owner,) in ownership.owners)
    loads = ownership.loads()
    assert len(loads) == size
    assert sum(load.matrices for load in loads) == len(given_items)
    assert sum(load.bytes for load in loads) == sum(i.bytes for i in given_items)
    assert sum(load.flops for load in loads) == sum(i.flops for i in given_items)


@given(items(), st.integers(2, 12))
def test_no_rank_owns_a_whole_layer(given_items: list[OwnedItem], size: int) -> None:
    for owners in by_layer(assign_owners(given_items, size)).values():
        assert len(owners) == 1 or len(set(owners)) > 1


@given(items(), st.integers(1, 12), st.randoms(use_true_random=False))
def test_owners_do_not_depend_on_the_order_of_items(given_items: list[OwnedItem], size: int, random: object) -> None:
    shuffled = list(given_items)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = (assign_owners(these, size) for these in (given_items, shuffled))
    assert dict(zip(first.items, first.owners, strict=True)) == dict(zip(second.items, second.owners, strict=True))


@given(st.integers(1, 8), st.integers(1, 8))
def test_more_ranks_than_matrices_leave_ranks_without_any(matrices: int, more: int) -> None:
    ownership = assign_owners([item(f"{i}", f"{i}", 8, 8) for i in range(matrices)], matrices + more)
    assert sorted(load.matrices for load in ownership.loads()) == [0] * more + [1] * matrices


@pytest.mark.parametrize(("size", "longest", "fullest"), [(2, 1.01, 1.05), (8, 1.01, 1.1), (64, 1.06, 1.1)])
def test_llama_8b_is_even_in_flops_and_in_bytes(size: int, longest: float, fullest: float) -> None:
    """Longest path and most bytes over their means."""
    loads = assign_owners(model(32, LLAMA_8B), size).loads()
    flops, held = [load.flops for load in loads], [load.bytes for load in loads]
    assert max(flops) <= longest * sum(flops) / size
    assert max(held) <= fullest * sum(held) / size


def test_bytes_have_a_limit_of_their_own() -> None:
    """Matrices that cost little and weigh much do not pile up where little is computed."""
    costly = [item(f"c{i}", f"c{i}", 60, 60) for i in range(3)]
    heavy = [OwnedItem(f"h{i}", f"h{i}", 1, 4 * 6000) for i in range(12)]
    held = [load.bytes for load in assign_owners(costly + heavy, 4).loads()]
    assert max(held) <= 1.3 * sum(held) / 4


def test_the_table_joins_neighbours_that_own_equally_much() -> None:
    owned = OwnedTotals(2, 2**20, 10**9)
    lines = list(load_lines({0: owned, 1: owned, 2: OwnedTotals(0, 0, 0)}))
    assert [line.split() for line in lines] == [
        ["owner", "matrices", "MiB", "GFLOP"],
        ["0-1", "2", "1.0", "1.0"],
        ["2", "0", "0.0", "0.0"],
    ]
