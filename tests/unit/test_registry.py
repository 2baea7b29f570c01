"""Optimizers by name: built in, added by packages, and clear errors for unknown names."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from titan_muon.engine.orthogonalize import COEFFICIENTS
from titan_muon.options import CoefficientSet, Expert
from titan_muon.registry import Registry, algorithms, optimizers, placements, shared_options
from titan_muon.trainer.torchtitan import compat

compat.install()

# Registers the optimizers of this package.
import titan_muon.trainer.assign.container  # noqa: E402
import titan_muon.trainer.model.parallelize  # noqa: E402, F401


def test_a_registered_value_is_found_by_name_and_a_similar_name_is_suggested() -> None:
    registry: Registry[int] = Registry("some.key", "titan_muon.tests")
    for value, name in enumerate(("zero", "one", "three")):
        registry.register(name, value)
    with pytest.raises(ValueError, match=r"some\.key: 'one' is registered already; choose another name"):
        registry.register("one", 2)
    assert (registry.get("one"), registry.get("zero")) == (1, 0)
    hint = "some.key = 'thre' is unknown; did you mean 'three'? choose from: one, three, zero"
    with pytest.raises(ValueError, match=re.escape(hint)):
        registry.get("thre")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with an optimizer, as installed by pip."""
    (tmp_path / "their_package.py").write_text(
        "import torch\nfrom titan_muon.registry import OptimizerEntry\n"
        "entry = OptimizerEntry(lambda groups, **options: torch.optim.SGD(groups, **options), ('foreach',))\n"
    )
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[titan_muon.optimizers]\ntheir_sgd = their_package:entry\nbroken = their_package:nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("their_package", None)


@pytest.mark.usefixtures("installed")
def test_a_package_adds_an_optimizer_by_name() -> None:
    """The package is imported at the first use of its name."""
    registry: Registry[Any] = Registry("optimizer", "titan_muon.optimizers")
    registry.register("mine", 1)
    assert registry.get("mine") == 1
    assert "their_sgd" in registry.names()
    assert "their_package" not in sys.modules
    built = registry.get("their_sgd").build([{"params": [torch.nn.Parameter(torch.ones(2))]}], lr=0.5)
    assert isinstance(built, torch.optim.SGD)
    assert registry.get("their_sgd").shared == ("foreach",)
    with pytest.raises(AttributeError, match="nothing"):
        registry.get("broken")


def test_shared_options_belong_to_the_whole_optimizer() -> None:
    options = {"lr": 0.1, "expert": Expert(exchange="all_gather"), "foreach": True}
    assert shared_options("muon", options) == {"expert": Expert(exchange="all_gather")}
    assert shared_options("adamw", options) == {"foreach": True}


def test_a_recipe_is_checked_against_every_name_of_this_package_before_the_name_is_registered() -> None:
    assert {*optimizers.own} == {"muon", "adamw"} <= set(optimizers._values)
    assert {*algorithms.own} == set(algorithms._values)
    assert {*placements.own, "shard0"} == set(placements._values)
    assert get_args(CoefficientSet) == tuple(COEFFICIENTS)
