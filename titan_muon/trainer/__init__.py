"""Titan Muon on TorchTitan: recipe, data, model and run. The only folder that imports torchtitan."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

if missing := [name for name in ("torchtitan", "tyro") if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"titan_muon.trainer needs {' and '.join(missing)}; install them by pip install 'titan-muon[titan]'"
    )

if find_spec("fcntl") is None:
    raise ModuleNotFoundError(
        "titan_muon.trainer needs Linux or macOS, because fcntl locks runs and caches; use WSL 2 on Windows, or "
        "titan_muon.Hybrid in your own training loop"
    )


class _InstallFirst(MetaPathFinder):
    """Calls `compat.install()` when TorchTitan is imported, before its modules copy the device."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torchtitan":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and (loader := spec.loader) is not None:
            execute = loader.exec_module

            def execute_and_install(module: ModuleType) -> None:
                execute(module)
                import_module(f"{__name__}.torchtitan.compat").install()

            vars(loader)["exec_module"] = execute_and_install
        return spec


sys.meta_path.insert(0, _InstallFirst())


# TorchTitan takes seconds to import.
def __getattr__(name: str) -> Any:
    if name == "HybridOptimizers":
        return import_module(f"{__name__}.assign.container").HybridOptimizers
    if name == "fit_to_machine":
        return import_module(f"{__name__}.model.parallelize").fit_to_machine
    raise AttributeError(f"module 'titan_muon.trainer' has no attribute {name!r}")
