"""docs/compatibility.md has every excluded pair of options, with the code's messages."""

import inspect

import pytest

from docs import make_compatibility
from titan_muon.titan.recipe import constraints
from titan_muon.titan.recipe.degrees import TORCH_NEEDS


@pytest.mark.parametrize(
    "table",
    [pytest.param(t, marks=pytest.mark.slow if t == "options" else ()) for t in make_compatibility.TABLES],
)
def test_the_page_has_the_refusals_of_the_code(table: str) -> None:
    """`python docs/make_compatibility.py` updates the page."""
    page = make_compatibility.PAGE.read_text(encoding="utf-8")
    begin, end = make_compatibility.BEGIN.format(table), make_compatibility.END.format(table)
    assert page.partition(begin)[2].partition(end)[0] == make_compatibility.TABLES[table]()


def test_every_option_of_muon_is_tried() -> None:
    tried = {name for name, _ in make_compatibility.settings()}
    assert {item.name for item in make_compatibility.fields(make_compatibility.MuonOptions)} - tried == {"machine"}


def test_every_check_of_related_keys_is_on_the_page() -> None:
    """Without a sample that violates the check, the page has no row."""
    checks = inspect.getsource(constraints).count("\n        yield ")
    assert len(make_compatibility.recipe_pairs().splitlines()[2:]) == checks


def test_every_key_that_needs_a_newer_torch_is_on_the_page_with_the_reason() -> None:
    page = make_compatibility.PAGE.read_text(encoding="utf-8")
    for need in TORCH_NEEDS:
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{need.key}") and "torch before" in line)
        assert row.endswith(f"| torch before {'.'.join(map(str, need.torch))} | {need.cause} |")
