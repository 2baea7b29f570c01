"""Messages about differences between ranks and experts without tokens."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from titan_muon.comm.clip import NormCheck
from titan_muon.titan.checks.experts import ExpertLoads
from titan_muon.titan.checks.ranks import UNKNOWN, RankReport, check_reports, twins
from titan_muon.titan.checks.start import check_start, differences, source_files, start_facts
from titan_muon.titan.checks.training import Place, TrainingChecks
from titan_muon.titan.fault import RunFault
from titan_muon.titan.recipe import Recipe


def test_differences_names_every_value_and_the_ranks() -> None:
    reports = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "3"}]
    assert differences(reports) == ["b is 2 on rank 0 and 3 on ranks 1, 3 and absent on rank 2"]
    assert differences(reports[:1] * 2) == []


def test_start_facts_have_recipe_versions_and_sources() -> None:
    import models  # noqa: F401 (registers the families)

    facts = start_facts(Recipe())
    assert facts["adamw.lr"] == "0.001"
    assert facts["version of torch"] == torch.__version__
    assert any(name.endswith("titan_muon/muon.py") for name in facts)
    assert any(name.endswith("models/qwen3.py") for name in facts)
    assert len({name for name in facts if name.startswith("source file ")}) == len(source_files(Recipe()))
    check_start(facts, None)


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_frozen_or_thawed_in_training_is_named_before_backward(trained: bool) -> None:
    """On one rank alone, FSDP would abort in a collective without a name."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].bias.requires_grad_(trained)
    checks = TrainingChecks(
        [], [], [model], torch.device("cpu"), data_rank=0, token_group=None, tolerates_nonfinite=False
    )
    place = Place(UNKNOWN, UNKNOWN)
    checks.begin_step(reported=False, counted=False, place=place)
    model[0].bias.requires_grad_(not trained)
    with pytest.raises(ValueError, match=r"^0\.bias: requires_grad changed after the start of training; "):
        checks.begin_step(reported=False, counted=False, place=place)


RANKS = [RankReport(0, 8, 8, 11, 0, 0, -1), RankReport(1, 10, 10, 12, 0, 0, -1)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"position": 12}, "step 5: rank 1 read block 12 instead of 10"),
        ({"extra_steps": -2}, "-2 on rank 1"),
        ({"stale_gradients": 3}, r"were not cleared on ranks \[1\]"),
        ({"data_rank": 0}, "ranks 0 and 1 train on the same sequences and read different text"),
    ],
)
def test_check_reports_names_differing_ranks(change: dict[str, int], text: str) -> None:
    check_reports(5, RANKS)
    with pytest.raises(RunFault, match=text):
        check_reports(5, [RANKS[0], replace(RANKS[1], **change)])


def test_twins_finds_two_data_ranks_with_equal_inputs() -> None:
    assert twins(RANKS) is None
    assert twins([RANKS[0], replace(RANKS[1], crc=11)]) == (0, 1)
    assert twins([RANKS[0], replace(RANKS[0], position=8)]) is None, "tensor-parallel peers read the same"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens_per_expert_E", torch.zeros(4))


def test_dead_experts_are_reported_once_until_the_next_token() -> None:
    """No token in the reports of 100 steps. Counts are per step, because the buffers may not be cleared."""
    layer = Layer()
    loads = ExpertLoads([nn.Sequential(layer)], None, torch.device("cpu"))
    lines = {}
    for step in range(10, 400, 10):
        loads.begin_step()
        layer.tokens_per_expert_E += torch.tensor([5.0, 3.0, 0.0, 4.0 if step < 200 else 0.0])
        tokens = loads.of_step()
        assert tokens["0"][0] == 5
        if dead := loads.dead(step, tokens):
            lines[step] = dead
    assert lines == {
        110: ["0: experts 2 got no token in any report of the last 100 steps"],
        300: ["0: experts 3 got no token in any report of the last 100 steps"],
    }


def test_the_causes_of_a_nonfinite_norm_are_reported_once() -> None:
    assert NormCheck(torch.tensor(1.0), ["a", "b"], torch.tensor([1.0, 0.0])).causes() is None
    norm = NormCheck(torch.tensor(float("nan")), ["a", "b"], torch.tensor([1.0, float("nan")]))
    assert norm.causes() == "b on rank 0"
    assert norm.causes() is None
    assert NormCheck(torch.tensor(float("inf")), ["a", "b"], torch.tensor([1e38, 1e38])).causes() == "large values"
