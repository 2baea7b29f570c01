"""Titan Muon: the Muon optimizer for parameters that rest anywhere, and recipes that train with it on TorchTitan."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fsdp.forward_hooks import apply_in_forward
    from .muon import Muon
    from .owned import Owners, own

__all__ = ["Muon", "Owners", "apply_in_forward", "own"]


# PyTorch takes seconds to import, and a recipe's --help or error needs none of it.
def __getattr__(name: str) -> Any:
    if name in __all__:
        home = {
            "Muon": "muon",
            "apply_in_forward": "fsdp.forward_hooks",
        }.get(name, "owned")
        return getattr(import_module(f"titan_muon.{home}"), name)
    raise AttributeError(f"module 'titan_muon' has no attribute {name!r}")
