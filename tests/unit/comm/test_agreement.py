"""Process groups of an agreement: the same list on every rank, with the timeout of the step's device."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_muon.engine.exchange import agreement
from titan_muon.engine.exchange.agreement import Agreement, PlanReport

BACKENDS = {"cuda": timedelta(minutes=10), "cpu": timedelta(minutes=30)}


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("device", "minutes"), [("cuda", 10), ("cpu", 30), ("mps", 30)])
def test_a_group_has_the_timeout_of_the_steps_device(
    device: str, minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under cpu:gloo,cuda:nccl, the timeout of gloo is three times the timeout of NCCL."""
    made: list[Any] = []
    monkeypatch.setattr(agreement, "timeout_of", lambda group, kind: BACKENDS.get(kind))
    monkeypatch.setattr(agreement, "fast_options", lambda *of: None)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, pg_options: made.append((ranks, timeout)))
    Agreement()._new_group((0, 2), torch.device(device))
    assert made == [([0, 2], timedelta(minutes=minutes))]


@pytest.mark.usefixtures("four_ranks")
def test_a_rank_makes_a_known_group_needed_by_a_second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks make a group together, and the meshes of ranks differ, for example after a parameter was frozen."""
    agreed, made = Agreement(), list[Any]()
    mine, peers = PlanReport(ranks=(0,)), PlanReport(ranks=(1,), groups=((0, 1), (0, 1, 2)))
    monkeypatch.setattr(agreed, "gathered", lambda report: {0: mine, 1: peers})
    monkeypatch.setattr(agreement, "check_reports", lambda reports: None)
    monkeypatch.setattr(agreed, "_new_group", lambda ranks, device: made.append(ranks) or object())
    agreed.open(mine, {(0, 1): dist.group.WORLD}, torch.device("cpu"))
    assert made == [(0, 1), (0, 1, 2)]
    # A later plan makes only new groups.
    agreed.open(mine, {}, torch.device("cpu"))
    assert made == [(0, 1), (0, 1, 2)]
