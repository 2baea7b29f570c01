"""Roles of parameters by module type and place, fused layouts, warnings; each row of the zoo is an assignment."""

import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from titan_muon import Hybrid, head_splits
from titan_muon.assignment.roles import ParameterInfo, inspect_model
from titan_muon.assignment.rules import EMBEDDING, HEAD, Assignment, assign_parameters, splits_with
from titan_muon.assignment.table import OUTSIDE, doubts, split_lines
from titan_muon.matrices.stacks import matrix_shapes, stack_of
from titan_muon.options import Split
from titan_muon.trainer.recipe.sections import Rule
from titan_muon.trainer.torchtitan import compat


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


MODEL: Mapping[str, tuple[tuple[int, ...], str, str]] = {
    "tok_embeddings.weight": ((512, 64), "adamw", "embedding"),
    "layers.0.attention.wo.weight": ((64, 64), "muon", "hidden matrix"),
    "layers.0.attention.q_norm.weight": ((16,), "adamw", "vector"),
    "layers.1.moe.router.gate.weight": ((8, 64), "adamw", "router of a mixture of experts"),
    "layers.1.moe.experts.w1_EFD": ((8, 32, 64), "muon", "stack of expert matrices"),
    "patch.weight": ((32, 3, 4, 4), "adamw", "4D and not a stack of experts"),
    "mixer.conv1d.weight": ((64, 1, 4), "adamw", "3D and not a stack of experts"),
    "scale": ((), "adamw", "vector"),
    "lm_head.weight": ((512, 64), "adamw", "output head"),
    "output.weight": ((512, 64), "adamw", "output head"),
}
"""Shape, optimizer and reason of parameters without a known module."""


def ruled(*rules: tuple[str, str], router: str | None = "adamw", all_rules: bool = True) -> Mapping[str, Assignment]:
    seen = {fqn: ParameterInfo(shape) for fqn, (shape, _, _) in MODEL.items()}
    given = [Rule(match=match, optimizer=optimizer) for match, optimizer in rules]
    assignments = assign_parameters(seen, given, router, all_rules=all_rules)
    assert [assignment.fqn for assignment in assignments] == list(MODEL), "in the order of the parameters"
    return {assignment.fqn: assignment for assignment in assignments}


def test_without_modules_names_and_shapes_decide() -> None:
    for fqn, assignment in ruled().items():
        _, optimizer, reason = MODEL[fqn]
        assert (assignment.optimizer, assignment.rule) == (optimizer, None)
        assert assignment.reason.startswith(reason)
    assert ruled(router="muon")["layers.1.moe.router.gate.weight"].optimizer == "muon"


def test_the_first_matching_rule_decides_before_defaults() -> None:
    roles = ruled(("*.wo.weight", "adamw"), ("layers.*", "muon"), ("tok_embeddings.*", "muon"))
    wo = roles["layers.0.attention.wo.weight"]
    assert (wo.optimizer, wo.rule, wo.reason) == ("adamw", 0, "optimizer.rule[0] '*.wo.weight'")
    assert roles["layers.0.attention.q_norm.weight"].rule == 1
    assert roles["tok_embeddings.weight"].optimizer == "muon"
    assert roles["scale"].rule is None


@pytest.mark.parametrize("match", ["layers.*.wz.weight", "WO", "*.wo.weight"])
def test_a_rule_that_takes_no_parameter_is_an_error_except_on_a_pipeline_stage(match: str) -> None:
    """Without a match, or behind a rule with all matches."""
    rules = ("layers.*", "muon"), (match, "adamw")
    with pytest.raises(ValueError, match=r"rules\[1\]: .* takes no parameter.*move it up or remove it"):
        ruled(*rules)
    assert ruled(*rules, all_rules=False)["scale"].optimizer == "adamw"


def module(kind: str = "Module", *, of: type[nn.Module] = nn.Module, **members: object) -> nn.Module:
    """A module of a class with the name `name`."""
    made = type(kind, (of,), {})()
    for name, member in members.items():
        setattr(made, name, member)
    return made


def linear(rows: int, cols: int) -> nn.Linear:
    return nn.Linear(cols, rows, bias=False, device="meta")


def model(tied: bool = False, **layer: object) -> nn.Module:
    layers = nn.ModuleList([module(**layer), module(**deepcopy(layer))])
    made = module(embed=nn.Embedding(512, 64, device="meta"), layers=layers, head=linear(512, 64))
    if tied:
        made.head.weight = made.embed.weight
    return made


def assigned(made: nn.Module, **options: str) -> Mapping[str, Assignment]:
    return {a.fqn: a for a in assign_parameters(inspect_model([made]), [], **options)}


def embedding() -> nn.Embedding:
    return nn.Embedding(512, 64, device="meta")


def classifying(name: str) -> nn.Module:
    made = model()
    made.add_module(name, linear(20, 64))
    return made


HIDDEN, STACK = "hidden matrix", "stack of expert matrices"
GATED = {"gate": linear(8, 64), "experts": module("MyExperts", w=parameter(8, 32, 64)), "gate_proj": linear(32, 64)}
# fmt: off
ROLES: list[tuple[nn.Module, dict[str, str]]] = [
    # A model, and how the reason of a parameter begins. Muon trains hidden matrices and stacks, AdamW the rest.
    # As wide as the vocabulary, and within a layer: hidden.
    (model(up=linear(512, 64)), {"head.weight": HEAD, "embed.weight": "embedding", "layers.0.up.weight": HIDDEN}),
    (model(tied=True), {"embed.weight": "embedding: its rows are looked up, not multiplied"}),
    # A classifier has no row for each token.
    *((classifying(name), {f"{name}.weight": ""}) for name in ("classifier", "value_head", "lm_head")),
    (nn.Sequential(embedding(), linear(512, 64), linear(64, 512), linear(512, 64)),
     {"1.weight": HIDDEN, "2.weight": HIDDEN, "3.weight": HEAD}),
    (module(embed=embedding(), layers=nn.ModuleList([linear(512, 64), linear(512, 64)])), {"layers.1.weight": HIDDEN}),
    (model(embed_proj=linear(64, 32)), {"layers.0.embed_proj.weight": HIDDEN}),
    # Without a vocabulary the name decides.
    (module(embed_in=linear(64, 32), output=linear(32, 64), layers=module(a=linear(64, 32))),
     {"embed_in.weight": "", "output.weight": "", "layers.a.weight": HIDDEN}),
    (model(x=nn.Conv2d(3, 8, 4, bias=False, device="meta")), {"layers.0.x.weight": "convolution"}),
    (model(x=nn.LayerNorm((8, 8), bias=False, device="meta")), {"layers.0.x.weight": "scale of a norm"}),
    (model(pos_embed=parameter(16, 64)), {"layers.0.pos_embed": "table"}),
    (model(A_log=parameter(64, 16)), {"layers.0.A_log": "acts element by element"}),
    (model(down_proj_bias=parameter(8, 128)), {"layers.0.down_proj_bias": "biases"}),
    (model(shared_gate=parameter(1, 64)), {"layers.0.shared_gate": "vector: one row"}),
    (model(lora_a=linear(8, 64)), {"layers.0.lora_a.weight": "factor of LoRA"}),
    (model(x=module("TopKRouter", gate=linear(8, 64))), {"layers.0.x.gate.weight": "router"}),
    (model(x=module("TopKRouter", weight=parameter(8, 64))), {"layers.0.x.weight": "router"}),
    # A gate beside experts.
    (model(**GATED), {"layers.0.gate.weight": "router", "layers.0.gate_proj.weight": HIDDEN}),
    (model(**GATED), {"layers.0.experts.w": STACK}),
]
# fmt: on


@pytest.mark.parametrize(("made", "reasons"), ROLES, ids=[" ".join(reasons) for _, reasons in ROLES])
def test_adamw_trains_every_parameter_except_hidden_matrices(made: nn.Module, reasons: dict[str, str]) -> None:
    roles = assigned(made)
    for fqn, reason in reasons.items():
        assert roles[fqn].optimizer == ("muon" if reason in (HIDDEN, STACK) else "adamw")
        assert roles[fqn].reason.startswith(reason)


class Conv1D(nn.Module):
    """As GPT-2's layers: (in, out)."""

    def __init__(self, cols: int, rows: int) -> None:
        super().__init__()
        self.weight = parameter(rows, cols)


EXPERTS = {"gate_up_proj": parameter(4, 128, 64)}
# fmt: off
FUSED = [
    # A module, the name of its weight, and how the weight is split.
    (module(w13=parameter(96, 2, 64)), "w13", "f g d -> g | f d", {}),
    (module(w13=parameter(2, 96, 64)), "w13", "g f d -> g | f d", {}),
    (module(w13=parameter(4, 96, 2, 64)), "w13", "e f g d -> e g | f d", {}),
    (module(gate_up_proj=linear(128, 64)), "gate_up_proj.weight", "(g f) d -> g | f d", {"g": 2}),
    (module("Experts", **EXPERTS), "gate_up_proj", "e (g f) d -> e g | f d", {"g": 2}),
    (module("Experts", is_transposed=True, **EXPERTS), "gate_up_proj", "e d (g f) -> e g | f d", {"g": 2}),
    (module("Experts", is_transposed=True, is_concatenated=False, **EXPERTS), "gate_up_proj", "e d (f g) -> e g | f d",
     {"g": 2}),
    (module("FusedQKVLinear", heads_per_kv=4, head_dim=16, wqkv=linear(192, 64)), "wqkv.weight",
     "(g p h) d -> p | (g h) d", {"p": (4, 1, 1), "h": 16}),
    (module(head_dim=16, num_key_value_heads=2, qkv_proj=linear(128, 64)), "qkv_proj.weight", "(p h) d -> p | h d",
     {"p": (4, 2, 2), "h": 16}),
    (module(c_attn=Conv1D(192, 64)), "c_attn.weight", "d (g f) -> g | f d", {"g": 3}),
    (module(c_fc=Conv1D(256, 64)), "c_fc.weight", "d f -> | f d", {}),
    (module("GptOssGroupedExperts", mlp1_weight_EGD=parameter(4, 128, 64)), "mlp1_weight_EGD", "e (f g) d -> e g | f d",
     {"g": 2}),
    (nn.MultiheadAttention(64, 4, bias=False, device="meta"), "in_proj_weight", "(p f) d -> p | f d", {"p": 3}),
    # Without a number of heads, and a layer stored as (out, in): whole.
    (module(qkv_proj=linear(192, 64)), "qkv_proj.weight", "", {}),
    (module(c_attn=linear(192, 64)), "c_attn.weight", "", {}),
]
# fmt: on


@pytest.mark.parametrize(("member", "name", "dims", "lengths"), FUSED, ids=[f"{n} {d}" for _, n, d, _ in FUSED])
def test_known_fused_layouts_are_split(member: nn.Module, name: str, dims: str, lengths: dict[str, int]) -> None:
    role = assigned(model(mlp=member))[f"layers.0.mlp.{name}"]
    assert role.optimizer == "muon"
    assert role.split == (Split(match=f"layers.0.mlp.{name}", dims=dims, lengths=lengths) if dims else None)


def test_a_split_of_the_recipe_comes_before_a_known_layout() -> None:
    roles = list(assigned(model(mlp=module(gate_up_proj=linear(128, 64)))).values())
    own = Split(match="layers.0.*", dims="f d -> | f d")
    assert [split.match for split in splits_with((own,), roles)] == ["layers.0.*", "layers.1.mlp.gate_up_proj.weight"]
    (line,) = split_lines(roles, (own,))
    assert line == "split, as its layout is known: layers.*.mlp.gate_up_proj.weight as (g f) d -> g | f d with g = 2"


UP, STEM = {"up": linear(128, 64)}, {"stem": nn.Conv2d(64, 64, 7, device="meta")}
HEADS = Split(match="*.up.weight", dims="(h f) d -> h | f d", lengths={"f": 8})
OTHER_RULE = Rule(match="layers.1.up.*", optimizer="adamw")
DOUBTS: list[tuple[dict[str, Any], list[Rule], tuple[Split, ...], str]] = [
    # Members of a layer, rules, splits, and the warning.
    ({**UP, "norm": nn.LayerNorm(64)}, [], (), ""),
    ({**UP, **STEM}, [], (), "Muon takes 3.9 % of the parameters besides embeddings and output head; .*stem.weight"),
    (UP, [], (HEADS,), r"layers.\*.up.weight \(128x64\): a side under 16"),
    (UP, [OTHER_RULE], (), r"matrices of one name go to different optimizers: layers.*up"),
]


@pytest.mark.parametrize(("members", "rules", "splits", "expected"), DOUBTS, ids=[text[:50] for *_, text in DOUBTS])
def test_suspicious_assignments_have_a_warning(
    members: dict[str, Any], rules: list[Rule], splits: tuple[Split, ...], expected: str
) -> None:
    warnings = list(doubts(assign_parameters(inspect_model([model(**members)]), rules), splits))
    assert len(warnings) == bool(expected) or rules
    assert not expected or re.match(f"warning: {expected}", warnings[-1])


# Each row of docs/results/zoo.md is the default assignment of its model: a family of TorchTitan or an architecture of
# Hugging Face, on the meta device from a configuration. To add a model, add its row.

PAGE = Path(__file__).parents[3] / "docs" / "results" / "zoo.md"
ROWS = {
    line.split("|")[1].strip(): line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.count("%") == 1
}
LAYERS, SHAPES_SHOWN = 4, 2
USUAL = (EMBEDDING.partition(":")[0], HEAD, "vector")
"""Reasons for AdamW in every model, which the page leaves out."""
FUSED_LAYERS = "fused layers of main"
"""Modules with the fused layouts that the tests above read."""
without_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install 'titan-muon[zoo]'"
)


def titan_model(family: str, flavor: str) -> nn.Module:
    compat.install()
    # The family's module has stand-ins for kernels that are not installed.
    with importlib.import_module("models.qwen3_5").stand_in_for_kernels() if family == "qwen3_5" else nullcontext():
        module = importlib.import_module(f"torchtitan.models.{family}")
    make: Any = next(v for name, v in vars(module).items() if name.endswith("_configs") and isinstance(v, dict))[flavor]
    with torch.device("meta"):
        # Families take different options for a flavor; the options do not change the parameters.
        for options in ({}, {"attn_backend": "flex"}, {"attn_backend": "flex", "moe_comm_backend": "standard"}):
            try:
                return (make(**options) if callable(make) else make).build()
            except TypeError:
                continue
    raise AssertionError(f"{family} takes other options")


def hugging_face_model(architecture: str) -> nn.Module:
    """Four layers in default sizes."""
    transformers: Any = importlib.import_module("transformers")
    config = getattr(transformers, f"{architecture}Config")()
    for key in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if hasattr(config, key):
            setattr(config, key, LAYERS)
    if "layer_types" in vars(config) and config.layer_types:
        config.layer_types = config.layer_types[:LAYERS]
    causal = transformers.AutoModelForCausalLM
    maker = causal if type(config) in causal._model_mapping else transformers.AutoModel
    with torch.device("meta"):
        return maker.from_config(config)


def row(name: str, model: nn.Module) -> str:
    """A model's line of the page: Muon's share, its matrices, and unusual parameters of AdamW."""
    assigned = assign_parameters(inspect_model([model]), [])
    splits = splits_with((), assigned)
    inside = [a for a in assigned if a.role not in OUTSIDE and a.reason not in (EMBEDDING, HEAD)]
    matrices = [a for a in assigned if a.optimizer == "muon"]
    share = sum(prod(a.shape) for a in matrices) / sum(prod(a.shape) for a in inside)
    counts = Counter(s for a in matrices for s in matrix_shapes(a.shape, stack_of(a.fqn, a.shape, splits)))
    most = sorted(counts.items(), key=lambda item: (-item[1] * prod(item[0]), item[0]))
    shown = [f"{count:,} of {rows}x{cols}" for (rows, cols), count in most[:SHAPES_SHOWN]]
    rest = sum(count for _, count in most[SHAPES_SHOWN:])
    shown += [f"{rest:,} others"] if rest else []
    reasons = Counter(re.split(r":| \(|, | of a ", a.reason)[0] for a in assigned if a.optimizer != "muon")
    others = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()) if reason not in USUAL)
    return f"| {name} | {100 * share:.1f} % | {', '.join(shown)} | {others} |"


def marks(name: str) -> Any:
    # Flux is imported with the text encoders of Hugging Face.
    return without_transformers if " " not in name or name.startswith("flux") else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in ROWS if name != FUSED_LAYERS])
def test_a_model_is_assigned_as_its_row_says(name: str) -> None:
    model = titan_model(*name.split()) if " " in name else hugging_face_model(name)
    assert row(name, model) == ROWS[name]


def test_the_page_has_every_family_of_torchtitan_and_trains_90_percent_with_muon() -> None:
    (place,) = importlib.util.find_spec("torchtitan.models").submodule_search_locations
    installed = {path.parent.name for path in Path(place).glob("*/model*")} - {"common"}
    assert installed == {name.split()[0] for name in ROWS if " " in name} - {"fused"}
    assert len(ROWS) > 40
    assert min(float(line.split("|")[2].strip(" %")) for line in ROWS.values()) > 90


SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "Llama": (GROUPED, {"q_proj": 4, "k_proj": 2, "v_proj": 2}),
    "Mistral": (GROUPED, {"q_proj": 4, "k_proj": 2, "v_proj": 2}),
    "Qwen3": (GROUPED, {"q_proj": 4, "k_proj": 2, "v_proj": 2}),
    "Gemma2": (GROUPED, {"q_proj": 4, "k_proj": 2, "v_proj": 2}),
    "Phi3": ({**GROUPED, "pad_token_id": 0}, {"qkv_proj": 8}),
    "GPT2": ({"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 32}, {"c_attn": 12}),
    "Falcon": ({**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}, {"query_key_value": 8}),
}
"""By architecture: sizes of a model, and the heads of each projection."""


@without_transformers
@pytest.mark.parametrize("architecture", MODELS)
def test_each_head_is_a_matrix(architecture: str) -> None:
    transformers: Any = importlib.import_module("transformers")
    sizes, heads = MODELS[architecture]
    with torch.device("meta"):
        config = getattr(transformers, f"{architecture}Config")(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
    splits = head_splits(model)
    hybrid = Hybrid(model, muon={"split": splits})
    shapes = {a.fqn: a.shape for a in hybrid.assignments if a.optimizer == "muon"}
    found = {}
    for split in splits:
        matrices = matrix_shapes(shapes[split.match], stack_of(split.match, shapes[split.match], splits))
        assert set(matrices) == {(16, 64)}
        found[split.match.split(".")[-2]] = len(matrices)
    assert found == heads
    assert f"{max(heads.values())} of 16x64" in hybrid.table()
