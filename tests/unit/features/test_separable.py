"""A disabled feature is absent: no import of the file, and no call in a step."""

import ast
from pathlib import Path

import pytest

import titan_muon.features
from tests.dist.harness import run_program
from tests.unit.features.test_fused import needs_interpreter

FILES = sorted(
    path.stem for path in Path(titan_muon.features.__file__).parent.glob("*.py") if path.name != "__init__.py"
)

STEPS = """
import sys
sys.modules.update(dict.fromkeys({removed!r}))
import torch
from torch import nn
from titan_muon import Muon

params = {{name: nn.Parameter(torch.ones(6, 8)) for name in ("a", "b")}}
optimizer = Muon(list(params.items()), {options})
optimizer.found_inf = {found_inf}
for step in range(2):
    for parameter in params.values():
        parameter.grad = torch.randn(6, 8)
    optimizer.step()
assert optimizer.orthogonalized == 2
loaded = {{name for name in sys.modules if name.startswith("titan_muon.features.")}}
print(sorted(name.rpartition(".")[2] for name in loaded if sys.modules[name] is not None))
"""


def loaded(kept: str | None, options: str = "", found_inf: str = "None") -> str:
    """The feature files imported by two steps while all files but `kept` are removed."""
    removed = [f"titan_muon.features.{name}" for name in FILES if name != kept]
    code = STEPS.format(removed=removed, options=options, found_inf=found_inf)
    status, shown = run_program("-c", code)
    assert status == 0, shown
    return shown.splitlines()[-1]


def test_a_step_without_features_loads_no_feature_file() -> None:
    assert loaded(None) == "[]"


@pytest.mark.parametrize(
    ("kept", "options", "found_inf"),
    [
        ("host", "offload='state'", "None"),
        ("early", "overlap='backward'", "None"),
        ("late", "overlap='forward'", "None"),
        ("eight_bit", "state_dtype='int8'", "None"),
        ("scaling", "", "torch.zeros(())"),
        ("idle", "idle='hold'", "None"),
        ("skip", "nonfinite='skip'", "None"),
        pytest.param("fused", "fused=True", "None", marks=needs_interpreter),
    ],
)
def test_a_step_with_a_feature_loads_only_the_file_of_this_feature(kept: str, options: str, found_inf: str) -> None:
    assert loaded(kept, options, found_inf) == f"['{kept}']"


@pytest.mark.parametrize("choice", ["skip", "hold", "int8", "backward", "forward"])
def test_engine_and_step_do_not_ask_for_the_option_of_a_feature(choice: str) -> None:
    package = Path(titan_muon.features.__file__).parents[1]
    files = [package / "engine.py", *(package / "step").glob("*.py")]
    values = {
        node.value for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
    }
    assert choice not in values


@pytest.mark.parametrize("name", FILES)
def test_no_feature_imports_a_second_feature(name: str) -> None:
    source = (Path(titan_muon.features.__file__).parent / f"{name}.py").read_text()
    imported = {
        node.module.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
    }
    assert imported.isdisjoint(FILES)
