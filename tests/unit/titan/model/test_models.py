"""The models: sizes, Muon's matrices, initial values, of pipeline stages too; and the placement of parameters."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.pipeline_parallel import _split_module

import models  # noqa: F401 (registers the families)
from benchmarks.owned_model import make, matrices
from tests import tiny
from titan_muon import Owners, own, registry
from titan_muon.engine.layout.work import gram_flops, standard_flops
from titan_muon.owned import is_owned
from titan_muon.owned.owners import check_rules
from titan_muon.planner.ownership import PlacementRule
from titan_muon.trainer.dry_run.meta_model import build_meta_model
from titan_muon.trainer.model.owned_placement import _flops
from titan_muon.trainer.model.parallelize import with_placement
from titan_muon.trainer.model.pipeline import init_within
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import Recipe, RecipeError
from titan_muon.trainer.recipe.sections import Muon, Placement
from titan_muon.trainer.recipe.torchtitan_sections import Parallelism


def initialized(config: Any, seed: int = 0) -> Any:
    """The model of a configuration on the CPU, with the initial values of a seed."""
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def attended(inner: Any, *qkv: Tensor, **options: Any) -> Tensor:
    """Output of an inner attention for queries, keys and values of (batch, length, heads, width)."""
    out: Tensor = inner(*qkv, **options)
    return out.view(*qkv[0].shape[:2], *out.shape[-2:])


# Published sizes; see the sources in each family's module. Parameters, matrices, and every matrix inside the layers
# except the router's, as `COUNT of ROWSxCOLUMNS`. `xSTACK` follows for a stack of experts in one parameter.
SIZES = {
    "qwen3/0.6B": (0.596e9, 196, ""),
    "qwen3/1.7B": (1.72e9, 196, ""),
    "qwen3/8B": (8.19e9, 252, "72 of 4096x4096, 72 of 1024x4096, 72 of 12288x4096, 36 of 4096x12288"),
    "qwen3/30B-A3B": (
        30.5e9,
        18_624,
        "48 of 4096x2048, 96 of 512x2048, 48 of 2048x4096, 96 of 768x2048x128, 48 of 2048x768x128",
    ),
    "llama3/42M": (42.5e6, 56, ""),
    "llama3/8B": (8.03e9, 224, "64 of 4096x4096, 64 of 1024x4096, 64 of 14336x4096, 32 of 4096x14336"),
    "llama3/70B": (70.6e9, 560, "160 of 8192x8192, 160 of 1024x8192, 160 of 28672x8192, 80 of 8192x28672"),
    "deepseek_v3/671B": (
        671e9,
        45_032,
        "61 of 1536x7168, 61 of 24576x1536, 61 of 576x7168, 61 of 32768x512, 61 of 7168x16384, 6 of 18432x7168, "
        "3 of 7168x18432, 116 of 2048x7168, 58 of 7168x2048, 116 of 2048x7168x256, 58 of 7168x2048x256",
    ),
    "deepseek_v3/kimi_k2": (1.026e12, 69_608, ""),
    "deepseek_v3/moonlight_16B_A3B": (
        15.96e9,
        27 * 4 + 3 + 26 * 3 + 26 * 3 * 64,
        "27 of 3072x2048, 27 of 576x2048, 27 of 4096x512, 27 of 2048x2048, 2 of 11264x2048, 1 of 2048x11264, "
        "52 of 2816x2048, 26 of 2048x2816, 52 of 1408x2048x64, 26 of 2048x1408x64",
    ),
    "gpt_oss/20b": (20.9e9, 1584, "24 of 5120x2880, 24 of 2880x4096, 24 of 5760x2880x32, 24 of 2880x2880x32"),
    "gpt_oss/120b": (116.8e9, 36 * (2 + 2 * 128), ""),
    "kimi_k2_5/Kimi-K2.5": (1.026e12, 69_608, ""),
    "kimi_k2_5/moonlight-16B-A3B": (15.96e9, 27 * 4 + 3 + 26 * 3 + 26 * 3 * 64, ""),
    # 34.7 and 396.3 billion, and a vision encoder of 27 layers.
    "qwen3_5/35B-A3B": (35.1e9, 40 * (3 * 256 + 4) + 30 * 7 + 10 * 4 + 27 * 6, ""),
    "qwen3_5/397B-A17B": (396.8e9, 60 * (3 * 512 + 4) + 45 * 7 + 15 * 4 + 27 * 6, ""),
}
EVERY = [f"{name}/{flavor}" for name in registry.models.names() for flavor in registry.models.get(name).flavors()]
TINY = [key for key in EVERY if "tiny" in key]
SMALL = [*TINY, *(key for key in EVERY if key.endswith("/debugmodel"))]


def parameters(key: str, **options: object) -> dict[str, torch.nn.Parameter]:
    with torch.device("meta"):
        return dict(model_spec(*key.split("/"), on_cpu=False, **options).model.build().named_parameters())


@pytest.mark.parametrize("key", SIZES)
def test_a_real_size_has_the_published_parameters_and_matrices(key: str) -> None:
    elements, matrices, shapes = SIZES[key]
    named = parameters(key)
    assert sum(p.numel() for p in named.values()) == pytest.approx(elements, rel=2e-3)
    hidden = [
        p for name, p in named.items() if re.search(r"layers\.(?!.*(\.router\.|bias|\.conv_))", name) and p.ndim > 1
    ]
    counts = Counter("x".join(map(str, (*p.shape[-2:], *p.shape[:-2]))) for p in hidden)
    assert sum(p.shape[:-2].numel() for p in hidden) == matrices
    if shapes:
        assert {f"{count} of {shape}" for shape, count in counts.items()} == set(shapes.split(", "))
    if key == "qwen3/8B":
        assert sum(p.numel() for p in hidden) == pytest.approx(6.95e9, rel=1e-3)


def test_the_linear_attention_of_qwen3_5_names_the_package_of_its_kernels() -> None:
    model_spec("qwen3_5", "35B-A3B", on_cpu=False)
    with importlib.import_module("models.qwen3_5").stand_in_for_kernels():
        kernel = importlib.import_module("fla.modules.conv.triton.ops").CausalConv1dFunction
    with pytest.raises(ModuleNotFoundError, match="pip install flash-linear-attention"):
        kernel.apply()
    assert "fla" not in sys.modules, "other packages would find the kernels installed"


def test_every_real_flavor_is_checked() -> None:
    assert set(EVERY) == set(SIZES) | set(SMALL)


@pytest.mark.parametrize("key", [key for key in TINY if key.endswith("/tiny")])
def test_a_tiny_flavor_fits_a_laptop_and_divides_by_4(key: str) -> None:
    assert 1e6 < sum(p.numel() for p in parameters(key).values()) < 5e6
    for layer in model_spec(*key.split("/")).model.layers:
        attention = layer.attention
        assert attention.n_heads % 4 == 0
        assert getattr(attention, "n_kv_heads", 4) % 4 == 0
        assert layer.moe is None or layer.moe.num_experts % 4 == 0


@pytest.mark.parametrize("key", SMALL)
def test_the_vocabulary_option_replaces_the_flavors_vocabulary(key: str) -> None:
    named = parameters(key, vocab_size=258)
    assert named["tok_embeddings.weight"].shape[0] == named["lm_head.weight"].shape[0] == 258
    assert model_spec(*key.split("/"), vocab_size=258, on_cpu=False).model.vocab_size == 258


@pytest.mark.parametrize("key", TINY)
def test_initial_values_have_the_stated_deviation(key: str) -> None:
    for name, parameter in initialized(model_spec(*key.split("/")).model).named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert 0.004 < parameter.std().item() < 0.025, name


# Stages of a pipeline

PARTS = (("tok_embeddings", "layers.0"), ("layers.1", "layers.2"), ("layers.3",), ("norm", "lm_head"))
"""Of a model with four layers."""
SEED = 7


def started(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.state_dict().items()}


@pytest.mark.parametrize(("family", "flavor"), [("llama3", "tiny"), ("qwen3", "moe_tiny"), ("deepseek_v3", "tiny")])
def test_every_stage_starts_as_in_the_whole_model(family: str, flavor: str) -> None:
    with torch.device("meta"):
        whole = model_spec(family, flavor).model.build()
    expected, weights = started(initialized(model_spec(family, flavor).model, SEED)), {}
    ends = [f"layers.{index}" for index in range(3, len(whole.layers))]
    for number, names in enumerate((*PARTS[:2], ends, PARTS[3])):
        part = _split_module(whole, list(names)).to_empty(device="cpu")
        part.init_weights = lambda: None
        # TorchTitan's seed of a stage.
        torch.manual_seed(SEED + number)
        stream = torch.get_rng_state()
        with torch.no_grad():
            init_within(whole, part, SEED)
        assert torch.equal(torch.get_rng_state(), stream), "the stage goes on with its own seed"
        assert "init_weights" not in vars(part), "the whole model is let go"
        weights |= started(part)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_pipelining_gives_every_stage_the_values_of_the_whole_model() -> None:
    spec, parts = model_spec("llama3", "tiny"), []

    def cut(model: torch.nn.Module, **_: object) -> tuple[object, ...]:
        parts.append(_split_module(model, ["norm", "lm_head"]).to_empty(device="cpu"))
        return None, parts, False, True

    recipe = Recipe(parallelism=Parallelism(pipeline_parallel_degree=2))
    with torch.device("meta"):
        whole = spec.model.build()
    with_placement(dataclasses.replace(spec, pipelining_fn=cut), recipe).pipelining_fn(whole)
    torch.manual_seed(1)
    with torch.no_grad():
        parts[0].init_weights(buffer_device=None)
    alone = initialized(spec.model, recipe.debug.seed)
    assert torch.equal(parts[0].lm_head.weight, alone.lm_head.weight)


# Placement: the first matching rule decides, owners are balanced by cost, and impossible owners are refused

NAMES = ("layers.0.wq", "layers.0.norm", "layers.1.wq", "head")


def owned(match: str, owner: object = "balanced") -> PlacementRule:
    return PlacementRule(match=match, placement="owned", owner=owner)  # type: ignore[arg-type]


def shard0(match: str, owner: object = "balanced") -> PlacementRule:
    return replace(owned(match, owner), placement="shard0")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([owned("layers.2.*")], r"placement\.rule\[0\]\.match = 'layers\.2\.\*' matches no parameter"),
        ([owned("*"), shard0("head")], r"placement\.rule\[1\]\.match = 'head' matches no parameter.*move it up"),
        ([owned("*", "first")], r"placement\.rule\[0\]\.owner = 'first' is not accepted; it takes \"balanced\""),
        ([replace(owned("*"), placement="own")], r"placement\.rule\[0\]\.placement = 'own' is not one of owned"),
        ([shard0("head", 1)], r"placement\.rule\[0\]\.owner = 1: sharded parameters have no owner"),
    ],
)
def test_a_rule_without_effect_is_refused(rules: list[PlacementRule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rules(NAMES, rules)


@pytest.mark.usefixtures("four_ranks")
def test_library_rules_place_any_parameter() -> None:
    net = make()
    rules = shard0("layers.0.wq.*"), owned("*.norm1.*", 3), owned("layers.1.*", "layer"), owned("*.wv.weight", 2)
    owners = Owners(net, mesh=init_device_mesh("cpu", (4,)), params=matrices(net), rules=rules)
    assert "layers.0.wq.weight" not in owners.infos
    assert {owners.owners(f"layers.{i}.norm1.weight") for i in range(3)} == {(3,)}, "the first rule decides"
    assert len({owners.owners(name) for name in owners.infos if name.startswith("layers.1.w")}) == 1
    assert owners.owners("layers.0.wv.weight") == owners.owners("layers.2.wv.weight") == (2,)
    for layer in net.layers:
        own(layer, owners=owners)
    assert is_owned(net.layers[0].norm1.weight)
    assert not is_owned(net.layers[0].wq.weight)


@pytest.mark.usefixtures("four_ranks")
def test_parameters_outside_muon_are_balanced_by_bytes() -> None:
    net = make()
    params = matrices(net)
    owners = Owners(net, mesh=init_device_mesh("cpu", (4,)), params=params, elementwise=params)
    assert {item.flops for item in owners.ownership.items} == {0}
    held = [load.bytes for load in owners.ownership.loads()]
    assert max(held) <= 1.2 * sum(held) / 4


def test_owned_matrices_of_another_model_are_refused() -> None:
    spec = replace(model_spec("qwen3", "tiny"), parallelize_fn=lambda model, **_: model)
    with pytest.raises(RecipeError, match=r"placement\.muon = 'owned' knows TorchTitan's decoders.*use 'shard0'"):
        with_placement(spec, Recipe(placement=Placement(muon="owned")))


def test_owners_are_balanced_by_the_flops_of_the_chosen_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `auto` takes the Gram iteration for a wide matrix, at a lower cost."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    flops = {device: _flops(Recipe(), device)(1024, 8192) for device in ("cpu", "cuda")}
    assert flops["cpu"] == standard_flops(1024, 8192, 5)
    assert flops["cuda"] == gram_flops(1024, 8192, 5, restarts=1) < flops["cpu"]
    # SOAP's cost grows with the third power of the longer side.
    for algorithm, tall_costs_more in (("muon", False), ("soap", True)):
        cost = _flops(Recipe(muon=Muon(algorithm=algorithm)), "cpu")
        assert (cost(4096, 256) > cost(1024, 1024)) is tall_costs_more, algorithm


def test_a_dry_run_counts_a_tied_embedding_once(tmp_path: Path) -> None:
    """Under spmd_types sharding splits the parameter into two, except with torch 2.14 and newer."""
    tied = tiny.recipe(tmp_path, model__flavor="0.6B")
    names = [name for name in build_meta_model(tied, 2, "cuda").parameters if "embedding" in name or "head" in name]
    assert len(names) == 1
