"""Counts of the operators on a fake GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = (
    *("view", "_unsafe_view", "slice", "select", "transpose", "t", "expand"),
    *("split", "detach", "alias", "as_strided", "unbind", "unsqueeze", "squeeze"),
    *("permute", "diagonal", "split_with_sizes", "empty", "empty_like", "new_empty"),
)
"""Operators without a launch: views of existing memory, and memory without values."""
MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


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


def _on_device(leaf: object) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.fake_device.type == "cuda"
