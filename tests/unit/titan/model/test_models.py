"""The models: names, and Muon's matrices."""

from collections import Counter

import pytest
import torch

import models  # noqa: F401 (registers the families)
from titan_muon import registry
from titan_muon.titan.model.spec import model_spec
from titan_muon.titan.recipe import RecipeError

# (rows, columns, matrices per parameter) of every matrix inside the layers, except the router's, to the number of
# parameters of this shape. Published sizes; see the sources in each family's module.
MLA_671B = {
    (1536, 7168, 1): 61,
    (24576, 1536, 1): 61,
    (576, 7168, 1): 61,
    (32768, 512, 1): 61,
    (7168, 16384, 1): 61,
}
MLA_K2 = {
    (1536, 7168, 1): 61,
    (12288, 1536, 1): 61,
    (576, 7168, 1): 61,
    (16384, 512, 1): 61,
    (7168, 8192, 1): 61,
}
SHAPES = {
    ("qwen3", "0.6B"): {
        (2048, 1024, 1): 28,
        (1024, 1024, 1): 28 * 2,
        (1024, 2048, 1): 28,
        (3072, 1024, 1): 28 * 2,
        (1024, 3072, 1): 28,
    },
    ("qwen3", "8B"): {
        (4096, 4096, 1): 36 * 2,
        (1024, 4096, 1): 36 * 2,
        (12288, 4096, 1): 36 * 2,
        (4096, 12288, 1): 36,
    },
    ("qwen3", "30B-A3B"): {
        (4096, 2048, 1): 48,
        (512, 2048, 1): 48 * 2,
        (2048, 4096, 1): 48,
        (768, 2048, 128): 48 * 2,
        (2048, 768, 128): 48,
    },
    ("llama3", "8B"): {
        (4096, 4096, 1): 32 * 2,
        (1024, 4096, 1): 32 * 2,
        (14336, 4096, 1): 32 * 2,
        (4096, 14336, 1): 32,
    },
    ("llama3", "70B"): {
        (8192, 8192, 1): 80 * 2,
        (1024, 8192, 1): 80 * 2,
        (28672, 8192, 1): 80 * 2,
        (8192, 28672, 1): 80,
    },
    ("deepseek_v3", "671B"): MLA_671B
    | {
        (18432, 7168, 1): 3 * 2,
        (7168, 18432, 1): 3,
        (2048, 7168, 1): 58 * 2,
        (7168, 2048, 1): 58,
        (2048, 7168, 256): 58 * 2,
        (7168, 2048, 256): 58,
    },
    ("deepseek_v3", "kimi_k2"): MLA_K2
    | {
        (18432, 7168, 1): 2,
        (7168, 18432, 1): 1,
        (2048, 7168, 1): 60 * 2,
        (7168, 2048, 1): 60,
        (2048, 7168, 384): 60 * 2,
        (7168, 2048, 384): 60,
    },
    ("deepseek_v3", "moonlight_16B_A3B"): {
        (3072, 2048, 1): 27,
        (576, 2048, 1): 27,
        (4096, 512, 1): 27,
        (2048, 2048, 1): 27,
        (11264, 2048, 1): 2,
        (2048, 11264, 1): 1,
        (2816, 2048, 1): 26 * 2,
        (2048, 2816, 1): 26,
        (1408, 2048, 64): 26 * 2,
        (2048, 1408, 64): 26,
    },
}
MATRICES = {
    ("qwen3", "0.6B"): 196,
    ("qwen3", "8B"): 252,
    ("qwen3", "30B-A3B"): 18_624,
    ("llama3", "8B"): 224,
    ("llama3", "70B"): 560,
    ("deepseek_v3", "671B"): 45_032,
    ("deepseek_v3", "kimi_k2"): 69_608,
    ("deepseek_v3", "moonlight_16B_A3B"): 27 * 4 + 3 + 26 * 3 + 26 * 3 * 64,
}
PARAMETERS = {
    ("qwen3", "0.6B"): 0.596e9,
    ("qwen3", "1.7B"): 1.72e9,
    ("qwen3", "8B"): 8.19e9,
    ("qwen3", "30B-A3B"): 30.5e9,
    ("llama3", "8B"): 8.03e9,
    ("llama3", "70B"): 70.6e9,
    ("deepseek_v3", "671B"): 671e9,
    ("deepseek_v3", "kimi_k2"): 1.026e12,
    ("deepseek_v3", "moonlight_16B_A3B"): 15.96e9,
}
FAMILIES = registry.models.names()
EVERY = [(name, flavor) for name in FAMILIES for flavor in registry.models.get(name).flavors()]
TINY = [(name, flavor) for name, flavor in EVERY if "tiny" in flavor]


def _parameters(name: str, flavor: str, **options) -> dict[str, torch.nn.Parameter]:
    with torch.device("meta"):
        return dict(model_spec(name, flavor, **options).model.build().named_parameters())


def _shapes(parameters: dict[str, torch.nn.Parameter]) -> Counter:
    hidden = [p for name, p in parameters.items() if "layers." in name and p.ndim > 1 and ".router." not in name]
    return Counter((*p.shape[-2:], p.shape[0] if p.ndim == 3 else 1) for p in hidden)


@pytest.mark.parametrize("key", SHAPES, ids="/".join)
def test_real_size_has_the_published_matrices(key) -> None:
    shapes = _shapes(_parameters(*key))
    assert shapes == SHAPES[key]
    assert sum(stack * count for (_, _, stack), count in shapes.items()) == MATRICES[key]


def test_muon_has_most_of_qwen3_8b() -> None:
    shapes = _shapes(_parameters("qwen3", "8B"))
    elements = sum(rows * columns * stack * n for (rows, columns, stack), n in shapes.items())
    assert elements == pytest.approx(6.95e9, rel=1e-3)


@pytest.mark.parametrize("key", PARAMETERS, ids="/".join)
def test_real_size_has_the_published_number_of_parameters(key) -> None:
    assert sum(p.numel() for p in _parameters(*key).values()) == pytest.approx(PARAMETERS[key], rel=2e-3)


def test_every_real_flavor_is_checked() -> None:
    assert set(EVERY) == set(PARAMETERS) | set(TINY)


@pytest.mark.parametrize("key", TINY, ids="/".join)
def test_tiny_flavor_fits_a_laptop_and_divides_by_4(key) -> None:
    spec = model_spec(*key)
    assert 1e6 < sum(p.numel() for p in _parameters(*key).values()) < 5e6
    for layer in spec.model.layers:
        attention = layer.attention
        assert attention.n_heads % 4 == 0
        assert getattr(attention, "n_kv_heads", 4) % 4 == 0
        assert layer.moe is None or layer.moe.num_experts % 4 == 0


def test_every_projection_is_a_separate_parameter() -> None:
    names = [name for name in _parameters("qwen3", "tiny") if name.startswith("layers.0.attention.qkv")]
    assert names == [f"layers.0.attention.qkv_linear.{w}.weight" for w in ("wq", "wk", "wv")]


@pytest.mark.parametrize("key", TINY, ids="/".join)
def test_the_vocabulary_option_replaces_the_flavors_vocabulary(key) -> None:
    parameters = _parameters(*key, vocab_size=258)
    assert parameters["tok_embeddings.weight"].shape[0] == 258
    assert parameters["lm_head.weight"].shape[0] == 258
    assert model_spec(*key, vocab_size=258).model.vocab_size == 258


def test_two_specifications_share_no_configuration() -> None:
    first, second = (model_spec("qwen3", "tiny").model for _ in range(2))
    first.layers[0].attention.rope.theta = -1.0
    assert second.layers[0].attention.rope.theta > 0
    assert first.layers[1].attention.rope.theta > 0


@pytest.mark.parametrize(
    ("name", "flavor", "words"),
    [
        ("qwen", "tiny", ["model.name", "'qwen'", "'qwen3'", "llama3"]),
        ("qwen3", "moe_tny", ["model.name = 'qwen3'", "model.flavor", "'moe_tny'", "'moe_tiny'", "30B-A3B"]),
        ("llama3", "", ["model.flavor", "''", "70B"]),
        ("../qwen3", "tiny", ["model.name"]),
    ],
)
def test_unknown_name_is_refused_with_the_choices(name: str, flavor: str, words: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"model\.") as error:
        model_spec(name, flavor)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("key", TINY, ids="/".join)
def test_initial_values_have_the_stated_deviation(key) -> None:
    spec = model_spec(*key)
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert 0.004 < parameter.std().item() < 0.025, name
