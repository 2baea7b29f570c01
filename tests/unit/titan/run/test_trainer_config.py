"""A recipe's keys reach TorchTitan's configuration under the same names, or are refused with the key."""

from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components import quantization
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

from tests import tiny
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import RecipeError, to_toml
from titan_muon.trainer.run import job
from titan_muon.trainer.run.console import print_on_rank0
from titan_muon.trainer.run.runs import Run
from titan_muon.trainer.run.signals import StopSignals
from titan_muon.trainer.run.trainer_config import trainer_config


def config(folder: Path, keys: str = "", **values: object) -> Any:
    """TorchTitan's configuration of the tiny recipe with other values, as in `checkpoint.freq=3`."""
    pairs = (word.split("=", 1) for word in keys.split())
    recipe = tiny.recipe(folder, **{key.replace(".", "__"): value for key, value in pairs}, **values)
    return trainer_config(recipe, Run(str(folder)), 1)


PARTS = [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "lm_head"]]
MODULES, CHECKPOINT = "parallelism.module_fqns_per_model_part", "activation_checkpoint"
BUDGET = f"{CHECKPOINT}.mode=memory_budget {CHECKPOINT}.memory_budget=0.25 compile.enable=true"
FLOAT8 = "float8.linear=true float8.filter_fqns=wo"
COMPILED = "compile.enable=true float8.recipe_name=rowwise_with_gw_hp"
MXFP8 = "mxfp8.linear=true mxfp8.experts=true mxfp8.pad_multiple=32"
NVFP4 = "nvfp4.linear=true nvfp4.fqns=attention.wo compile.enable=true"
EXPERTS, ON = quantization.Float8GroupedExpertsConverter.Config, {"model_compile_enabled": True}
LINEAR = partial(quantization.Float8LinearConverter.Config, filter_fqns=["wo"])
MX = quantization.MXFP8LinearConverter.Config(fqns=["attention", "feed_forward", "shared_experts"])


@pytest.mark.parametrize(
    ("keys", "place", "expected"),
    [
        ("checkpoint.load_only=true", "checkpoint.load_only", True),
        ("profiler.profiler_active=4", "profiler.profiler_active", 4),
        ("debug.detect_anomaly=true", "debug.detect_anomaly", True),
        (f"{MODULES}={str(PARTS).replace(' ', '')}", MODULES, PARTS),
        (f"{CHECKPOINT}.mode=full", f"{CHECKPOINT}.__class__", FullAC.Config),
        (f"{CHECKPOINT}.mode=selective", f"{CHECKPOINT}.force_recompute_mm_shapes_by_fqns", ["moe.router.gate"]),
        (BUDGET, f"{CHECKPOINT}.memory_budget", 0.25),
        (f"{FLOAT8} float8.emulate=true", "converters", [LINEAR(emulate=True)]),
        (
            f"{FLOAT8} float8.experts=true {COMPILED}",
            "converters",
            [LINEAR(**ON, recipe_name="rowwise_with_gw_hp"), EXPERTS(**ON)],
        ),
        (MXFP8, "converters", [MX, quantization.MXFP8GroupedExpertsConverter.Config(pad_multiple=32)]),
        (NVFP4, "converters", [quantization.NVFP4LinearConverter.Config(fqns=["attention.wo"], **ON)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_of_each_table_reach_torchtitan(tmp_path: Path, keys: str, place: str, expected: object) -> None:
    assert CHECKPOINT in place or attrgetter(place)(config(tmp_path)) != expected, "no default"
    found = attrgetter(place)(config(tmp_path, keys))
    assert (list(found) if place == "converters" else found) == expected


def test_a_password_in_a_url_is_in_no_line_and_on_no_board(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of the recipe keeps it, because a continued run reads the URL."""
    files = ("s3://me:secret@store/*.txt",)
    assert "s3://***@store/*.txt" in config(tmp_path, data__files=files).metrics.recipe
    recipe = tiny.recipe(tmp_path, data__files=files)
    print_on_rank0(to_toml(recipe))
    shown = capsys.readouterr().out
    assert ("s3://***@store/*.txt" in shown, "secret" in shown) == (True, False)


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
    monkeypatch.setattr(job, "trainer_config", lambda *args: SimpleNamespace(build=mock.Mock(side_effect=error)))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    run = Run(folder=f"{tmp_path}/runs/tiny/run")
    Path(run.folder, "tb").mkdir(parents=True)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the tests compare class and text)
        job._prepare(tiny.recipe(tmp_path, model__vocab_size=10**11), run, (), StopSignals())
    raised = caught.value
    assert Path(run.folder).exists() == (message is None)
    if message is None:
        assert raised is error
        return
    assert isinstance(raised, RecipeError)
    assert str(raised).startswith(message)
    assert "\n" not in str(raised)
    assert "(refused at " in str(raised), "a developer finds where it was raised"


def test_a_job_may_open_a_socket_to_1024_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit = mock.Mock()
    monkeypatch.setattr(job.resource, "getrlimit", lambda kind: (256, 10**6))
    monkeypatch.setattr(job.resource, "setrlimit", set_limit)
    job._raise_file_limit()
    set_limit.assert_called_once_with(job.resource.RLIMIT_NOFILE, (65536, 10**6))


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
