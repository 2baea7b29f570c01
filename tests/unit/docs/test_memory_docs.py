"""docs/memory.md has the dry run's figures for each combination of options."""

from docs import make_memory


def test_the_page_has_the_figures_of_the_dry_run() -> None:
    """`python docs/make_memory.py` updates the page."""
    page = make_memory.PAGE.read_text(encoding="utf-8")
    assert page == make_memory.written(page)
