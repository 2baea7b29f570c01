"""QK-clip on TorchTitan's models: the right rows of the right weights, whether checkpointed, compiled or cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import models
from tests.unit.titan.model.batches import initialized
from titan_muon.plugins.qk_clip import QKClip
from titan_muon.trainer.model.attention import share_dense_mask
from titan_muon.trainer.model.logits import LogitObserver
from titan_muon.trainer.model.qk_clip import build_qk_clip, observe_logits
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import RecipeError, sections

VOCAB, LENGTH = 64, 48
ONE_RANK: Any = SimpleNamespace(tp=1, tp_enabled=False)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of two rows of packed documents: tokens, and positions with a restart in each document."""
    drawn = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    lengths = ((20, 28), (7, 41))
    return drawn, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def build(family: str, checkpoint: str = "none", backend: str | None = None) -> Any:
    section = sections.QKClip(mode="clip")
    spec = model_spec(family, "tiny", vocab_size=VOCAB, on_cpu=True)
    spec.model.layers = spec.model.layers[:2]
    observe_logits(spec.model, section)
    model = initialized(spec.model)
    with torch.no_grad():
        # Logits of the initial values are too small to tell heads apart.
        for name, parameter in model.named_parameters():
            if any(word in name for word in ("wq", "wk")):
                parameter.mul_(8)
    if checkpoint != "none":
        from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

        {"full": FullAC, "selective": SelectiveAC}[checkpoint].Config().build().apply(model)
    if backend is not None:
        for block in model.layers.values():
            block.compile(backend=backend, fullgraph=True)
    share_dense_mask(model)
    return model, build_qk_clip(section, spec.model, [model], ONE_RANK, torch.device("cpu"))


def train(model: Any) -> None:
    drawn, positions = tokens()
    model(drawn, positions=positions, attention_masks=model.get_attention_masks(positions)).square().mean().backward()


@contextmanager
def exact_logits(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """While active, the largest logit of each head of the first layer in each forward, from queries and keys."""
    largest: dict[str, torch.Tensor] = {}
    inner = model.get_submodule("layers.0.attention.inner_attention")

    def look(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        q, k = (t.detach()[None] if t.ndim == 3 else t.detach() for t in args[:2])
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scale = q.shape[-1] ** -0.5 if kwargs["scale"] is None else kwargs["scale"]
        scores = torch.einsum("binh,bjnh->bnij", q, k) * scale
        largest["layers.0"] = scores.masked_fill(~kwargs["attention_masks"].allowed, -torch.inf).amax((0, 2, 3))

    handle = inner.register_forward_pre_hook(look, with_kwargs=True)
    yield largest
    handle.remove()


def family_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Moonlight's latent attention has a single query projection. Llama may have a fused projection."""
    if kind == "latent_full_queries":
        flavors = models._family("deepseek_v3").FLAVORS
        monkeypatch.setitem(flavors, "tiny", replace(flavors["tiny"], q_rank=0))
    if kind == "fused":
        llama = models._family("llama3")
        make = llama.make_gqa_config
        monkeypatch.setattr(llama, "make_gqa_config", lambda **options: make(**options | {"fuse_qkv": True}))
    return "deepseek_v3" if kind.startswith("latent") else "llama3"


@pytest.mark.parametrize("kind", ["latent", "latent_full_queries", "grouped", "fused"])
def test_only_heads_above_the_threshold_are_clipped_to_the_threshold(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first layer, with an unclipped input: the same batch has the promised logits again."""
    family = family_of(kind, monkeypatch)
    model, clip = build(family)
    with exact_logits(model) as largest:
        train(model)
        before, seen = largest["layers.0"], clip.logits("layers.0", 0, 8).clone()
        threshold = float(seen.sort().values[5])
        clip.thresholds.fill_(threshold)
        clip.apply()
        train(model)
        after = largest["layers.0"]
    above = seen > threshold
    assert above.sum() == 2
    if family == "deepseek_v3":
        torch.testing.assert_close(seen, before, msg="this attention tells the logit itself")
        torch.testing.assert_close(after, before.clamp(max=threshold))
        return
    assert (seen >= before).all()
    assert (seen <= before + torch.tensor(41.0).log()).all()
    factors = (threshold / seen).clamp(max=1.0)
    shared = factors.view(4, 2).amin(1).repeat_interleave(2)
    # Queries by the factor of the head, keys of a group by the smallest factor: square roots, because alpha is one
    # half.
    torch.testing.assert_close(after, before * (factors * shared).sqrt())
    assert (after[above] <= threshold).all()


@pytest.mark.parametrize(("checkpoint", "backend"), [("full", None), ("selective", None), ("selective", "aot_eager")])
def test_recomputed_and_compiled_layers_record_the_same_logits(checkpoint: str, backend: str | None) -> None:
    plain, expected = build("llama3")
    train(plain)
    model, clip = build("llama3", checkpoint=checkpoint, backend=backend)
    for _ in range(2):
        train(model)
        # Nothing of backward, where checkpointed layers run again, is left for the next step.
        assert torch.equal(clip._logits, expected._logits)
        clip.apply()
        assert torch.equal(clip._logits, torch.full_like(clip._logits, -torch.inf))


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3", "qwen3"])
def test_every_layer_is_observed_unless_qk_clip_is_off(family: str) -> None:
    for mode, share in (("log", 1), ("off", 0)):
        spec = model_spec(family, "tiny", on_cpu=True)
        observe_logits(spec.model, sections.QKClip(mode=mode))
        with torch.device("meta"):
            observers = [m for m in spec.model.build().modules() if isinstance(m, LogitObserver)]
        assert len(observers) == share * len(spec.model.layers)
    assert build_qk_clip(sections.QKClip(), spec.model, [], ONE_RANK, torch.device("cpu")) is None


def test_options_of_the_inner_attention_are_kept_and_an_unknown_attention_is_refused() -> None:
    spec = model_spec("llama3", "tiny", attention="flex", on_cpu=False)
    first, second = (layer.attention for layer in spec.model.layers[:2])
    first.inner_attention.kernel_options = {"BLOCK_M": 32}
    second.inner_attention = object()
    with pytest.raises(RecipeError, match=r'"log" is not possible: layers\.1 has attention of another kind'):
        observe_logits(spec.model, sections.QKClip(mode="log"))
    assert first.inner_attention.kernel_options == {"BLOCK_M": 32}


def test_a_layer_of_another_pipeline_stage_has_no_weights_here() -> None:
    model, _ = build("llama3")
    del model.layers["0"]
    spec = model_spec("llama3", "tiny", vocab_size=VOCAB, on_cpu=True)
    clip = build_qk_clip(sections.QKClip(mode="clip"), spec.model, [model], ONE_RANK, torch.device("cpu"))
    assert isinstance(clip, QKClip)
    assert [bool(layer.weights) for layer in clip.layers] == [False, True] + [False] * 4
    assert [weight.fqn for weight in clip.layers[1].weights] == [
        "layers.1.attention.qkv_linear.wq.weight",
        "layers.1.attention.qkv_linear.wk.weight",
    ]
