"""Names that another package registers."""

from collections.abc import Iterator

import pytest

from titan_muon import registry


@pytest.fixture(autouse=True, scope="package")
def registered_names() -> Iterator[None]:
    """The optimizer `mine` and the placement `x`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.optimizers._values, "mine", registry.OptimizerEntry(dict))
        patch.setitem(registry.placements._values, "x", lambda parallelize, recipe: parallelize)
        yield
