"""`HybridOptimizers.Config` in the optimizer slot of TorchTitan's configuration, trained as in TorchTitan's Trainer."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titan_muon import Expert
from titan_muon.engine.exchange.agreement import Agreement
from titan_muon.trainer import HybridOptimizers


def configured(**options: Any) -> Any:
    """TorchTitan's configuration of the debug Llama, with another optimizer."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return dataclasses.replace(llama3_debugmodel(), optimizer=HybridOptimizers.Config(**options))


def built(config: Any) -> tuple[nn.Module, Any, Any]:
    """Model, optimizers and scheduler, as TorchTitan's Trainer builds them from a configuration."""
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
    optimizers = config.optimizer.build(model_parts=[model])
    scheduler = config.lr_scheduler.build(optimizers=optimizers, training_steps=config.training.steps)
    return model, optimizers, scheduler


def train(model: nn.Module, optimizers: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizers.step()
        scheduler.step()


def test_torchtitans_configuration_trains_and_resumes_with_equal_bits() -> None:
    # The warm-up needs the number of the step.
    muon = {"lr": 0.02, "momentum_warmup_steps": 4, "expert": Expert(orthogonalize="standard")}
    config = configured(tables={"muon": muon, "adamw": {"lr": 8e-4}})
    model, optimizers, scheduler = built(config)
    before = [param.detach().clone() for param in model.parameters()]
    assert {a.optimizer for a in optimizers.assignments} == {"muon", "adamw"}
    train(model, optimizers, scheduler, range(2))
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    state = optimizers.state_dict()
    assert not any(isinstance(value, dict) for value in state.values())
    assert {"state.tok_embeddings.weight.exp_avg_sq", "param_groups.tok_embeddings.weight.lr"} < set(state)
    other, resumed, its_scheduler = built(config)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict({key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state.items()})
    assert resumed.changes == ()
    its_scheduler.load_state_dict(scheduler.state_dict())
    train(model, optimizers, scheduler, range(2, 4))
    train(other, resumed, its_scheduler, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_torchtitans_implementation_option_reaches_adamw(implementation: str) -> None:
    _, optimizers, _ = built(configured(implementation=implementation))
    adamw = dict(zip(optimizers.parts.groups, optimizers.optimizers, strict=True))["adamw"]
    flags = {name: adamw.param_groups[0][name] for name in ("fused", "foreach")}
    assert flags == {name: name == implementation for name in flags}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"param_groups": [object()]}, "param_groups is not read by HybridOptimizers; write rules"),
        ({"optimizer_factory_kwargs_by_name": {"Muon": {}}}, r"optimizer_factory_kwargs_by_name \(Muon\).*write"),
        ({"implementation": "fused_opt_states_bf16"}, "'state_dtype': 'bfloat16'"),
        ({"tables": {"muon": {"learning_rate": 0.02}}}, r"muon\.learning_rate"),
    ],
)
def test_unread_fields_and_unknown_options_of_the_slot_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        built(configured(**options))


def test_an_error_of_a_stage_is_sent_to_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage with the embedding has no matrix; the other stage would wait in Muon's first collective."""
    compared: list[int] = []
    monkeypatch.setattr(Agreement, "_reduced", lambda self, rank, _: compared.append(rank) or rank)
    with pytest.raises(ValueError, match="Muon takes no parameter"):
        HybridOptimizers(HybridOptimizers.Config(), model_parts=[nn.ModuleDict({"embed": nn.Embedding(32, 32)})])
    assert compared == [0], "the number of the failed rank"


# A torchtitan with moved modules and another slot. An import hook hides the modules missing on its main branch.

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
        optimizers: list[BaseOptimizer.Config] = field(default_factory=list)

optimizer.OptimizersContainer = Slot
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
try:
    HybridOptimizers.Config(optimizers=[AdamW.Config()]).build(model_parts=[model])
except ValueError as error:
    assert str(error).startswith("optimizers (AdamW.Config) is not read by HybridOptimizers; write rules"), error
else:
    raise AssertionError("accepted")
"""
REFUSED = """
import runpy
sys.argv = ["train.py", "--config", "configs/qwen_moe_muon.toml", "--dry-run"]
runpy.run_path("train.py", run_name="__main__")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", MOVED + code]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_the_optimizer_fits_another_form_of_the_slot() -> None:
    done = run(SLOT + TRAIN)
    assert done.returncode == 0, done.stderr


def test_recipes_on_an_unsupported_torchtitan_are_refused_with_the_version() -> None:
    done = run(REFUSED)
    assert done.returncode == 2, done.stderr
    place = r"the torchtitan in \S+/torchtitan \(version \S+\) has other loaders: `pip install"
    assert len(re.findall(f"error: recipes know torchtitan's release 0.3.0, and {place}", done.stderr)) == 1
    assert "HybridOptimizers.Config()" in done.stderr
    assert "Traceback" not in done.stderr
