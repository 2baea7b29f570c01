"""Writes docs/api.md: public names of titan_muon with signature, first sentence of the docstring, and file.

python docs/make_api.py
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import titan_muon  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
HEAD = """# API

```python
import titan_muon

help(titan_muon.Hybrid)  # arguments, returned values and errors
```

The public names of `titan_muon`, then of its modules: link to the file, parameters and first sentence of the docstring.
Methods stand below the class; [your_own_algorithm.md](your_own_algorithm.md) has the methods of an algorithm.
[options.md](options.md) has the keywords of `Muon` and `Expert`. `python docs/make_api.py` writes this page.
"""

MODULES = {
    "titan_muon.audit": ("watch",),
    "titan_muon.adamw": ("AdamW",),
    "titan_muon.options": ("OptionError", "Split"),
    "titan_muon.engine.orthogonalize": ("Method", "iteration", "orthogonalize"),
    "titan_muon.owned": ("full_state_dict", "gather", "is_owned", "load_full_state_dict"),
    "titan_muon.plugins.qk_clip": ("AttentionLayer", "HeadWeight", "QKClip", "key_rows", "query_rows"),
    "titan_muon.ranges": ("at_least", "below"),
    "titan_muon.registry": ("OptimizerEntry", "Registry"),
    "titan_muon.engine.step.muon": ("MuonAlgorithm",),
    "titan_muon.engine.state.states": ("StateSpec",),
    "titan_muon.trainer": ("HybridOptimizers", "HybridOptimizers.Config", "fit_to_machine"),
}
"""Public names that `titan_muon` does not export."""
INNER = ("titan_muon.engine", "titan_muon.trainer")
"""Modules with methods that a caller of the name does not call."""
DESCRIBED = (titan_muon.Muon, titan_muon.Expert)
"""Classes whose arguments are in docs/options.md."""


def signature(thing: Any) -> str:
    """Parameters of a function or class, with defaults and without annotations."""
    parameters = []
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.name not in ("self", "cls"):
            default = parameter.default if isinstance(parameter.default, int | float | str | None | tuple) else ...
            parameters.append(parameter.replace(annotation=inspect.Parameter.empty, default=_short(parameter, default)))
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")


def _short(parameter: inspect.Parameter, default: Any) -> Any:
    return inspect.Parameter.empty if parameter.default is inspect.Parameter.empty else default


def sentence(thing: Any) -> str:
    """First sentence of a docstring, as a cell of a table."""
    paragraph = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".").replace("|", "\\|")


def file_of(thing: Any) -> str:
    """Path of the file with the definition, from docs/."""
    return f"../{Path(inspect.getfile(inspect.unwrap(thing))).resolve().relative_to(ROOT)}"


def rows(name: str, thing: Any) -> Iterator[str]:
    """A row for a public name, and one for each documented method of a class."""
    shown = "(...)" if thing in DESCRIBED else signature(thing)
    yield f"| [{name}]({file_of(thing)})`{shown}` | {sentence(thing)} |"
    if inspect.isclass(thing) and thing is not titan_muon.Expert and not name.startswith(INNER):
        for member, value in sorted(vars(thing).items()):
            documented = value.fget if isinstance(value, property) else getattr(value, "__wrapped__", value)
            if not member.startswith("_") and inspect.isfunction(documented) and documented.__doc__:
                shown = "" if isinstance(value, property) else signature(documented)
                yield f"| `.{member}{shown}` | {sentence(documented)} |"


def page() -> str:
    """Text of the page."""
    lines = [HEAD, "| name | does |", "|---|---|"]
    for name in sorted(titan_muon.__all__, key=str.lower):
        lines += rows(name, getattr(titan_muon, name))
    for module, names in MODULES.items():
        for name in names:
            lines += rows(f"{module}.{name}", attrgetter(name)(import_module(module)))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
