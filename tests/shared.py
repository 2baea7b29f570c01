"""Shared by the tests: random tensors, local and whole values, error texts, counted operators."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_muon.options import EXPERT, Expert


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
    """The text of the ValueError or ImportError of `call`, or empty."""
    try:
        call()
    except (ValueError, ImportError) as error:
        return str(error)
    return ""


def muon_keywords(**options: Any) -> dict[str, Any]:
    """Keywords of Muon, with the options of `Expert` in one."""
    expert = {name: options.pop(name) for name in EXPERT if name in options}
    return {**options, "expert": Expert(**expert)}


class Operators(TorchDispatchMode):
    """While active, counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def unsharded_bytes(owners: Any) -> int:
    """Bytes of the unsharded parameters of all groups."""
    buffers = (hooks.group._buffer for hooks in owners.context.hooks)
    return sum(buffer.untyped_storage().nbytes() for buffer in buffers if buffer is not None)
