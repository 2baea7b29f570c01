"""A recipe's keys reach TorchTitan's configuration under the same names, or are refused with the key."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8LinearConverter,
    NVFP4LinearConverter,
)
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.trainer import Trainer

from tests import tiny
from titan_muon.trainer.checks.start import refuse_on_cpu
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import Recipe, RecipeError, to_toml
from titan_muon.trainer.run import job
from titan_muon.trainer.run.console import print_on_rank0
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.signals import StopSignals
from titan_muon.trainer.run.trainer_config import trainer_config


def config(folder: Path, world_size: int = 1, **values: object):
    return trainer_config(tiny.recipe(folder, **values), Run(str(folder)), world_size)


def prepare(
    build: Callable[[], object], recipe: Recipe, monkeypatch: pytest.MonkeyPatch, group: object = None
) -> tuple[Exception, bool]:
    """The error of a start on rank 0 of 4 whose trainer is of `build`, and whether the run's folder stayed."""
    monkeypatch.setattr(job, "trainer_config", lambda *args: SimpleNamespace(build=build))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    run = Run(folder=f"{recipe.dump_folder}/tiny/run")
    Path(run.folder, "tb").mkdir(parents=True)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the tests compare class and text)
        job._prepare(recipe, run, (), StopSignals(group))  # type: ignore[arg-type]
    return caught.value, Path(run.folder).exists()


REACHING = {"checkpoint.load_only": True, "profiler.profiler_active": 4, "debug.detect_anomaly": True}


def test_an_option_of_each_table_reaches_torchtitan(tmp_path: Path) -> None:
    plain = config(tmp_path)
    changed = config(tmp_path, **{key.replace(".", "__"): value for key, value in REACHING.items()})
    for key, value in REACHING.items():
        table, name = key.split(".")
        assert getattr(getattr(plain, table), name) != value, "a default would show nothing"
        assert getattr(getattr(changed, table), name) == value


def test_a_password_in_a_url_is_in_no_line_and_on_no_board(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of the recipe keeps it, because a continued run reads the URL."""
    files = ("s3://me:secret@store/*.txt",)
    assert "s3://***@store/*.txt" in config(tmp_path, data__files=files).metrics.recipe
    recipe = tiny.recipe(tmp_path, data__files=files)
    print_on_rank0(to_toml(recipe))
    shown = capsys.readouterr().out
    assert ("s3://***@store/*.txt" in shown, "secret" in shown) == (True, False)


def test_activation_checkpointing_uses_the_keys_of_the_mode(tmp_path: Path) -> None:
    options = {"activation_checkpoint__memory_budget": 0.25, "compile__enable": True}
    kinds = {"full": FullAC.Config, "selective": SelectiveAC.Config, "memory_budget": MemoryBudgetAC.Config}
    made = {}
    for mode, kind in {**kinds, "none": None}.items():
        made[mode] = config(tmp_path, activation_checkpoint__mode=mode, **options).activation_checkpoint
        assert made[mode] is None if kind is None else isinstance(made[mode], kind)
    assert made["memory_budget"].memory_budget == 0.25
    assert made["selective"].force_recompute_mm_shapes_by_fqns == ["moe.router.gate"]


def test_gpu_options_are_refused_on_the_cpu_and_planned_for_gpus(tmp_path: Path) -> None:
    refuse_on_cpu(tiny.recipe(tmp_path))
    values = {"checkpoint__async_mode": "async_with_pinned_mem"}
    with pytest.raises(RecipeError, match=r"^checkpoint\.async_mode = .* is not accepted on the CPU"):
        refuse_on_cpu(tiny.recipe(tmp_path, **values))
    config(tmp_path, 2, **values)


@pytest.mark.parametrize(("accelerator", "offload"), [(True, True), (True, False), (False, True)])
def test_parameters_on_the_host_have_a_cpu_backend_beside_the_device_backend(
    accelerator: bool, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU torch refuses a second backend."""
    init = mock.Mock()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(job, "on_accelerator", lambda: accelerator)
    monkeypatch.setattr("titan_muon.trainer.torchtitan.compat.init_distributed", init)
    job._init_distributed(tiny.recipe(tmp_path, training__enable_cpu_offload=offload))
    assert init.call_args.kwargs["cpu_backend"] == (accelerator and offload)


MODEL = "model.flavor = 'moe_tiny' does not fit into the memory of rank 0: "
ALLOCATOR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 25 TB"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad degrees"), "bad degrees (refused at "),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 25 TB"), MODEL + "CUDA out of memory.. Choose"),
        (RuntimeError(ALLOCATOR), f"{MODEL}{ALLOCATOR}. Choose a smaller model or vocabulary, or more ranks; --dry"),
        (RuntimeError("any other error"), None),
    ],
)
def test_an_error_of_the_build_is_refused_with_the_key_and_leaves_no_run_folder(
    error: Exception, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> None:
        raise error

    raised, is_kept = prepare(build, tiny.recipe(tmp_path, model__vocab_size=10**11), monkeypatch)
    assert is_kept == (message is None)
    if message is None:
        assert raised is error
        return
    assert isinstance(raised, RecipeError)
    assert str(raised).startswith(message)
    assert "\n" not in str(raised)
    assert f"(refused at {__file__}:" in str(raised), "a developer finds where it was raised"


def test_a_module_of_plain_torch_is_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchTitan initializes and shards modules of its own classes only. Training and dry run share this function."""
    kind = type(model_spec("qwen3", "moe_tiny").model)
    build = kind.build

    def with_plain_linear(self: object) -> nn.Module:
        model = build(self)
        model.layers["0"].extra = nn.Linear(2, 2)
        return model

    monkeypatch.setattr(kind, "build", with_plain_linear)
    problem = r"model\.name = 'qwen3': .*'layers\.0\.extra' \(Linear\)\. Build these modules by .*Linear\.Config"
    with pytest.raises(RecipeError, match=problem):
        config(tmp_path)


# Float8, MXFP8 and NVFP4


def converters(folder: Path, **values: object) -> Any:
    return config(folder, **values).converters


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
    made, seen = config(tmp_path), list[object]()
    converter = SimpleNamespace(convert=lambda model: [model])
    made.converters = (SimpleNamespace(build=lambda: converter),) * 2
    model = made.model_spec.model

    def init(trainer: object, config: Trainer.Config) -> None:
        seen.append(config.model_spec.model)
        raise NotImplementedError

    monkeypatch.setattr(Trainer, "__init__", init)
    with pytest.raises(NotImplementedError):
        made.build()
    assert seen == [[[model]]]
