"""The order of the tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, because a worker waits at the end for the last test of the other worker."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/dist/titan"))
