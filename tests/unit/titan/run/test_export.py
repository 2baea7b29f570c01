"""Models as Hugging Face folders: equal logits and ids in Transformers, and models without a counterpart."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from titan_muon.trainer.commands.hugging_face import hf_config, save
from titan_muon.trainer.commands.saved_model import SavedModel
from titan_muon.trainer.data.tokenizers import tokenizer_config
from titan_muon.trainer.model.attention import share_dense_mask
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import Recipe, RecipeError

transformers = pytest.importorskip("transformers")


def tied(model: Any) -> None:
    model.enable_weight_tying = True


def scaled(model: Any) -> None:
    """RoPE as of Llama 3.1."""
    for layer in model.layers:
        layer.attention.rope = replace(layer.attention.rope, scaling="llama", original_max_position_embeddings=32)


def grouped(model: Any) -> None:
    """Groups of experts, scales and RoPE as of DeepSeek-V3."""
    yarn = {"scaling": "yarn", "rope_factor": 8.0, "original_seq_len": 16}
    for layer in model.layers:
        layer.attention.rope = replace(layer.attention.rope, **yarn)
        layer.attention.mscale = 0.9
        if layer.moe is not None:
            layer.moe.router = replace(layer.moe.router, num_expert_groups=4, num_limited_groups=2, route_scale=2.5)


FAMILIES: list[tuple[str, str, Callable[[Any], None] | None, str]] = [
    # Family, flavor, change of TorchTitan's configuration, architecture in Transformers.
    ("llama3", "tiny_64", None, "LlamaForCausalLM"),
    ("llama3", "tiny_64", scaled, "LlamaForCausalLM"),
    ("qwen3", "tiny", None, "Qwen3ForCausalLM"),
    ("qwen3", "tiny", tied, "Qwen3ForCausalLM"),
    ("qwen3", "moe_tiny", None, "Qwen3MoeForCausalLM"),
    ("deepseek_v3", "tiny", None, "DeepseekV3ForCausalLM"),
    ("deepseek_v3", "tiny", grouped, "DeepseekV3ForCausalLM"),
]


def saved_model(recipe: Recipe, change: Callable[[Any], None] | None = None) -> SavedModel:
    """A model with random weights, as if trained."""
    spec = model_spec(recipe.model.name, recipe.model.flavor, vocab_size=recipe.model.vocab_size, on_cpu=True)
    if change is not None:
        change(spec.model)
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for parameter in model.parameters():
            # Larger than in training, so that every part has a say in the logits.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    share_dense_mask(model)
    tokenizer = tokenizer_config(recipe.data).build(tokenizer_path="")
    return SavedModel(1, recipe, spec, model.eval(), torch.device("cpu"), tokenizer, None)


@pytest.mark.parametrize(("name", "flavor", "change", "architecture"), FAMILIES)
def test_transformers_has_the_logits_of_the_exported_model(
    name: str, flavor: str, change: Any, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TorchTitan's experts multiply in bfloat16, which changes the choice of experts of later layers.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
    saved = saved_model(tiny.recipe(tmp_path, model__name=name, model__flavor=flavor), change)
    if name == "deepseek_v3":
        set_expert_bias(saved)
    save(saved, tmp_path / "out", drop_expert_bias=False)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(loaded).__name__ == architecture
    assert loaded.dtype == torch.float32
    ids = torch.randint(256, (2, 48), generator=torch.Generator().manual_seed(1))
    ours = saved.logits(ids, torch.arange(48).expand(2, 48)).view(2, 48, -1)
    with torch.no_grad():
        theirs = loaded(ids).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def set_expert_bias(saved: SavedModel) -> None:
    for name, buffer in saved.model.named_buffers():
        if name.endswith("expert_bias_E"):
            buffer.copy_(torch.randn_like(buffer))


def test_weights_that_transformers_lacks_are_refused(tmp_path: Path) -> None:
    experts = saved_model(tiny.recipe(tmp_path))
    set_expert_bias(experts)
    with pytest.raises(
        RecipeError, match=r"expert_bias_E has no counterpart in Qwen3MoeForCausalLM; --drop-expert-bias"
    ):
        save(experts, tmp_path / "out", drop_expert_bias=False)
    assert not (tmp_path / "out").exists()
    save(experts, tmp_path / "out", drop_expert_bias=True)
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert len(modes) == 1, "others who can read the configuration can read the weights"


@pytest.mark.parametrize(
    ("name", "flavor", "problem"),
    [
        ("gpt_oss", "debugmodel", "no counterpart that is known"),
        ("kimi_k2_5", "Kimi-K2.5", "eps 1e-05 in the norms of"),
    ],
)
def test_families_without_a_counterpart_are_refused(name: str, flavor: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=f"model.name = '{name}'.*{problem}"):
        hf_config(model_spec(name, flavor, on_cpu=False).model, name)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_exported_tokenizer_has_the_ids_of_training(kind: str, tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, model__name="llama3", model__flavor="tiny_64", data__tokenizer=kind)
    saved = saved_model(replace(recipe, data=replace(recipe.data, vocab_size=400)))
    ours: Any = saved.tokenizer
    save(saved, tmp_path / "out", drop_expert_bias=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (ours.bos_id, ours.eos_id, ours.get_vocab_size())
    for text in ("owner matrix", " two  spaces\n", "naïve 🙂 한국어\0", "<0x41> <|end>"):
        ids = ours.encode(text, add_bos=True)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids, skip_special_tokens=True) == text


def test_a_folder_of_a_tokenizer_is_copied(tmp_path: Path) -> None:
    recipe = tiny.recipe(tmp_path, model__name="llama3", model__flavor="tiny_64", data__tokenizer="bpe")
    save(saved_model(recipe), tmp_path / "first", drop_expert_bias=False)
    path = str(tmp_path / "first")
    again = replace(recipe, data=replace(recipe.data, tokenizer="hf", tokenizer_path=path))
    save(saved_model(again), tmp_path / "second", drop_expert_bias=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


def test_lm_eval_measures_the_exported_folder(tmp_path: Path) -> None:
    """The log-likelihoods of texts after a question are those of the model's logits."""
    pytest.importorskip("lm_eval", reason="needs lm-eval: make lm-eval")
    saved = saved_model(tiny.recipe(tmp_path, model__name="llama3", model__flavor="tiny_64"))
    save(saved, tmp_path / "out", drop_expert_bias=False)
    tokenizer: Any = saved.tokenizer
    requests, expected = [], []
    for question in tiny.WORDS:
        requests.append(import_module("lm_eval.api.instance").Instance("loglikelihood", {}, (question, " plan 1"), 0))
        context, answer = tokenizer.encode(question, add_bos=True), torch.tensor(tokenizer.encode(" plan 1"))
        ids = torch.tensor([context + answer.tolist()])
        logits = saved.logits(ids, torch.arange(ids.shape[1]).unsqueeze(0)).view(ids.shape[1], -1)
        scores = logits.log_softmax(-1)[len(context) - 1 : -1].gather(1, answer[:, None])
        expected.append(float(scores.sum()))
    model = import_module("lm_eval.models.huggingface").HFLM(
        str(tmp_path / "out"), device="cpu", dtype="float32", add_bos_token=True
    )
    assert [score for score, _ in model.loglikelihood(requests)] == pytest.approx(expected, rel=1e-4)
