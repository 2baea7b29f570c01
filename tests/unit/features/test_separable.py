"""A disabled feature is absent: no import of the file, and no call in a step."""

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import titan_muon
from tests.dist.harness import run_program
from tests.unit.features.test_fused import needs_interpreter
from titan_muon import selection

PACKAGE = Path(titan_muon.__file__).parent
FEATURES = sorted(
    f"features.{path.stem}" for path in (PACKAGE / "features").glob("*.py") if path.stem not in ("__init__", "private")
)
KERNELS = tuple(f"kernels.{name}" for name in ("batches", "fused", "passes", "tables"))
FILES = [*FEATURES, *KERNELS, "kernels.graph"]
OTHERS = ("planner", "features", "kernels", "forecast", "plugins", "owned", "trainer", "audit", "assignment")

STEPS = """
import sys
sys.modules.update(dict.fromkeys({removed!r}))
import torch
from torch import nn
from titan_muon import Expert, Muon

print([name for name, module in sys.modules.items() if module and name.startswith({others!r})])
params = {{name: nn.Parameter(torch.ones(6, 8)) for name in ("a", "b")}}
optimizer = Muon(list(params.items()), {options})
optimizer.found_inf = {found_inf}
for step in range(2):
    for parameter in params.values():
        parameter.grad = torch.randn(6, 8)
    optimizer.step()
assert optimizer.orthogonalized == 2
print(sorted(name for name in {files!r} if sys.modules.get("titan_muon." + name) is not None))
"""


def program(kept: tuple[str, ...], options: str, found_inf: str = "None") -> str:
    """Two steps while the files of all features but `kept` are removed."""
    removed, others = ([f"titan_muon.{name}" for name in names] for names in (FILES, OTHERS))
    removed = [name for name in removed if name.removeprefix("titan_muon.") not in kept]
    return STEPS.format(removed=removed, options=options, found_inf=found_inf, files=FILES, others=tuple(others))


@pytest.mark.parametrize(
    ("kept", "options", "found_inf"),
    [
        ((), "", "None"),
        (("features.offload",), "offload='state'", "None"),
        (("features.forward",), "overlap='forward'", "None"),
        (("features.eight_bit",), "state_dtype='int8'", "None"),
        (("features.owner_state",), "state='owner'", "None"),
        ((), "", "torch.zeros(())"),
        ((), "expert=Expert(on_bad_gradient='skip_step')", "None"),
        ((), "expert=Expert(on_bad_gradient='skip_missing')", "None"),
        (("features.mask",), "expert=Expert(idle='hold')", "None"),
        (("features.weight_norms",), "algorithm='muonh', weight_decay=0.0", "None"),
        pytest.param(KERNELS, "expert=Expert(fused=True)", "None", marks=needs_interpreter),
    ],
    ids=str,
)
def test_a_step_loads_only_the_files_of_its_features(kept: tuple[str, ...], options: str, found_inf: str) -> None:
    status, shown = run_program("-c", program(kept, options, found_inf))
    assert status == 0, shown
    assert shown.splitlines()[-1] == str(sorted(kept))


def test_the_import_of_muon_loads_no_other_part_and_a_plan_by_the_rule_needs_no_planner() -> None:
    # A process of its own, because the harness has imported the package.
    code = "import sys; sys.modules['titan_muon.planner'] = None" + program((), "expert=Expert(planner='rule')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


@pytest.mark.parametrize("choice", ["skip_step", "skip_missing", "hold", "int8", "forward"])
def test_the_step_does_not_ask_for_the_option_of_a_feature(choice: str) -> None:
    trees = [ast.parse(path.read_text()) for path in (PACKAGE / "engine/step").glob("*.py")]
    values = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert choice not in values


@pytest.mark.parametrize("name", FEATURES)
def test_no_feature_imports_a_second_feature(name: str) -> None:
    source = (PACKAGE / f"{name.replace('.', '/')}.py").read_text()
    imported = {
        f"features.{node.module.split('.')[0]}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
    }
    assert imported.isdisjoint(FEATURES)


TORCHS = """
import torch
import titan_muon
from torch import nn
from titan_muon import Expert, Muon

assert titan_muon.__file__.startswith({folder!r}), titan_muon.__file__
weights = [[nn.Parameter(torch.ones(16, 24)), nn.Parameter(torch.ones(24, 16))] for _ in range(2)]
ours = Muon(zip("ab", weights[0]), adjust_lr_fn='original', weight_decay=0.1, expert=Expert(orthogonalize="reference"))
theirs = torch.optim.Muon(weights[1])
for step in range(3):
    for a, b in zip(*weights):
        a.grad = torch.randn(a.shape)
        b.grad = a.grad.clone()
    ours.step()
    theirs.step()
assert all(map(torch.equal, *weights))
print("equal")
"""


@pytest.mark.parametrize("entry", selection.FEATURES, ids=lambda entry: entry.name)
def test_a_package_without_a_feature_trains_with_torchs_bits(entry: selection.Entry, tmp_path: Path) -> None:
    """To delete a feature, delete its file and its line."""
    copied = tmp_path / "titan_muon"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__", "trainer"))
    listed = copied / "selection.py"
    text = listed.read_text()
    kept = [line for line in text.splitlines(keepends=True) if f'"{entry.file}"' not in line]
    assert len(kept) == text.count("\n") - 1
    listed.write_text("".join(kept))
    module = importlib.util.resolve_name(entry.file, "titan_muon")
    (tmp_path / module.replace(".", "/")).with_suffix(".py").unlink()
    code = TORCHS.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["equal"], done.stderr
