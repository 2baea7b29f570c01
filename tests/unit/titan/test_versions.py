"""The modules of TorchTitan's versions have the same names and meaning. A stand-in has the main branch's names."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.recipe.sections import Data
from titan_muon.titan.torchtitan import compat
from titan_muon.titan.torchtitan.interface import Budget, TorchTitan

LENGTH, SEQUENCES = 256, 3
BUDGET = Budget(seq_len=LENGTH, sequences=8, microbatch=2, global_sequences=32)
DOCUMENTS = (0, 7, 200)
"""Starts of the documents in every sequence."""


@pytest.fixture(scope="module")
def main() -> Iterator[Any]:
    """The module for the main branch, on the installed torchtitan or on a stand-in."""
    if compat.recipe_version() == "main":
        from titan_muon.titan.torchtitan import main as module

        yield module
        return
    from torchtitan.config import Configurable

    class BaseDataLoader(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            pass

    loader = ModuleType("torchtitan.components.data.loader")
    loader.BaseDataLoader = BaseDataLoader  # type: ignore[attr-defined]
    added = {"torchtitan.components.data": ModuleType("torchtitan.components.data"), loader.__name__: loader}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in added.items():
            patch.setitem(sys.modules, name, module)
        from titan_muon.titan.torchtitan import main as module

        yield module
        patch.delitem(sys.modules, module.__name__)


def test_a_version_has_every_name_of_the_interface(main: Any) -> None:
    methods = dict(inspect.getmembers(TorchTitan, inspect.isfunction))
    assert len(methods) > 10
    for name, method in methods.items():
        if not name.startswith("_"):
            _, *parameters = inspect.signature(method).parameters.values()
            assert [*inspect.signature(getattr(main, name)).parameters.values()] == parameters
    assert main.Loader.Config().endless is True
    assert main.Loader.Config(repeat=False).endless is False


def test_token_budgets_count_the_tokens_of_the_recipes_sequences(main: Any) -> None:
    keys, calls = main.training_keys(BUDGET), main.pipeline_keys(BUDGET)["num_pp_microbatches"]
    assert keys["max_context_length"] == LENGTH
    assert keys["num_tokens_per_microbatch_per_dp_rank"] * calls == BUDGET.sequences * LENGTH
    assert keys["num_tokens_per_train_step"] == BUDGET.global_sequences * LENGTH
    assert main.training_keys(replace(BUDGET, global_sequences=-1))["num_tokens_per_train_step"] == -1
    assert main.loader_size(main.loader_keys(seq_len=LENGTH, sequences=5)) == (LENGTH, 5)
    for degree, sequences in ((1, 2), (4, 8)):
        parallelism = SimpleNamespace(pipeline_parallel_degree=degree, num_pp_microbatches=calls)
        validator = SimpleNamespace(parallelism=parallelism, num_tokens_per_batch=2 * LENGTH, seq_len=LENGTH)
        assert main.validated_sequences(validator) == sequences


def _folded_mask(sequences: int) -> Any:
    starts = [row * LENGTH + start for row in range(sequences) for start in DOCUMENTS]
    document = torch.bucketize(torch.arange(sequences * LENGTH), torch.tensor(starts), right=True)
    size = sequences * LENGTH
    return create_block_mask(lambda b, h, q, k: (q >= k) & (document[q] == document[k]), 1, None, size, size, "cpu")


def test_folded_attention_equals_attention_of_every_sequence(main: Any) -> None:
    """Values and gradients; the reference has a dense mask for each sequence."""

    class Attention(main.HeadsFirstAttention):
        @dataclass(kw_only=True, slots=True)
        class Config(main.HeadsFirstAttention.Config):
            pass

        def attend_heads(self, q: Any, k: Any, v: Any, *, mask: Any, needs_lse: bool) -> Any:
            attend = torch.nn.functional.scaled_dot_product_attention
            parts = [attend(q[:, :, c.queries], k[:, :, c.keys], v[:, :, c.keys], attn_mask=c.allowed) for c in mask]
            return torch.cat(parts, 2), None

    generator = torch.Generator().manual_seed(0)
    shape = (SEQUENCES * LENGTH, 2, 8)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    folded = Attention.Config().build()(q, k, v, mask=main.chunks(_folded_mask(SEQUENCES)))
    document = torch.bucketize(torch.arange(LENGTH), torch.tensor(DOCUMENTS), right=True)
    allowed = (document[:, None] == document).tril()
    rows = (t.view(SEQUENCES, LENGTH, 2, 8).transpose(1, 2) for t in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=allowed).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(folded, expected)
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (folded, expected)]
    torch.testing.assert_close(*gradients)


def test_the_memory_of_folded_masks_grows_with_the_tokens(main: Any) -> None:
    few, many = (sum(c.allowed.numel() for c in main.chunks(_folded_mask(n))) for n in (2, 8))
    assert many == 4 * few <= 8 * LENGTH**2


def test_only_the_trainers_stop_for_a_nonfinite_loss_is_left_to_the_report(main: Any) -> None:
    """The device's assertion would end the process before the report of the step."""
    original, bad = torch._assert_async, torch.tensor(False)
    with main.reporting_every_loss():
        torch._assert_async(bad, f"{main.NONFINITE} on at least one rank at step 3.")
        with pytest.raises(RuntimeError):
            torch._assert_async(bad, "another")
    assert torch._assert_async is original


def test_options_of_the_older_text_loader_are_refused_by_key(main: Any) -> None:
    with pytest.raises(RecipeError, match=r"data\.num_workers is an option of TorchTitan 0\.3"):
        main.text_loader_config(Data(source="hf", num_workers=2), "c4")
