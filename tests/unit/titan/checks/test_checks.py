"""Messages about differences between ranks and experts without tokens."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from pyarrow import chunked_array, large_binary
from torch import nn

from titan_muon.engine.faults.skip import NormCheck
from titan_muon.trainer.checks.experts import ExpertLoads
from titan_muon.trainer.checks.start import check_start, differences, source_files, start_facts
from titan_muon.trainer.checks.training import (
    UNKNOWN,
    RankReport,
    TrainingChecks,
    check_reports,
    differing_pair,
    wrong_tokens,
)
from titan_muon.trainer.data.blocks import TokenBlocks
from titan_muon.trainer.data.corpus import Corpus
from titan_muon.trainer.data.loader import NOT_COUNTED
from titan_muon.trainer.fault import RunFault
from titan_muon.trainer.recipe import Recipe


def test_differences_names_every_value_and_the_ranks() -> None:
    reports = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "3"}]
    assert differences(reports) == ["b is 2 on rank 0 and 3 on ranks 1, 3 and absent on rank 2"]


def test_start_facts_have_recipe_versions_and_sources() -> None:
    import models  # noqa: F401 (registers the families)

    facts = start_facts(Recipe())
    assert facts["adamw.lr"] == "0.001"
    assert facts["version of torch"] == torch.__version__
    assert any(name.endswith("titan_muon/muon.py") for name in facts)
    assert any(name.endswith("models/qwen3.py") for name in facts)
    assert len({name for name in facts if name.startswith("source file ")}) == len(source_files(Recipe()))
    check_start(facts, None)


NOWHERE = (UNKNOWN, UNKNOWN)


def checks_of(model: nn.Module) -> TrainingChecks:
    device = torch.device("cpu")
    return TrainingChecks([], [model], device, data_rank=0, group=None, token_group=None, tolerates_nonfinite=False)


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_frozen_or_thawed_in_training_is_named_before_backward(trained: bool) -> None:
    """On one rank alone, FSDP would abort in a collective without a name."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].bias.requires_grad_(trained)
    checks = checks_of(model)
    checks.begin_step(reported=False, place=NOWHERE)
    model[0].bias.requires_grad_(not trained)
    with pytest.raises(ValueError, match=r"^0\.bias: requires_grad changed after the start of training; "):
        checks.begin_step(reported=False, place=NOWHERE)


def test_positions_and_labels_follow_the_inputs_of_packed_blocks() -> None:
    ids = [np.arange(start, start + 10, dtype=np.uint16).tobytes() for start in range(0, 100, 10)]
    tens, crcs = np.full(10, 10), np.array([zlib.crc32(part) for part in ids])
    corpus = Corpus(chunked_array([ids], type=large_binary()), np.dtype(np.uint16), tens, tens, crcs, "", "")
    blocks = [TokenBlocks(corpus, np.arange(10), 16, seed=0)[number] for number in range(3)]
    inputs, labels, positions = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*blocks, strict=True))
    assert wrong_tokens(inputs, positions, labels) == 0
    assert wrong_tokens(inputs, positions, torch.full_like(labels, NOT_COUNTED)) == 0
    assert wrong_tokens(inputs, torch.zeros_like(positions), labels) > 0, "attention would see single tokens"
    # A tokenizer with one mark closes a document and opens the next by the same id.
    tokens = torch.tensor([[9, 1, 2, 9, 3, 9, 4, 5]])
    assert wrong_tokens(tokens[:, :-1], torch.tensor([[0, 1, 2, 0, 1, 0, 1]]), tokens[:, 1:]) == 0
    for tensor in (inputs, positions, labels):
        tensor[1, 5] += 2
        assert wrong_tokens(inputs, positions, labels) > 0
        tensor[1, 5] -= 2
    checks = checks_of(nn.Linear(2, 2))
    crcs = set()
    for changed in (None, inputs, positions, labels):
        checks.begin_step(reported=True, place=NOWHERE)
        if changed is not None:
            changed += 1
        checks.add_batch({"input": inputs, "positions": positions}, labels, seq_len=None)
        crcs.add(checks._crc)
    assert len(crcs) == 4, "peers of tensor parallelism compare each of them"


SOUND = replace(RankReport(*[0] * 5), position=8, expected=8, crc=11)
RANKS = [SOUND, replace(SOUND, data_rank=1, position=10, expected=10, crc=12)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"position": 12}, "step 5: rank 1 read block 12 instead of 10"),
        ({"wrong_tokens": 5}, r"ranks \[1\] trained on positions or labels that do not .* \(\+5 on rank 1"),
        ({"data_rank": 0}, "ranks 0 and 1 train on the same sequences and read different text"),
    ],
)
def test_check_reports_names_differing_ranks(change: dict[str, int], text: str) -> None:
    check_reports(5, RANKS)
    with pytest.raises(RunFault, match=text):
        check_reports(5, [RANKS[0], replace(RANKS[1], **change)])


def test_two_data_ranks_with_equal_inputs_are_a_pair() -> None:
    """Tensor-parallel peers, which read the same, are none."""
    pairs = {None: RANKS, (0, 1): [SOUND, replace(RANKS[1], crc=11)]}
    for pair, reports in pairs.items():
        assert differing_pair([*reports, SOUND], same="crc", field="data_rank") == pair


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
