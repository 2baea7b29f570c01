"""What every family of models has: the starting values of parameters, norms, the embedding and the head."""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init

Init = Callable[[torch.Tensor], object]

NORM_INIT: dict[str, Init] = {"weight": torch.nn.init.ones_}


def normal(std: float) -> Init:
    """Fill a tensor from a normal distribution of mean 0, the same values at every layout of a DTensor.

    On GPUs DTensor's random generator already has that property. On the CPU it has none (each rank would
    draw its shard from the same seed), so every rank draws the whole tensor there and keeps its own piece.
    """

    def fill(tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor) and tensor.device_mesh.device_type == "cpu":
            whole = torch.empty(tensor.shape, dtype=tensor.dtype).normal_(std=std)
            everywhere = [Replicate()] * tensor.device_mesh.ndim
            tensor.copy_(DTensor.from_local(whole, tensor.device_mesh, everywhere, run_check=False))
        else:
            tensor.normal_(std=std)

    return fill


def linear_init(std: float) -> dict[str, Init]:
    """Starting values of a linear layer without bias."""
    return {"weight": normal(std)}


def experts_init(std: float, std_down: float) -> dict[str, Init]:
    """Starting values of stacked experts: gate and up at `std`, and down at `std_down`."""
    return {"w1_EFD": normal(std), "w2_EDF": normal(std_down), "w3_EFD": normal(std)}


def residual_std(std: float, layers: int) -> float:
    """Deviation of projections into the residual stream, two in each of `layers` blocks (GPT-2, 2.3)."""
    return std / (2 * layers) ** 0.5


def norm(dim: int, eps: float) -> RMSNorm.Config:
    """An RMSNorm over the last dim, starting at 1."""
    return RMSNorm.Config(normalized_shape=dim, eps=eps, param_init=NORM_INIT)


def embedding(vocab_size: int, dim: int, std: float, *, tied: bool = False) -> Embedding.Config:
    """The token embedding, shape (vocab_size, dim). Tied to the head, it takes the head's values."""
    init = {"weight": skip_param_init} if tied else linear_init(std)
    return Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=init)


def head(vocab_size: int, dim: int, std: float) -> Linear.Config:
    """The output projection, shape (vocab_size, dim)."""
    return Linear.Config(in_features=dim, out_features=vocab_size, param_init=linear_init(std))
