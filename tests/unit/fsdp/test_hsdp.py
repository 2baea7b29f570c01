"""Which parts of a module's flat gradients are summed for which replica."""

from hypothesis import given
from hypothesis import strategies as st

from titan_muon.fsdp.replica_gradients import ALL, NONE, Segment, segments

GRADIENTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from((ALL, NONE, 0, 1, 2))).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
    )
)


def test_neighbours_of_one_replica_are_one_segment_unless_padding_is_between() -> None:
    found = segments([(4, 4, 1), (6, 6, 1), (3, 5, 1), (2, 2, 1), (0, 2, 0), (1, 1, ALL)])
    assert found == (Segment(0, 13, 1), Segment(15, 17, 1), Segment(19, 20, ALL))


@given(GRADIENTS)
def test_every_element_but_padding_is_in_the_segment_of_its_replica(gradients: list[tuple[int, int, int]]) -> None:
    expected, start = {}, 0
    for elements, padded, replica in gradients:
        expected |= dict.fromkeys(range(start, start + elements), replica)
        start += padded
    found = segments(gradients)
    assert [place for each in found for place in range(each.start, each.stop)] == sorted(expected)
    assert {place: each.replica for each in found for place in range(each.start, each.stop)} == expected
