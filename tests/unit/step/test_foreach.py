"""Rectangles of a parameter's storage for its parts."""

import pytest
import torch

from titan_muon.engine.layout.intervals import Span
from titan_muon.engine.step.foreach import Rectangle, rectangle_of

EVERY, OTHER = slice(0, 5), slice(0, 5, 2)


@pytest.mark.parametrize(
    ("local", "place"),
    [
        ((EVERY, EVERY), None),
        ((slice(1, 3), EVERY), slice(1, 3)),
        ((EVERY, slice(1, 3)), (EVERY, slice(1, 3))),
        # From the first to the last row, with gaps: gate and up rows alternate.
        ((OTHER, EVERY), OTHER),
        ((EVERY, OTHER), (EVERY, OTHER)),
    ],
    ids=str,
)
def test_a_rectangle_covers_the_span_of_the_storage(
    local: tuple[slice, slice], place: tuple[slice, slice] | slice | None
) -> None:
    stored = torch.arange(25.0).view(5, 5)
    part = rectangle_of(7, Span(local, local, local), stored)
    assert part == Rectangle(7, place)
    assert torch.equal(part.of(stored), stored[local])
