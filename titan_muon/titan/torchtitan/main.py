"""TorchTitan's main branch since August 2026: batches of (tokens,). `interface.TorchTitan` explains the names."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.components.data.loader import BaseDataLoader
from torchtitan.models.common.attention import FlexAttention

from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.recipe.sections import Data
from titan_muon.titan.torchtitan.interface import Budget, Chunk

NONFINITE = "Loss or gradient norm is not finite"
"""Begin of the trainer's message when it stops before the optimizer."""


class Loader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        repeat: bool = True

        @property
        def endless(self) -> bool:
            return self.repeat


class HeadsFirstAttention(FlexAttention):
    attend_heads: Callable[..., tuple[Tensor, Tensor | None]]

    # TorchTitan shards by the names of the first three arguments.
    def forward(
        self,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q_TNH, k_TNH, v_TNH))
        out, lse = self.attend_heads(q, k, v, needs_lse=out_transform is not None, **options)
        if out_transform is None:
            return out[0].transpose(0, 1)
        assert lse is not None, "attend_heads returns what `needs_lse` asks for"
        return out_transform(out[0].transpose(0, 1), lse[0].transpose(0, 1))


def loader_keys(*, seq_len: int, sequences: int) -> dict[str, int]:
    return {"max_context_length": seq_len, "num_tokens_per_batch": sequences * seq_len}


def loader_size(keys: Mapping[str, Any]) -> tuple[int, int]:
    return keys["max_context_length"], keys["num_tokens_per_batch"] // keys["max_context_length"]


def batch(sequences: Tensor) -> Tensor:
    return sequences.flatten()


def text_loader_config(data: Data, name: str) -> Any:
    for key in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"):
        if getattr(data, key) != getattr(Data, key):
            raise RecipeError(
                f"data.{key} is an option of TorchTitan 0.3.0; its newer loader reads in a thread: remove it"
            )
    from torchtitan.components.data import ConcatThenSplitPackingConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    from titan_muon.titan.torchtitan.main_text import HFTextLoader

    dataset: Any = DATASETS[name]
    if data.dataset_path is not None:
        dataset = replace(dataset, source=replace(dataset.source, path=data.dataset_path, load_dataset_kwargs={}))
    return HFTextLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=dataset))


def training_keys(budget: Budget) -> dict[str, int]:
    whole = budget.global_sequences
    return {
        "max_context_length": budget.seq_len,
        "num_tokens_per_microbatch_per_dp_rank": budget.microbatch * budget.seq_len,
        "num_tokens_per_train_step": -1 if whole == -1 else whole * budget.seq_len,
    }


def pipeline_keys(budget: Budget) -> dict[str, int]:
    return {"num_pp_microbatches": budget.microbatches}


def check_context_parallel(degree: int, spmd_backend: str) -> None:
    if degree > 1 and spmd_backend != "spmd_types":
        raise RecipeError(
            f"parallelism.context_parallel_degree = {degree} needs spmd_types on TorchTitan's main branch, and here "
            f"parallelism.spmd_backend is {spmd_backend!r}; owned matrices and torch before 2.14 exclude it. Set "
            'the degree to 1, or use torch 2.14 with placement.muon = "shard0", or TorchTitan 0.3.0.'
        )


def validated_sequences(validator: Any) -> int:
    parallelism = validator.parallelism
    calls = parallelism.num_pp_microbatches if parallelism.pipeline_parallel_degree > 1 else 1
    return int(calls * validator.num_tokens_per_batch // validator.seq_len)


def rope_keys(longest: int) -> dict[str, int]:
    return {"max_context_length": longest}


def longest_sequence(model: Any) -> int | None:
    return getattr(model, "max_context_length", None)


def lse_heads_first(lse: Tensor) -> Tensor:
    return lse.transpose(0, 1)[None]


def chunks(mask: BlockMask) -> tuple[Chunk, ...]:
    # A dense mask of all tokens would grow with the square of the budget. A document is at most a sequence long.
    size, (queries, keys) = mask.BLOCK_SIZE, mask.seq_lengths
    first, last = _key_blocks(mask)
    made = []
    for row, (begin, end) in enumerate(zip(first, last, strict=True)):
        rows = slice(row * size[0], min((row + 1) * size[0], queries))
        columns = slice(begin * size[1], min((end + 1) * size[1], keys))
        made.append(Chunk(rows, columns, _allowed(mask, rows, columns)))
    return tuple(made)


def _key_blocks(mask: BlockMask) -> tuple[list[int], list[int]]:
    """First and last block of keys of every block of queries."""
    seen = mask.to_dense()[0, 0].bool()
    numbers = torch.arange(seen.shape[1], device=seen.device)
    first = numbers.where(seen, seen.shape[1]).amin(1)
    return first.tolist(), numbers.where(seen, -1).amax(1).tolist()


def _allowed(mask: BlockMask, rows: slice, columns: slice) -> Tensor:
    def shifted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.mask_mod(batch, head, query + rows.start, key + columns.start)

    device = mask.kv_num_blocks.device
    return create_mask(shifted, 1, 1, rows.stop - rows.start, columns.stop - columns.start, device=device)


def reporting_every_loss() -> AbstractContextManager[object]:
    # The assertion is on the device: on a GPU it kills the process without a word, and before the checks of the norm.
    original = torch._assert_async

    def assert_async(condition: Tensor, message: str = "") -> None:
        if not message.startswith(NONFINITE):
            original(condition, message)

    return patch.object(torch, "_assert_async", assert_async)
