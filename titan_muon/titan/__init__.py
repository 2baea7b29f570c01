"""Titan Muon on TorchTitan: the recipe, the data, the model and the run. The only folder that imports torchtitan."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assign.container import HybridOptimizers

__all__ = ["HybridOptimizers"]


# TorchTitan takes seconds to import, and its gaps on CPUs must be closed before.
def __getattr__(name: str) -> Any:
    if name == "HybridOptimizers":
        from .compat import install

        install()
        from .assign.container import HybridOptimizers

        return HybridOptimizers
    raise AttributeError(f"module 'titan_muon.titan' has no attribute {name!r}")
