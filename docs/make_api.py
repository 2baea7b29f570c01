"""Writes docs/api.md: the public names of titan_muon with signatures and docstrings.

python docs/make_api.py
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import titan_muon  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
HEAD = """# API

The public names of `titan_muon`, then those of its modules. `python docs/make_api.py` writes this page from docstrings.
[options.py](../titan_muon/options.py) declares the options of Muon, and [options.md](options.md) has tables of them.
"""

MODULES = {
    "titan_muon.audit": ("watch",),
    "titan_muon.adamw": ("AdamW",),
    "titan_muon.options": ("OptionError", "Split"),
    "titan_muon.engine.orthogonalize": ("iteration", "orthogonalize"),
    "titan_muon.engine.orthogonalize.dispatch": ("Method",),
    "titan_muon.owned": ("full_state_dict", "gather", "is_owned", "load_full_state_dict"),
    "titan_muon.plugins.qk_clip": ("AttentionLayer", "HeadWeight", "QKClip", "key_rows", "query_rows"),
    "titan_muon.ranges": ("at_least", "below"),
    "titan_muon.registry": ("OptimizerEntry", "Registry"),
    "titan_muon.engine.step.muon": ("MuonAlgorithm",),
    "titan_muon.engine.state.states": ("StateSpec",),
    "titan_muon.trainer": ("HybridOptimizers", "HybridOptimizers.Config", "fit_to_machine"),
}
"""Public names that `titan_muon` does not export."""


def signature(thing: Any) -> str:
    """Parameters of a function or class, with defaults and without annotations."""
    parameters = []
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.name != "self":
            default = parameter.default if isinstance(parameter.default, int | float | str | None | tuple) else ...
            parameters.append(parameter.replace(annotation=inspect.Parameter.empty, default=_short(parameter, default)))
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")


def _short(parameter: inspect.Parameter, default: Any) -> Any:
    return inspect.Parameter.empty if parameter.default is inspect.Parameter.empty else default


def section(name: str, thing: Any) -> list[str]:
    """Lines of a public name."""
    lines = [f"## {name}", "", f"`{name}{signature(thing)}`", "", "```text", inspect.getdoc(thing) or "", "```", ""]
    if not inspect.isclass(thing):
        return lines
    for member, value in sorted(vars(thing).items()):
        documented = value.fget if isinstance(value, property) else getattr(value, "__wrapped__", value)
        if member.startswith("_") or not inspect.isfunction(documented) or not documented.__doc__:
            continue
        shown = f"`{name}.{member}`" if isinstance(value, property) else f"`{name}.{member}{signature(documented)}`"
        lines += [shown, "", "```text", inspect.cleandoc(documented.__doc__), "```", ""]
    return lines


def page() -> str:
    """Text of the page."""
    lines = [HEAD]
    for name in sorted(titan_muon.__all__, key=str.lower):
        lines += section(name, getattr(titan_muon, name))
    for module, names in MODULES.items():
        for name in names:
            lines += section(f"{module}.{name}", attrgetter(name)(import_module(module)))
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
