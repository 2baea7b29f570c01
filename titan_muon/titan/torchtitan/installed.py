"""`titan`: the module of the installed TorchTitan."""

from typing import TYPE_CHECKING

from titan_muon.titan.torchtitan import compat

if TYPE_CHECKING or compat.recipe_version() == "v0_3":
    from titan_muon.titan.torchtitan import v0_3 as titan
else:
    from titan_muon.titan.torchtitan import main as titan

__all__ = ["titan"]

if TYPE_CHECKING:
    from titan_muon.titan.torchtitan import main
    from titan_muon.titan.torchtitan.interface import TorchTitan

    _VERSIONS: tuple[TorchTitan, ...] = (titan, main)
