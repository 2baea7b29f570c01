"""The memory of the dry run is the memory of the plan."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.memory_use import allocated
from tests.shared import muon_keywords
from titan_muon import Muon
from titan_muon.assignment.optimizer_set import OptimizerSet
from titan_muon.assignment.rules import Assignment
from titan_muon.forecast.memory import memory_per_rank
from titan_muon.planner.summary import summarize

SHAPES = {"wide": (64, 4096), "tall": (512, 32), "experts": (3, 64, 32)}
SQUARE = {"square": (400, 400), "tall": (512, 32), "experts": (3, 64, 32)}
OPTIONS = {"orthogonalize": "standard", "ns_dtype": "bfloat16"}
CASES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "muon": (SHAPES, OPTIONS),
    "normuon": (SHAPES, OPTIONS),
    # Every step makes new bases.
    "soap": (SQUARE, {"soap_freq": 1}),
    "soap and normuon": (SQUARE, {"soap_freq": 1, **OPTIONS, "ns_dtype": "auto"}),
}


@pytest.mark.usefixtures("zero_products")
@pytest.mark.parametrize("rule", CASES)
def test_the_dry_run_counts_the_memory_of_states_and_step(rule: str) -> None:
    shapes, options = CASES[rule]
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    names = rule.split(" and ")
    pairs = [[*parameters.items()][place :: len(names)] for place in range(len(names))]
    groups = [{"params": part, "algorithm": name} for part, name in zip(pairs, names, strict=True)]
    muon = Muon(groups, **muon_keywords(**options))
    # SOAP's first step makes no update.
    muon.step()
    muon.step()
    _, peak, _ = allocated(muon.step)
    assigned = tuple(Assignment(name, shape, "muon", "", None) for name, shape in shapes.items())
    optimizers = OptimizerSet(assigned, assigned, {}, {"muon": muon}, tuple(parameters), ())
    memory = memory_per_rank(parameters, optimizers, muon.plan, summarize(muon.plan), {}, "cpu")
    states = [tensor for state in muon.state.values() for tensor in state.values()]
    assert memory.optimizer_states == sum(tensor.nbytes for tensor in states)
    assert memory.orthogonalization == pytest.approx(peak, rel=0.1)
