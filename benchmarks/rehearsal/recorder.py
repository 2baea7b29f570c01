"""Records of a fake GPU: operations by kind, collectives in order, and live bytes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = (
    "view",
    "_unsafe_view",
    "slice",
    "select",
    "transpose",
    "t",
    "expand",
    "split",
    "detach",
    "alias",
    "as_strided",
    "unbind",
    "unsqueeze",
    "squeeze",
    "permute",
    "diagonal",
    "split_with_sizes",
    "empty",
    "empty_like",
    "new_empty",
)
"""Operators without a launch: views of existing memory, and memory without values."""


class Operations(TorchDispatchMode):
    """Counts operators on the device by name in `counts`, each as often as `weight` says."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = str(func.name() if callable(func.name) else func.name).split("::")[-1].split(".")[0]
        if name not in VIEWS and any(_on_device(leaf) for leaf in tree_leaves((args, kwargs or {}))):
            self.counts[name] += self.weight(name, args)
        return func(*args, **(kwargs or {}))

    def weight(self, name: str, args: Any) -> int:
        return 1


class LiveMemory(TorchDispatchMode):
    """Tracks live device storage, and the storages at the peak.

    Attributes:
        alive: live bytes.
        peak: most live bytes since the last `reset`.
        at_peak: sizes of the live storages at the peak, by key.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[object, int] = {}
        self.alive = self.peak = 0
        self.at_peak: dict[object, int] = {}
        self._risen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _on_device(leaf):
                self._add(leaf.untyped_storage())
        return result

    @contextmanager
    def following_resizes(self) -> Iterator[LiveMemory]:
        """Track resized storages too: FSDP frees and reallocates parameters by a resize."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if _key(storage) in self._sizes:
                self._set(_key(storage), size)
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield self

    def reset(self) -> None:
        """Restart the search for the peak."""
        self.peak, self.at_peak, self._risen = self.alive, dict(self._sizes), False

    def largest(self) -> dict[object, int]:
        """Sizes of the storages at the peak, by key."""
        return dict(self._sizes) if self._risen else self.at_peak

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = _key(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
        self._set(key, storage.nbytes())

    def _drop(self, key: object) -> None:
        self._set(key, 0)
        del self._sizes[key]

    def _set(self, key: object, size: int) -> None:
        change = size - self._sizes[key]
        if change < 0 and self._risen:
            # Memory rises many times in a row; a snapshot is needed only before a fall.
            self.at_peak, self._risen = dict(self._sizes), False
        self._sizes[key] = size
        self.alive += change
        if self.alive > self.peak:
            self.peak, self._risen = self.alive, True


def _key(storage: torch.UntypedStorage) -> object:
    """Key of a storage for its lifetime: addresses are reused."""
    if not hasattr(storage, "rehearsal_key"):
        storage.rehearsal_key = object()  # type: ignore[attr-defined]
    return storage.rehearsal_key  # type: ignore[attr-defined]


def _on_device(leaf: object) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.fake_device.type == "cuda"


def storages(tensors: Iterable[Tensor]) -> dict[object, int]:
    """Device storages of these tensors by key, with the bytes that the tensors use.

    FSDP pads shards and keeps a layer's gradients in a common storage, perhaps with other tensors.
    """
    sizes: Counter[object] = Counter()
    for tensor in tensors:
        stored = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if _on_device(stored):
            sizes[_key(stored.untyped_storage())] += stored.numel() * stored.element_size()
    return sizes
