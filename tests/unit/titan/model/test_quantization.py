"""Float8, MXFP8 and NVFP4: recipe keys reach TorchTitan's converters."""

import types
from pathlib import Path

import pytest
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8LinearConverter,
    NVFP4LinearConverter,
)
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.trainer import Trainer

from tests import tiny
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.trainer_config import trainer_config


def converters(folder: Path, **values: object) -> tuple[ModelConfigConverter.Config, ...]:
    return trainer_config(tiny.recipe(folder, **values), Run(str(folder)), 1).converters


def test_float8_options_reach_torchtitans_converters(tmp_path: Path) -> None:
    assert converters(tmp_path) == ()
    asked = {"float8__recipe_name": "rowwise_with_gw_hp", "float8__filter_fqns": "wo", "compile__enable": True}
    linear, experts = converters(tmp_path, float8__linear=True, float8__experts=True, **asked)
    assert linear == Float8LinearConverter.Config(
        recipe_name="rowwise_with_gw_hp", filter_fqns=["wo"], model_compile_enabled=True
    )
    assert experts == Float8GroupedExpertsConverter.Config(model_compile_enabled=True)
    (emulated,) = converters(tmp_path, float8__linear=True, float8__emulate=True)
    assert (emulated.emulate, emulated.model_compile_enabled) == (True, False)
    assert emulated.filter_fqns == ["lm_head", "router.gate"]


def test_mxfp8_and_nvfp4_options_reach_torchtitans_converters(tmp_path: Path) -> None:
    linear, experts = converters(tmp_path, mxfp8__linear=True, mxfp8__experts=True, mxfp8__pad_multiple=32)
    chosen = ["attention", "feed_forward", "shared_experts"]
    assert linear == MXFP8LinearConverter.Config(fqns=chosen)
    assert experts == MXFP8GroupedExpertsConverter.Config(pad_multiple=32)
    (four,) = converters(tmp_path, nvfp4__linear=True, nvfp4__fqns="attention.wo", compile__enable=True)
    assert four == NVFP4LinearConverter.Config(fqns=["attention.wo"], model_compile_enabled=True)


def test_the_converters_run_before_the_trainer_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = trainer_config(tiny.recipe(tmp_path), Run(str(tmp_path)), 1), []
    converter = types.SimpleNamespace(convert=lambda model: [model])
    config.converters = (types.SimpleNamespace(build=lambda: converter),) * 2

    def init(trainer: object, config: Trainer.Config) -> None:
        seen.append(config.model_spec.model)
        raise NotImplementedError

    model = config.model_spec.model
    monkeypatch.setattr(Trainer, "__init__", init)
    with pytest.raises(NotImplementedError):
        config.build()
    assert seen == [[[model]]]
