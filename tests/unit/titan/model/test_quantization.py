"""Float8: recipe keys reach TorchTitan's converters, and missing hardware is an error with the key."""

import sys
import types
from contextlib import nullcontext
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
from titan_muon.titan.checks import machine
from titan_muon.titan.model import quantization
from titan_muon.titan.model.quantization import check_blackwell, check_float8
from titan_muon.titan.recipe import RecipeError
from titan_muon.titan.recipe.sections import Float8
from titan_muon.titan.run import job
from titan_muon.titan.run.runs import Run
from titan_muon.titan.run.trainer_config import trainer_config

HOPPER, AMPERE, ADA, MI200, MI300, BLACKWELL = (9, 0), (8, 0), (8, 9), (9, 0), (9, 4), (10, 0)


NO_TORCHAO = r" = true needs the package torchao"


@pytest.mark.parametrize(
    ("keys", "capability", "amd", "torchao", "refused"),
    [
        ("linear", HOPPER, False, False, rf"float8\.linear{NO_TORCHAO}"),
        ("experts", HOPPER, False, False, rf"float8\.experts{NO_TORCHAO}"),
        ("linear", None, False, True, r"float8\.linear = true is not .* without CUDA GPUs; .*float8\.emulate"),
        ("linear", AMPERE, False, True, r"float8\.linear = true is not accepted on .* capability 8\.0; "),
        ("linear", MI200, True, True, r"float8\.linear = true is not accepted on .* capability 9\.0; "),
        ("experts", None, False, True, r"float8\.experts = true is not .* without CUDA GPUs; .* false\.$"),
        ("", None, False, False, ""),
        ("linear experts", ADA, False, True, ""),
        ("linear", MI300, True, True, ""),
        ("linear emulate", None, False, True, ""),
    ],
)
def test_impossible_float8_is_refused_with_the_key(
    keys: str, capability: tuple[int, int] | None, amd: bool, torchao: bool, refused: str
) -> None:
    section = Float8(**dict.fromkeys(keys.split(), True))
    with pytest.raises(RecipeError, match=refused) if refused else nullcontext():
        check_float8(section, capability, amd=amd, torchao=torchao)


@pytest.mark.parametrize(("known", "usable"), [({"from_recipe_name": None}, True), ({}, False)])
def test_a_torchao_without_recipes_counts_as_missing(
    known: dict[str, None], usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchTitan would warn and train without float8."""
    monkeypatch.setattr(quantization, "Float8Linear", object)
    module = types.SimpleNamespace(Float8LinearConfig=types.SimpleNamespace(**known))
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", module)  # type: ignore[arg-type]
    assert quantization.has_torchao() == usable
    monkeypatch.setattr(quantization, "Float8Linear", None)
    assert not quantization.has_torchao()


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


@pytest.mark.parametrize("key", ["mxfp8.linear", "mxfp8.experts", "nvfp4.linear"])
def test_blackwells_formats_are_refused_with_the_key(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tiny.recipe(tmp_path, **{key.replace(".", "__"): True})
    for name in ("MXFP8Linear", "NVFP4Linear"):
        monkeypatch.setattr(quantization, name, None)
    with pytest.raises(RecipeError, match=rf"^{key} = true needs the package torchao"):
        check_blackwell(asked, BLACKWELL, amd=False)
    for name in ("MXFP8Linear", "NVFP4Linear"):
        monkeypatch.setattr(quantization, name, object)
    for capability, amd, where in (
        (None, False, "without CUDA"),
        (HOPPER, False, r"9\.0"),
        (BLACKWELL, True, r"10\.0"),
    ):
        with pytest.raises(RecipeError, match=rf"^{key} = true is not accepted on .*{where}.*Blackwell"):
            check_blackwell(asked, capability, amd=amd)
    check_blackwell(asked, BLACKWELL, amd=False)
    check_blackwell(tiny.recipe(tmp_path), None, amd=False)


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"mxfp8__linear": True, "mxfp8__fqns": "wx"}, r"mxfp8\.fqns = \['wx'\] match no linear layer"),
        ({"nvfp4__linear": True, "nvfp4__fqns": "lm_head"}, r"nvfp4\.fqns .* match lm_head of shape .* 128"),
        ({"mxfp8__experts": True, "model__flavor": "tiny"}, r"mxfp8\.experts = true, but the model has no experts"),
        ({"mxfp8__linear": True, "float8__linear": True}, r"mxfp8\.linear"),
        ({"mxfp8__experts": True, "float8__experts": True}, r"mxfp8\.experts"),
    ],
)
def test_formats_that_fit_no_layer_or_another_format_are_refused(
    values: dict[str, object], refused: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=refused):
        converters(tmp_path, **values)


def test_float8_without_a_matching_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"float8\.experts = true, but the model has no experts"):
        converters(tmp_path, float8__experts=True, model__flavor="tiny")
    # Of the head, 16 does not divide the 258 rows.
    with pytest.raises(RecipeError, match=r"float8\.linear = true, but no linear layer outside float8\.filter_fqns"):
        converters(tmp_path, float8__linear=True, float8__filter_fqns="layers")


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


@pytest.mark.usefixtures("world_of_one")
def test_a_run_is_refused_before_the_folder_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "compute_capability", lambda: AMPERE)
    with pytest.raises(RecipeError, match=r"^float8\.linear = true"):
        job.train(tiny.recipe(tmp_path, float8__linear=True))
    assert not (tmp_path / "runs").exists()
