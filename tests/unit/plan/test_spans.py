"""Spans of a modelled step, as shown on the page and in the picture."""

import itertools
from collections import defaultdict

import pytest

from tests.unit.plan.test_timeline import parameters
from tests.unit.plans import plan_of
from titan_muon.options import Machine
from titan_muon.plan.cost.timeline import LOCAL, spans, timeline
from titan_muon.plan.terms.machine import MACHINES

H100 = MACHINES["h100x8"]


@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_spans_end_with_the_step_and_computing_spans_do_not_overlap(ranks: int) -> None:
    plan = plan_of(parameters(7, ranks), machine=Machine())
    drawn, played = spans(plan, H100), timeline(plan, H100)
    computing: dict[int, list[tuple[float, float]]] = defaultdict(list)
    newton: dict[int, float] = defaultdict(float)
    for span in drawn:
        if span.stage in ("advance", "copy", "orthogonalize", "apply"):
            computing[span.rank].append((span.start, span.stop))
        if span.stage == "orthogonalize":
            newton[span.rank] += span.stop - span.start
    for time in played.ranks:
        mine = sorted(computing[time.rank])
        assert all(before[1] <= after[0] + 1e-12 for before, after in itertools.pairwise(mine))
        assert sum(stop - start for start, stop in mine) == pytest.approx(time.orthogonalize + time.passes)
        assert newton[time.rank] == pytest.approx(time.orthogonalize), "the balance and the timeline agree"
        assert max(stop for _, stop in mine) == pytest.approx(time.seconds)
    assert {span.bucket for span in drawn} == ({LOCAL} if ranks == 1 else set(range(len(plan.buckets))))
