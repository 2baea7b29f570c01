"""Titan Muon on TorchTitan: recipe, data, model and run. The only folder that imports torchtitan."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

if missing := [name for name in ("torchtitan", "tyro") if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"titan_muon.titan needs {' and '.join(missing)}; install them by pip install 'titan-muon[titan]'"
    )

if find_spec("fcntl") is None:
    raise ModuleNotFoundError(
        "titan_muon.titan needs Linux or macOS, because runs and caches are locked by fcntl; use WSL 2 on Windows, or "
        "titan_muon.Hybrid in your own training loop"
    )


# TorchTitan takes seconds to import, and `compat.install()` must run before.
def __getattr__(name: str) -> Any:
    if name == "HybridOptimizers":
        import_module(f"{__name__}.torchtitan.compat").install()
        return import_module(f"{__name__}.assign.container").HybridOptimizers
    raise AttributeError(f"module 'titan_muon.titan' has no attribute {name!r}")
