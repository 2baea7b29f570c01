"""TorchTitan 0.3: batches of (sequences, seq_len). `interface.TorchTitan` explains the names."""

import importlib
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.common.attention import FlexAttention

from titan_muon.titan.recipe.sections import Data
from titan_muon.titan.torchtitan.interface import Budget, Chunk


class Loader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

        @property
        def endless(self) -> bool:
            return self.infinite


class HeadsFirstAttention(FlexAttention):
    attend_heads: Callable[..., tuple[Tensor, Tensor | None]]

    # TorchTitan shards by the names of the first three arguments.
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out, lse = self.attend_heads(q, k, v, needs_lse=out_transform is not None, **options)
        if out_transform is None:
            return out.transpose(1, 2)
        assert lse is not None, "attend_heads returns what `needs_lse` asks for"
        return out_transform(out.transpose(1, 2), lse.transpose(1, 2))


def loader_keys(*, seq_len: int, sequences: int) -> dict[str, int]:
    return {"seq_len": seq_len, "local_batch_size": sequences}


def loader_size(keys: Mapping[str, Any]) -> tuple[int, int]:
    return keys["seq_len"], keys["local_batch_size"]


def batch(sequences: Tensor) -> Tensor:
    return sequences


def text_loader_config(data: Data, name: str) -> Any:
    from titan_muon.titan.torchtitan.v0_3_text import HFTextLoader

    return HFTextLoader.Config(
        dataset=name,
        dataset_path=data.dataset_path,
        num_workers=data.num_workers,
        prefetch_factor=data.prefetch_factor,
        persistent_workers=data.persistent_workers,
        pin_memory=data.pin_memory,
    )


def training_keys(budget: Budget) -> dict[str, int]:
    return {
        "seq_len": budget.seq_len,
        "local_batch_size": budget.sequences,
        "global_batch_size": budget.global_sequences,
    }


def pipeline_keys(budget: Budget) -> dict[str, int]:
    return {"pipeline_parallel_microbatch_size": budget.microbatch}


def check_context_parallel(degree: int, spmd_backend: str) -> None:
    """Every backend splits sequences."""


def validated_sequences(validator: Any) -> int:
    return int(validator.local_batch_size)


def rope_keys(longest: int) -> dict[str, int]:
    return {"max_seq_len": longest}


def longest_sequence(model: Any) -> int | None:
    return getattr(model, "max_seq_len", None)


def lse_heads_first(lse: Tensor) -> Tensor:
    return lse.transpose(1, 2)


def chunks(mask: BlockMask) -> tuple[Chunk, ...]:
    rows, (queries, keys), device = mask.kv_num_blocks.shape[0], mask.seq_lengths, mask.kv_num_blocks.device
    allowed = create_mask(mask.mask_mod, rows, 1, queries, keys, device=device)
    return (Chunk(slice(None), slice(None), allowed),)


def reporting_every_loss() -> AbstractContextManager[object]:
    # Remove when the trainer reports before it raises.
    trainer = importlib.import_module("torchtitan.trainer")
    return patch.object(trainer, "math", types.SimpleNamespace(isfinite=lambda loss: True))
