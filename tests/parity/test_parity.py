"""Every row of the table holds on every rank."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dist.harness import World
from tests.parity.checkpoints import Chain, chains, continued
from tests.parity.table import rows
from tests.parity.training import Row, differences


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    made = {size: World(size, quiet=True) for size in (1, 2, 4, 8)}
    yield made
    for world in made.values():
        world.close()


@pytest.mark.parametrize("row", rows(), ids=str)
def test_a_row_has_the_bits_of_its_reference(row: Row, worlds: dict[int, World]) -> None:
    different = worlds[row.world].run(differences, row)
    assert not any(different), f"{row}: {different}"


@pytest.mark.parametrize("chain", chains(), ids=str)
def test_a_chain_of_checkpoints_has_the_bits_of_its_reference(
    chain: Chain, worlds: dict[int, World], tmp_path: Path
) -> None:
    for number, (size, layout, options) in enumerate(chain.stages):
        layouts = (layout,) if isinstance(layout, str) else layout
        row = replace(chain.row, world=size, layouts=layouts, options=options)
        folders = str(tmp_path / str(number - 1)), str(tmp_path / str(number))
        different = worlds[size].run(continued, row, chain.titan, number, *folders)
        assert not any(different), f"{chain}, {layout} on {size} ranks: {different}"
