"""Ranges of the stages in a profiler's trace."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from titan_muon import Muon
from titan_muon.engine.step import step


def optimizer() -> Muon:
    params = {name: nn.Parameter(torch.ones(32, 16)) for name in ("a", "b")}
    muon = Muon(list(params.items()))
    for parameter in params.values():
        parameter.grad = torch.randn(32, 16)
    return muon


def test_a_trace_shows_every_stage_of_every_bucket() -> None:
    muon = optimizer()
    muon.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        muon.step()
    names = {event.key for event in profiler.key_averages() if event.key.startswith("Muon.")}
    buckets = range(len(muon.engine.rank.program.buckets))
    stages = ("advance", "gather", "orthogonalize", "send_back", "apply")
    assert names == {"Muon.check", "Muon.tell", *(f"Muon.{stage} bucket {b}" for stage in stages for b in buckets)}


def test_a_step_makes_no_range_unless_a_profiler_records(monkeypatch) -> None:
    def fail(name: str) -> None:
        raise AssertionError(f"{name} was recorded")

    monkeypatch.setattr(step, "record_function", fail)
    optimizer().step()
