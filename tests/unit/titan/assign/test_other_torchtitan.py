"""A torchtitan with moved modules and another slot: the optimizer trains, and recipes are refused.

An import hook hides the modules missing on torchtitan's main branch.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MOVED = """
import sys

HIDDEN = ("torchtitan.components.dataloader", "torchtitan.components.data", "torchtitan.components.validate")

class Moved:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Moved())
"""
SLOT = """
from dataclasses import dataclass, field
from titan_muon.trainer.torchtitan import compat
compat.install()
from torchtitan.components import optimizer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Configurable

class BaseOptimizer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

class AdamW(BaseOptimizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseOptimizer.Config):
        lr: float = 1e-3

class Slot(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        FIELD

optimizer.OptimizersContainer = Slot
"""
TYPED = SLOT.replace("FIELD", "optimizers: list[BaseOptimizer.Config] = field(default_factory=list)")
EMPTY = SLOT.replace("FIELD", "pass")
UNREAD = """
try:
    HybridOptimizers.Config(optimizers=[AdamW.Config()]).build(model_parts=[model])
except ValueError as error:
    assert str(error).startswith("optimizers (AdamW.Config) is not read by HybridOptimizers; write rules"), error
else:
    raise AssertionError("accepted")
"""
TRAIN = """
import torch
from torch import nn
from titan_muon.trainer import HybridOptimizers

model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "layers": nn.ModuleList([nn.Linear(32, 32)])})
optimizers = HybridOptimizers.Config().build(model_parts=[model])
before = [param.detach().clone() for param in model.parameters()]
for param in model.parameters():
    param.grad = torch.randn_like(param)
optimizers.step()
assert not any(map(torch.equal, before, model.parameters()))
assert {"muon", "adamw"} == {assignment.optimizer for assignment in optimizers.assignments}
"""
REFUSED = """
import runpy
sys.argv = ["train.py", "--config", "configs/qwen_moe_muon.toml", "--dry-run"]
runpy.run_path("train.py", run_name="__main__")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", MOVED + code]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("code", [TRAIN, TYPED + TRAIN + UNREAD, EMPTY + TRAIN], ids=["groups", "typed", "neither"])
def test_the_optimizer_fits_every_form_of_the_slot(code: str) -> None:
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_recipes_on_an_unsupported_torchtitan_are_refused_with_the_version() -> None:
    done = run(REFUSED)
    assert done.returncode == 2, done.stderr
    place = r"the torchtitan in \S+/torchtitan \(version \S+\) has other loaders: `pip install"
    assert len(re.findall(f"error: recipes know torchtitan's release 0.3.0, and {place}", done.stderr)) == 1
    assert "HybridOptimizers.Config()" in done.stderr
    assert "Traceback" not in done.stderr
