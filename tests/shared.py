"""Shared by the tests: random tensors, local and whole values, error texts."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def drawn(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    """Normal float32 values of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}


def local(tensor: Tensor) -> Tensor:
    """This rank's part, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def equal(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are bitwise equal."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def message(call: Callable[[], object]) -> str:
    """The text of the ValueError of `call`, or empty."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""
