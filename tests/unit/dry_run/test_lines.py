"""The report on a plan before training."""

import re

from tests.unit.plans import plan_of
from titan_muon.engine.layout.types import Layout, Mesh, Parameter, Replicate, Shard
from titan_muon.engine.tensors.matrices import stack_of
from titan_muon.forecast.lines import plan_lines
from titan_muon.planner.summary import summarize


def reason_of(replicas: int, shards: int, *, replicas_of: str) -> str:
    """Lines about two experts, each whole on a rank of a replica, and two FSDP-sharded matrices."""
    mesh = Mesh((replicas, shards), tuple(range(replicas * shards)))
    shapes = {"experts.w": (2, 32, 32), "wq": (32, 32), "wk": (32, 32)}
    parameters = [
        Parameter(name, "layers.0", Layout(shape, mesh, (Replicate(), Shard(0))), stack_of(name, shape))
        for name, shape in shapes.items()
    ]
    plan = plan_of(parameters, replicas=replicas_of)
    return "\n".join(plan_lines(plan, summarize(plan)))


def test_a_plan_with_repeated_work_has_a_reason_and_a_remedy() -> None:
    """Local experts on each of 8 replicas are orthogonalized 8 times."""
    text = reason_of(8, 2, replicas_of="redundant")
    assert re.search(r"[24] matrices are whole on up to 8 replicas", text)
    assert "data_parallel_replicate_degree = 1" in text
    assert '"split", which sends results' in text
    assert "repeated" not in reason_of(8, 2, replicas_of="split") + reason_of(1, 4, replicas_of="redundant")


def test_state_owner_without_replicas_reports_no_effect() -> None:
    mesh = Mesh((4,), tuple(range(4)))
    cut = [Parameter("wq", "layers.0", Layout((32, 32), mesh, (Shard(0),)), stack_of("wq", (32, 32)))]
    plan = plan_of(cut, state="owner")
    assert "state = 'owner' has no effect" in "\n".join(plan_lines(plan, summarize(plan)))
    assert "no effect" not in plan_of(cut).reason
