"""Titan Muon on TorchTitan: recipe, data, model and run. The only folder that imports torchtitan."""

from importlib import import_module
from typing import Any


# Lazy: TorchTitan takes seconds to import, and `compat.install()` must run first.
def __getattr__(name: str) -> Any:
    if name == "HybridOptimizers":
        import_module(f"{__name__}.compat").install()
        return import_module(f"{__name__}.assign.container").HybridOptimizers
    raise AttributeError(f"module 'titan_muon.titan' has no attribute {name!r}")
