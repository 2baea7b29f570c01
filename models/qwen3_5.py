"""Qwen3.5 with its vision encoder, by TorchTitan's own specification.

Its linear attention takes kernels of flash-linear-attention, on GPUs. A plan needs none of them.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from models import common

KERNELS = (
    "fla.modules.conv.triton.ops",
    "fla.modules.conv.causal_conv1d",
    "fla.ops.gated_delta_rule.chunk",
    "fla.ops.gated_delta_rule.fused_recurrent",
)


class _Kernel:
    """A kernel that is not installed."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return cls.apply()

    @staticmethod
    def apply(*_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError(
            "model.name = 'qwen3_5' trains by the kernels of flash-linear-attention, which need a GPU: "
            "pip install flash-linear-attention there; --dry-run needs no kernels"
        )


class _Kernels(ModuleType):
    __path__: Any = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel


@contextmanager
def stand_in_for_kernels() -> Iterator[None]:
    """Let TorchTitan's module import kernels that are not installed."""
    parts = [path.split(".") for path in KERNELS]
    names = {".".join(path[:count]) for path in parts for count in range(1, len(path) + 1)}
    added = {name: _Kernels(name) for name in names if importlib.util.find_spec("fla") is None}
    sys.modules.update(added)
    try:
        yield
    finally:
        # Otherwise other packages would find the kernels installed.
        for name in added:
            del sys.modules[name]


with stand_in_for_kernels():
    from torchtitan.models.qwen3_5 import model_registry

FLAVORS = ("35B-A3B", "397B-A17B")


def build(flavor: str, vocab_size: int | None) -> ModelSpec:
    """ModelSpec of a flavor; `vocab_size` replaces the flavor's."""
    spec = model_registry(flavor)
    return common.with_vocab_size(spec, vocab_size)
