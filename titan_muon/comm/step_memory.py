"""Memory that is taken in a step alone: between steps it belongs to forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class StepMemory:
    """The storages of some tensors. Views of them are made once, and hold something within a step.

    Args:
        tensors: tensors that are each a whole storage, or share one.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._sizes: dict[torch.UntypedStorage, int] = {}
        for tensor in tensors:
            storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
            self._sizes[storage] = max(size, self._sizes.get(storage, 0))
        self.free()

    def take(self) -> None:
        """Allocate, in the stream that is current, unless it is there already; what is in it is undefined."""
        # Resized to the size that it has, a storage would move, and collectives in flight would write to where it was.
        for storage, size in self._sizes.items():
            if storage.nbytes() != size:
                storage.resize_(size)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile the memory is there, so that views can be made: PyTorch makes none of a part of nothing."""
        # What a backward is sending from stays as it is: views are also made in a step, of a storage that was replaced.
        missing = [storage for storage, size in self._sizes.items() if storage.nbytes() != size]
        self.take()
        yield
        for storage in missing:
            storage.resize_(0)

    def free(self) -> None:
        """Give the memory back. What other streams did with it was waited for in the stream that is current."""
        for storage in self._sizes:
            storage.resize_(0)
