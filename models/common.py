"""Parts of every model family: initial values, norms, embedding and head."""

from collections.abc import Callable
from typing import Any

import torch
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model_spec import ModelSpec

from titan_muon.engine.tensors.dtensor import held_indices, local, storage_device

Init = Callable[[torch.Tensor], object]

NORM_INIT: dict[str, Init] = {"weight": torch.nn.init.ones_}


def normal(std: float) -> Init:
    """Fill a tensor from a normal distribution of mean 0, with equal values for every layout of a DTensor."""

    def fill(tensor: torch.Tensor) -> None:
        # Every rank draws the whole tensor and keeps its piece, so that the random streams of all ranks stay in step.
        # DTensor's own generator does not advance on ranks without a piece, and does not exist on the CPU. One matrix
        # of a stack at a time: a whole stack and the model would not fit in memory together.
        piece = local(tensor)
        # Parameters of other pipeline stages are meta tensors: drawn like the stage's own, and dropped.
        device = torch.get_default_device() if piece.is_meta else storage_device(tensor)
        *stack, rows, columns = held_indices(tensor)
        kept = {} if piece.is_meta or piece.numel() == 0 else _matrices(piece, *stack)
        for number in range(len(tensor) if stack else 1):
            whole = torch.empty(tensor.shape[-2:], dtype=tensor.dtype, device=device).normal_(std=std)
            if number in kept:
                kept[number].copy_(whole[rows][:, columns])

    return fill


def _matrices(piece: torch.Tensor, *stack: torch.Tensor) -> dict[int, torch.Tensor]:
    """A rank's piece of each matrix, by index in the whole stack; `stack`: these indices, absent for a matrix."""
    return dict(zip(stack[0].tolist(), piece.unbind(), strict=True)) if stack else {0: piece}


def linear_init(std: float) -> dict[str, Init]:
    """Initial values of a linear layer without bias."""
    return {"weight": normal(std)}


def experts_init(std: float, std_down: float) -> dict[str, Init]:
    """Initial values of stacked experts: gate and up at `std`, and down at `std_down`."""
    return {"w1_EFD": normal(std), "w2_EDF": normal(std_down), "w3_EFD": normal(std)}


def residual_std(std: float, layers: int) -> float:
    """Standard deviation of projections into the residual stream, two in each of `layers` blocks (GPT-2, 2.3)."""
    return std / (2 * layers) ** 0.5


def norm(dim: int, eps: float) -> RMSNorm.Config:
    """RMSNorm over the last dim, initially 1."""
    return RMSNorm.Config(normalized_shape=dim, eps=eps, param_init=NORM_INIT)


def embedding(vocab_size: int, dim: int, std: float, *, tied: bool = False) -> Embedding.Config:
    """Token embedding, shape (vocab_size, dim). A tied embedding takes the head's values."""
    init = {"weight": skip_param_init} if tied else linear_init(std)
    return Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=init)


def head(vocab_size: int, dim: int, std: float) -> Linear.Config:
    """Output projection, shape (vocab_size, dim)."""
    return Linear.Config(in_features=dim, out_features=vocab_size, param_init=linear_init(std))


def with_vocab_size(spec: ModelSpec, vocab_size: int | None) -> ModelSpec:
    """The specification with another number of tokens."""
    if vocab_size is not None:
        config: Any = spec.model
        config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = vocab_size
    return spec
