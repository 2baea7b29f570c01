"""The order of the tests, and worlds of ranks."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.dist.harness import World

with contextlib.suppress(ModuleNotFoundError):
    # Prepares TorchTitan for this machine, where it is installed, before a test module imports it.
    import titan_muon.trainer  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, because a worker waits at the end for the last test of the other worker."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/dist/titan"))


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    """By size, ranks that start with the first run and stay for the tests of a module."""
    made = {size: World(size, quiet=True) for size in (1, 2, 4, 8)}
    yield made
    for world in made.values():
        world.close()
