"""What recipes need of TorchTitan where its versions differ. `installed.titan` is the module of the installed version.

A version is a module with these names, in a file of its own. mypy compares every version with the protocol.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from titan_muon.titan.recipe.sections import Data


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Sequences of a step."""

    seq_len: int
    sequences: int  # of a data-parallel rank in a pass
    microbatch: int  # of a data-parallel rank in a call of the model; a pipeline cuts a pass
    global_sequences: int  # of a step over all ranks; -1: a pass on every rank

    @property
    def microbatches(self) -> int:
        """Calls of the model in a pass."""
        return self.sequences // self.microbatch


@dataclass(frozen=True)
class Chunk:
    """Queries with the keys that they may see. `allowed`: bool (batch, 1, queries, keys), true for allowed pairs."""

    queries: slice
    keys: slice
    allowed: Tensor


class TorchTitan(Protocol):
    """Names of a version's module."""

    Loader: Any
    """TorchTitan's base class of loaders. `Loader.Config.endless`: whether to read epoch after epoch."""

    HeadsFirstAttention: Any
    """FlexAttention whose subclass attends to (batch, heads, tokens, width) in `attend_heads`, which returns the
    output and the log-sum-exp (batch, heads, tokens), or None without `needs_lse`."""

    def loader_keys(self, *, seq_len: int, sequences: int) -> dict[str, int]:
        """Arguments of a loader for batches of `sequences`."""

    def loader_size(self, keys: Mapping[str, Any]) -> tuple[int, int]:
        """(seq_len, sequences) of a loader's arguments."""

    def batch(self, sequences: Tensor) -> Tensor:
        """A batch of the shape that the model takes, from (sequences, seq_len)."""

    def text_loader_config(self, data: Data, name: str) -> Any:
        """Configuration of TorchTitan's loader of the Hugging Face dataset `name`.

        Raises RecipeError for a key of `data` that this loader lacks. The import of `datasets` takes seconds.
        """

    def training_keys(self, budget: Budget) -> dict[str, int]:
        """Keys of TorchTitan's TrainingConfig for a budget."""

    def pipeline_keys(self, budget: Budget) -> dict[str, int]:
        """Keys of TorchTitan's ParallelismConfig for a budget."""

    def check_context_parallel(self, degree: int, spmd_backend: str) -> None:
        """Raise RecipeError for a degree above 1 with a backend that cannot split sequences."""

    def validated_sequences(self, validator: Any) -> int:
        """Sequences of a data-parallel rank in a step of TorchTitan's validator."""

    def rope_keys(self, longest: int) -> dict[str, int]:
        """Keys of a RoPE configuration for positions below `longest`."""

    def longest_sequence(self, model: Any) -> int | None:
        """Positions of a model's configuration; None without a limit."""

    def lse_heads_first(self, lse: Tensor) -> Tensor:
        """(batch, heads, tokens) from TorchTitan's log-sum-exp."""

    def chunks(self, mask: BlockMask) -> tuple[Chunk, ...]:
        """Dense form of a mask, or of its shard of queries under context parallelism."""

    def reporting_every_loss(self) -> AbstractContextManager[object]:
        """Let the trainer report a non-finite loss too, in this context. The report records the step, and raises."""
