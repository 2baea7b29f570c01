"""The CPU's attention separates documents and shares one mask; the largest logits; QK-clip on TorchTitan's models."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

import models
from tests.unit.titan.model.test_models import attended, initialized
from titan_muon.plugins.qk_clip import QKClip
from titan_muon.trainer.model import attention, logits
from titan_muon.trainer.model.attention import DenseMask, DenseMaskAttention, dense, share_dense_mask
from titan_muon.trainer.model.logits import (
    LogitObserver,
    ObservedDenseAttention,
    ObservedFlexAttention,
    ObservedVarlenAttention,
)
from titan_muon.trainer.model.qk_clip import build_qk_clip, observe_logits
from titan_muon.trainer.model.spec import model_spec
from titan_muon.trainer.recipe import RecipeError, sections

LENGTH, SCALE = 48, 0.3
STARTS = ((0, 7, 40), (0, 1, 47))
LONGEST = 46
"""Tokens of the longest document: visible keys of a query."""


def positions(*starts: tuple[int, ...]) -> torch.Tensor:
    rows = [(row, (*row[1:], LENGTH)) for row in starts or STARTS]
    return torch.stack([torch.cat([torch.arange(b - a) for a, b in zip(*row, strict=True)]) for row in rows])


def decoder() -> Any:
    return initialized(model_spec("qwen3", "tiny", vocab_size=64, on_cpu=True).model)


def block_mask() -> Any:
    return decoder().get_attention_masks(positions())


def dense_options(kv_heads: int = 4) -> dict[str, Any]:
    return {"attention_masks": DenseMask(dense(block_mask())), "scale": SCALE, "enable_gqa": kv_heads != 4}


def qkv(kv_heads: int, value_dim: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values (batch, tokens, heads, dim), large in a single head."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (kv_heads, 8), (kv_heads, value_dim))
    tensors = [
        torch.randn(len(STARTS), LENGTH, *s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes
    ]
    with torch.no_grad():
        tensors[0][:, :, 1] *= 10
    return tensors


def scores(q: torch.Tensor, k: torch.Tensor, scale: float = SCALE) -> torch.Tensor:
    """Unmasked logits, -inf elsewhere: (batch, heads, queries, keys)."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    document = torch.stack([(row == 0).cumsum(0) for row in positions()])
    index = torch.arange(LENGTH)
    allowed = (index[:, None] >= index) & (document[:, :, None] == document[:, None, :])
    return (torch.einsum("binh,bjnh->bnij", q, k) * scale).masked_fill(~allowed[:, None], -math.inf)


def observer(config: Any) -> Any:
    inner = config.build()
    inner.register_buffer("logits_max", torch.full((4,), -math.inf), persistent=False)
    return inner.train()


@pytest.mark.parametrize("inner", [DenseMaskAttention, ObservedDenseAttention])
@pytest.mark.parametrize(("kv_heads", "value_dim"), [(4, 8), (2, 8), (2, 6)])
def test_values_and_gradients_equal_separate_documents(inner: Any, kv_heads: int, value_dim: int) -> None:
    q, k, v = qkv(kv_heads, value_dim, torch.float64)
    attend = observer(inner.Config())
    out = attended(attend, q, k, v, **dense_options(kv_heads))
    expected = torch.einsum("bnij,bjnh->binh", scores(q, k).softmax(-1), v.repeat_interleave(4 // kv_heads, dim=2))
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weights).sum(), (q, k, v)))
    # The kernel for equal sizes gives the log-sum-exp, and no largest logit.
    largest, bound = scores(q, k).amax((0, 2, 3)), scores(q, k).logsumexp(-1).amax((0, 2))
    assert (bound - largest).max() <= math.log(LONGEST)
    if inner is ObservedDenseAttention:
        torch.testing.assert_close(attend.logits_max, (bound if value_dim == 8 else largest).float())


def test_every_forward_builds_a_single_mask_per_batch() -> None:
    model = decoder()
    share_dense_mask(model)
    tokens = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    batches = [positions((0, 7, 40), (0, 20)), positions((0,), (0, 1))]

    def forward(places: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(tokens, positions=places, attention_masks=model.get_attention_masks(places))
        return out

    with mock.patch.object(attention, "create_mask", wraps=attention.create_mask) as made:
        first, second = forward(batches[0]), forward(batches[1])
        assert made.call_count == 2, "one mask for each forward, whatever the number of layers"
        assert not torch.equal(first, second)
        assert torch.equal(forward(batches[0]), first)


@pytest.mark.parametrize("name", ["deepseek_v3", "llama3", "qwen3"])
def test_every_layer_gets_the_chosen_attention(name: str) -> None:
    choices = {"auto": ("DenseMaskAttention", "FlexAttention"), "dense": ("DenseMaskAttention",) * 2}
    for choice, expected in choices.items():
        for on_cpu, kind in zip((True, False), expected, strict=True):
            model = model_spec(name, "tiny", attention=choice, on_cpu=on_cpu).model
            kinds = {type(layer.attention.inner_attention).__qualname__ for layer in model.layers}
            assert kinds == {f"{kind}.Config"}


def test_flex_attention_records_the_kernels_maximum_logits() -> None:
    """The kernel runs on GPUs only; the test replaces its output."""
    q, k, v = qkv(2, 8)
    inner = observer(ObservedFlexAttention.Config())
    asked, shapes = [], []
    largest, lse = scores(q, k).amax(-1), scores(q, k).logsumexp(-1)

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_aux: AuxRequest, **options: Any) -> Any:
        asked.append((return_aux, options["scale"], options["enable_gqa"], q.shape[:3]))
        return torch.zeros_like(q), AuxOutput(lse=lse if return_aux.lse else None, max_scores=largest)

    def keep(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        shapes.append((out.shape, lse.shape))
        return out

    options = {"attention_masks": block_mask(), "scale": SCALE, "enable_gqa": True}
    with mock.patch.object(logits.FlexAttention, "compiled_flex_attn", staticmethod(kernel)):
        assert attended(inner, q, k, v, **options).shape == q.shape
        attended(inner, q, k, v, **options, out_transform=keep)
    torch.testing.assert_close(inner.logits_max, largest.amax((0, 2)))
    assert asked == [(AuxRequest(lse, True), SCALE, True, (len(STARTS), 4, LENGTH)) for lse in (False, True)]
    assert shapes == [(q.shape, q.shape[:-1])]


def test_varlen_attention_records_the_kernels_log_sum_exp() -> None:
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    q, k, v = qkv(2, 8)
    inner = observer(ObservedVarlenAttention.Config())
    lse = scores(q, k).logsumexp(-1)

    def kernel(q: torch.Tensor, *rest: Any, return_aux: Any, scale: float, enable_gqa: bool, **options: Any) -> Any:
        assert (return_aux.lse, scale, enable_gqa) == (True, SCALE, True)
        return torch.zeros_like(q), lse.transpose(0, 1).flatten(1)

    masks = create_varlen_metadata_for_document(positions())
    with mock.patch("torchtitan.models.common.attention.varlen_attn", kernel):
        out = attended(inner, q, k, v, attention_masks=masks, scale=SCALE, enable_gqa=True)
    assert out.shape == q.shape
    torch.testing.assert_close(inner.logits_max, lse.amax((0, 2)))


def test_several_passes_record_the_maximum_and_validation_records_none() -> None:
    inner, options = observer(ObservedDenseAttention.Config()), dense_options()
    q, k, v = qkv(4, 6)
    with torch.no_grad():
        for factor in (0.5, 2.0, 1.0):
            attended(inner, factor * q, k, v, **options)
        torch.testing.assert_close(inner.logits_max, 2 * scores(q, k).amax((0, 2, 3)))
        kept = inner.logits_max.clone()
        attended(inner.eval(), 9 * q, k, v, **options)
        assert torch.equal(inner.logits_max, kept)
        # A model that is only read has no buffer.
        attended(ObservedDenseAttention.Config().build(), q, k, v, **options)


# QK-clip: the right rows of the right weights, whether checkpointed, compiled or cut

VOCAB = 64
ONE_RANK: Any = SimpleNamespace(tp=1, tp_enabled=False)


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
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    masks = model.get_attention_masks(positions())
    model(tokens, positions=positions(), attention_masks=masks).square().mean().backward()


def exact_logits(model: nn.Module) -> list[torch.Tensor]:
    """A list that gets the largest logit of each head of the first layer in each forward, from queries and keys."""
    largest: list[torch.Tensor] = []

    def look(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        q, k = (t.detach().view(len(STARTS), LENGTH, *t.shape[-2:]) for t in args[:2])
        scale = q.shape[-1] ** -0.5 if kwargs["scale"] is None else kwargs["scale"]
        largest.append(scores(q, k, scale).amax((0, 2, 3)))

    model.get_submodule("layers.0.attention.inner_attention").register_forward_pre_hook(look, with_kwargs=True)
    return largest


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
    largest = exact_logits(model)
    train(model)
    seen = clip.logits("layers.0", 0, 8).clone()
    threshold = float(seen.sort().values[5])
    clip.thresholds.fill_(threshold)
    clip.apply()
    train(model)
    before, after = largest
    above = seen > threshold
    assert above.sum() == 2
    if family == "deepseek_v3":
        torch.testing.assert_close(seen, before, msg="this attention tells the logit itself")
        torch.testing.assert_close(after, before.clamp(max=threshold))
        return
    assert (seen >= before).all()
    assert (seen <= before + math.log(LONGEST)).all()
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
