"""docs/memory.md has the dry run's figures for each combination of options."""

from docs import make_memory


def test_the_page_says_what_the_dry_run_says() -> None:
    """`python docs/make_memory.py` updates the page."""
    page = make_memory.PAGE.read_text(encoding="utf-8")
    assert page == make_memory.written(page)
