"""Messages about differences between ranks and experts without tokens."""

import pytest
import torch
from torch import nn

from titan_muon.plugins.clip import NormCheck
from titan_muon.trainer.checks.start import differences, source_files, start_facts
from titan_muon.trainer.checks.training import ExpertLoads, TrainingChecks, check_places
from titan_muon.trainer.fault import RunFault
from titan_muon.trainer.recipe import Recipe


def test_differences_names_every_value_and_the_ranks() -> None:
    reports = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "3"}]
    assert differences(reports) == ["b is 2 on rank 0 and 3 on ranks 1, 3 and absent on rank 2"]


def test_start_facts_have_recipe_versions_and_sources() -> None:
    import models  # noqa: F401 (registers the families)

    facts = start_facts(Recipe())
    assert (facts["adamw.lr"], facts["version of torch"]) == ("0.001", torch.__version__)
    assert {"titan_muon/muon.py", "models/qwen3.py"} <= {"/".join(name.split("/")[-2:]) for name in facts}
    assert sum(name.startswith("source file ") for name in facts) == len(source_files(Recipe()))


def checks_of(model: nn.Module) -> TrainingChecks:
    device = torch.device("cpu")
    return TrainingChecks([], [model], device, group=None, token_group=None, tolerates_nonfinite=False)


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_frozen_or_thawed_in_training_is_named_before_backward(trained: bool) -> None:
    """On one rank alone, FSDP would abort in a collective without a name."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].bias.requires_grad_(trained)
    checks = checks_of(model)
    checks.begin_step(None)
    model[0].bias.requires_grad_(not trained)
    with pytest.raises(ValueError, match=r"^0\.bias: requires_grad changed after the start of training; "):
        checks.begin_step(None)


def test_a_rank_at_a_wrong_place_in_the_text_is_named() -> None:
    check_places(5, (8, 8), None)
    with pytest.raises(RunFault, match="step 5: rank 0 read block 12 instead of 10"):
        check_places(5, (12, 10), None)


def test_dead_experts_are_reported_once_until_the_next_token() -> None:
    """No token in the reports of 100 steps. Counts are per step, because the buffers may not be cleared."""
    layer = nn.Module()
    layer.register_buffer("tokens_per_expert_E", torch.zeros(4))
    loads = ExpertLoads([nn.Sequential(layer)], None, torch.device("cpu"))
    lines = {}
    for step in range(10, 400, 10):
        loads.begin_step()
        layer.tokens_per_expert_E += torch.tensor([5.0, 3.0, 0.0, 4.0 if step < 200 else 0.0])
        tokens = loads.of_step()
        assert tokens["0"][0] == 5
        if dead := loads.dead(step, tokens):
            lines[step] = dead
    silent = "got no token in any report of the last 100 steps"
    assert lines == {110: [f"0: experts 2 {silent}"], 300: [f"0: experts 3 {silent}"]}


def test_the_causes_of_a_nonfinite_norm_are_reported_once() -> None:
    assert NormCheck(torch.tensor(1.0), ["a", "b"], torch.tensor([1.0, 0.0])).causes() is None
    norm = NormCheck(torch.tensor(float("nan")), ["a", "b"], torch.tensor([1.0, float("nan")]))
    assert norm.causes() == "b on rank 0"
    assert norm.causes() is None
    assert NormCheck(torch.tensor(float("inf")), ["a", "b"], torch.tensor([1e38, 1e38])).causes() == "large values"


@pytest.mark.parametrize("tolerates", [False, True])
def test_a_nonfinite_norm_ends_a_run_that_does_not_skip_steps(tolerates: bool) -> None:
    checks = checks_of(nn.Linear(2, 2))
    checks.tolerates_nonfinite = tolerates
    norm = NormCheck(torch.tensor(float("nan")), ["a"], torch.tensor([float("nan")]))
    if tolerates:
        (line,) = checks.after_clip(3, norm)
        assert line.startswith("step 3: the norm of the gradients is nan, because of a on rank 0")
    else:
        with pytest.raises(FloatingPointError, match=r"step 3: .* a on rank 0; nothing is saved from this step"):
            checks.after_clip(3, norm)
