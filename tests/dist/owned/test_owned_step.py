"""Passes of owned matrices move no more bytes than FSDP2's, and the example of the docs. Steps: tests/parity."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.c10d_counter import CollectiveCounter
from benchmarks.owned_model import Setup, data_mesh, loss_of, make, matrices, place, summed_plainly
from tests.dist.harness import run_ranks
from titan_muon.owned import gather


def passes(rank: int, world_size: int, setup: Setup) -> tuple[int, int, int]:
    """Bytes sent by this rank in forward and backward of the second step, and Owners' count."""
    model = make(dim=64, hidden=192)
    owners = place(model, setup, data_mesh(world_size, setup, model))
    loss_of(model, rank, world_size, 0).backward()
    before = 0 if owners is None else owners.traffic.bytes_sent
    with CollectiveCounter() as forward:
        loss = loss_of(model, rank, world_size, 1)
    with CollectiveCounter() as backward:
        loss.backward()
    counted_bytes = 0 if owners is None else owners.traffic.bytes_sent - before
    return forward.sent, backward.sent, counted_bytes


@pytest.mark.parametrize(("world_size", "reshard"), [(2, True), (4, False), (8, True)])
def test_forward_and_backward_move_no_more_than_fsdp(world_size: int, reshard: bool) -> None:
    """Over all ranks; FSDP2 pads its shards."""
    setup = Setup("owned", reshard=reshard)
    ours = run_ranks(passes, world_size, setup)
    theirs = run_ranks(passes, world_size, replace(setup, placement="sharded"))
    for phase in (0, 1):
        assert sum(sent[phase] for sent in ours) <= 1.02 * sum(sent[phase] for sent in theirs)
    assert 0 < sum(sent[2] for sent in ours) <= sum(sent[0] + sent[1] for sent in ours)


def documented(rank: int, world_size: int) -> tuple[int, float]:
    """The example of docs/placements.md: the collectives of the step, and the change of a matrix."""
    page = Path(__file__).parents[3] / "docs" / "placements.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    model = make()
    start = model.layers[0].wq.weight.detach().clone()
    names = {"model": model, "mesh": init_device_mesh("cpu", (world_size,)), "matrices": matrices(model)}
    exec(code, names)
    summed_plainly(model)
    loss_of(model, rank, world_size, 0).backward()
    names["optimizer"].build()
    with CollectiveCounter() as counter:
        names["optimizer"].step()
    assert "owner" in names["owners"].table()
    return len(counter.calls), float((gather(model.layers[0].wq.weight) - start).abs().max())


def test_the_example_of_the_docs_runs() -> None:
    for calls, moved in run_ranks(documented, 2):
        assert calls == 0
        assert moved > 0
