"""Hybrid trains all parameters of a model like separate Muon and AdamW, as one torch.optim.Optimizer."""

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from titan_muon import Expert, Hybrid, Muon, Rule, assign, clip_grad_norm_, parameter_groups, registry
from titan_muon.adamw import AdamW
from titan_muon.engine.faults.faults import Fault
from titan_muon.options import Split

OPTIONS: dict[str, Any] = {"lr": 0.02, "expert": Expert(orthogonalize="reference")}
MATRICES = {f"layers.{i}.{name}.weight" for i in range(2) for name in ("up", "down")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Decoder(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(24, 16)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(16, 24, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.lm_head(x)
        return y


def train(model: nn.Module, optimizer: Any, steps: range, max_norm: float | None = None) -> None:
    """Steps on equal tokens on every rank, so that mean gradients equal the gradients of one process."""
    for step in steps:
        tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if max_norm is not None:
            clip_grad_norm_(model.parameters(), max_norm)
        for part in optimizer if isinstance(optimizer, list) else [optimizer]:
            part.step()
            part.zero_grad()


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def pair(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """The two optimizers of a user who wants no Hybrid."""
    groups = parameter_groups(model, **options)
    return [
        Muon(groups["muon"], lr=0.02, expert=Expert(orthogonalize="reference")),
        AdamW(groups["adamw"], lr=0.02, weight_decay=0.1),
    ]


def trained_as_a_pair(**options: Any) -> tuple[Decoder, Hybrid]:
    """A model and its Hybrid after steps with the bits of two optimizers."""
    model, reference = Decoder(), Decoder()
    hybrid = Hybrid(model, **options, **OPTIONS)
    train(model, hybrid, range(3))
    train(reference, pair(reference, **options), range(3))
    assert equal(model, reference)
    return model, hybrid


def test_hybrid_equals_separate_muon_and_adamw() -> None:
    model, hybrid = trained_as_a_pair()
    assert {a.fqn for a in hybrid.assignments if a.optimizer == "muon"} == MATRICES
    assert assign(model) == hybrid.assignments
    assert all(next(iter(group)) == "params" for group in hybrid.param_groups), "Megatron-FSDP reads the first key"
    pairs = zip(model.parameters(), Decoder().parameters(), strict=True)
    assert not any(torch.equal(param, before) for param, before in pairs)


def test_parameter_groups_have_the_rules_options() -> None:
    rules = [
        Rule(match="layers.1.up.weight", optimizer="muon", options={"lr": 0.5}),
        Rule(match="layers.0.*", optimizer="adamw"),
    ]
    _, hybrid = trained_as_a_pair(rules=rules)
    lrs = {name: g["lr"] for g in hybrid.param_groups for name in g["param_names"] if g["optimizer"] == "muon"}
    assert lrs == {"layers.1.up.weight": 0.5, "layers.1.down.weight": 0.02}, "rules come before roles"


def test_a_rule_has_an_algorithm_of_its_own() -> None:
    rules = [Rule(match="layers.1.[ud]*.weight", optimizer="muon", options={"algorithm": ["normuon", "muoneq"]})]
    model, hybrid = trained_as_a_pair(rules=rules)
    smoothed = {name for name, p in model.named_parameters() if "second_moment.0" in hybrid.state[p]}
    assert smoothed == {name for name in MATRICES if name.startswith("layers.1")}


def test_parameter_groups_of_known_layouts_name_the_splits_for_muon() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(32, 2)])
    with pytest.warns(UserWarning, match=r"^0.in_proj_weight: several matrices in a weight; pass Muon split="):
        groups = parameter_groups(model)
    splits = [a.split for a in assign(model) if a.split and a.optimizer == "muon"]
    matrices = Muon(groups["muon"], split=splits).build().plan.matrices
    assert len(matrices) == len(Hybrid(model).build().optimizers["muon"].plan.matrices) > 2


def test_groups_and_state_are_shared_with_the_parts() -> None:
    model = Decoder()
    hybrid = Hybrid(model, **OPTIONS)
    assert [group["optimizer"] for group in hybrid.param_groups] == ["adamw", "adamw", "muon"]
    for group in hybrid.param_groups:
        group["lr"] = 0.5
    assert {g["lr"] for part in hybrid.optimizers.values() for g in part.param_groups} == {0.5}
    assert not hybrid.state
    train(model, hybrid, range(1))
    assert set(hybrid.state) == set(model.parameters())
    kinds = {name: set(hybrid.state[param]) for name, param in model.named_parameters()}
    assert {name for name, keys in kinds.items() if keys == {"momentum_buffer"}} == MATRICES
    assert {frozenset(keys) for name, keys in kinds.items() if name not in MATRICES} == {
        frozenset(("step", "exp_avg", "exp_avg_sq"))
    }


def through_a_file(hybrid: Hybrid, model: nn.Module, other: Hybrid, other_model: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(hybrid.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))


def by_dcp(flat: bool) -> Callable[..., None]:
    def load(hybrid: Hybrid, model: nn.Module, other: Hybrid, other_model: nn.Module) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state = copy.deepcopy(get_optimizer_state_dict(model, hybrid, options=options))
        if flat:
            assert "state.layers.0.up.weight.momentum_buffer" in state
        set_optimizer_state_dict(other_model, other, state, options=options)

    return load


@pytest.mark.parametrize("load", [through_a_file, by_dcp(False), by_dcp(True)])
def test_a_resume_is_bitwise(load: Callable[..., None]) -> None:
    model, other = Decoder(), Decoder(1)
    hybrid, resumed = Hybrid(model, **OPTIONS), Hybrid(other, **OPTIONS)
    train(model, hybrid, range(3))
    other.load_state_dict(model.state_dict())
    load(hybrid, model, resumed, other)
    assert set(resumed.state) == set(other.parameters())
    train(model, hybrid, range(3, 5))
    train(other, resumed, range(3, 5))
    assert equal(model, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda things: pickle.loads(pickle.dumps(things))])
def test_a_copied_adamw_keeps_the_options(copied: Callable[[Any], Any]) -> None:
    options: dict[str, Any] = {"state_dtype": "bfloat16", "on_bad_gradient": "skip_step"}
    adamw = copied(AdamW([nn.Parameter(torch.zeros(2))], betas=(0.9, 0.95), **options))
    assert (adamw.state_dtype, adamw.allowed) == ("bfloat16", (Fault.NOT_FINITE, Fault.NO_GRADIENT))


@pytest.mark.parametrize("fused", [False, True], ids=["on the host", "on the device"])
@pytest.mark.parametrize("name", ["embed.weight", "layers.0.up.weight"])
def test_inf_in_a_grad_scaler_skips_the_step_of_both_parts(name: str, fused: bool) -> None:
    model = Decoder()
    hybrid = Hybrid(model, **OPTIONS, adamw={"fused": fused})
    train(model, hybrid, range(1))
    before = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.zeros(1, 4, dtype=torch.long)).sum()).backward()
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    gradient[0, 0] = torch.inf
    scaler.step(hybrid)
    scaler.update()
    assert equal(model, before)
    assert scaler.get_scale() == 2.0


def test_a_predicate_decides_after_rules_and_before_the_defaults() -> None:
    rules = [Rule(match="*.down.weight", optimizer="muon")]

    def is_muon(name: str, parameter: torch.Tensor) -> bool | None:
        return True if name == "embed.weight" else False if parameter.shape[0] == 16 else None

    chosen = {a.fqn: (a.optimizer, a.reason) for a in Hybrid(Decoder(), rules=rules, is_muon=is_muon).assignments}
    assert chosen["embed.weight"] == ("muon", "is_muon")
    assert chosen["layers.0.down.weight"][0] == "muon"
    assert chosen["layers.0.up.weight"] == ("muon", "hidden matrix")
    assert chosen["layers.0.norm.weight"] == ("adamw", "is_muon")


KERNELS = {"conv1d.weight": nn.Conv1d(32, 32, 31).weight, "conv2d.weight": nn.Conv2d(32, 32, 3).weight}


def test_no_convolution_is_trained_as_a_stack_without_a_word() -> None:
    with pytest.warns(UserWarning, match=r"conv1d\.weight: taken as a stack .* dims = 'f b1 d -> \| f \(b1 d\)'"):
        Muon([("conv1d.weight", KERNELS["conv1d.weight"])])
    model = nn.ModuleDict({"conv": nn.Conv1d(32, 32, 31)})
    with pytest.warns(UserWarning, match=r"^conv\.weight: taken as a stack"):
        Hybrid(model, rules=[Rule(match="conv.weight", optimizer="muon")])


def test_the_line_in_the_refusal_of_four_dims_works_as_written() -> None:
    with pytest.raises(ValueError, match=r"^conv2d\.weight: Muon takes matrices .* or describe its") as refused:
        Muon([("conv2d.weight", KERNELS["conv2d.weight"])])
    stack, matrix = re.findall(r"'(.*? -> .*?)'", str(refused.value))
    counts = []
    for dims in (stack, matrix):
        muon = Muon([("conv2d.weight", KERNELS["conv2d.weight"])], split=[Split(match="conv2d.weight", dims=dims)])
        counts.append(len(muon.build().plan.matrices))
    assert counts == [32 * 32, 1]


def test_a_model_without_hidden_matrices_is_refused_with_the_roles() -> None:
    model = Decoder()
    for name, param in model.named_parameters():
        param.requires_grad_(name not in MATRICES)
    fault = r"Muon takes no parameter of this model \(1 embedding, .*1 head.*\); add a rule"
    with pytest.raises(ValueError, match=fault):
        Hybrid(model)


def test_a_model_of_only_lora_is_refused_with_the_rule_for_muon() -> None:
    model = Decoder().requires_grad_(False)
    model.layers[0].up.lora_A = nn.Linear(16, 4, bias=False)
    with pytest.raises(ValueError, match=r"\(1 lora\); add a rule \(match = '\*lora_\*', optimizer = 'muon'\)"):
        Hybrid(model)
    rule = Rule(match="*lora_*", optimizer="muon")
    assert [a.optimizer for a in Hybrid(model, rules=[rule]).assignments] == ["muon"]


def test_names_do_not_depend_on_wrappers() -> None:
    model = Decoder()
    hybrid = Hybrid(model, **OPTIONS)
    compiled = Hybrid(torch.compile(Decoder()), **OPTIONS)
    assert [g["param_names"] for g in compiled.param_groups] == [g["param_names"] for g in hybrid.param_groups]


def test_suspicious_assignments_cause_warnings() -> None:
    model = Decoder()
    model.layers[0].up, model.layers[0].down = nn.Linear(16, 8), nn.Linear(8, 16, bias=False)
    with pytest.warns(UserWarning, match=r"layers\.\*\.up\.weight \(8x16\).*: a side under 16"):
        Hybrid(model)


def test_the_table_has_optimizer_and_reason_of_every_parameter() -> None:
    table = Hybrid(Decoder(), **OPTIONS).table()
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert rows["layers.*.up.weight"].split()[-2:] == ["hidden", "matrix"]
    assert " adamw " in rows["embed.weight"]
    assert "looked up" in rows["embed.weight"]


@pytest.mark.parametrize("first", ["adamw", "muon"])
def test_adamw_does_not_wait_for_the_report_of_muons_step_now(first: str) -> None:
    """A report is read before the next send, in any order of the two optimizers."""
    model = nn.ModuleDict({"up": nn.Linear(8, 8, bias=first == "muon"), "norm": nn.LayerNorm(8)})
    if first == "adamw":
        model = nn.ModuleDict({"norm": model["norm"], "up": model["up"]})
    optimizer = Hybrid(model).build()
    assert next(iter(optimizer.optimizers)) == first
    report = optimizer.optimizers["muon"].engine.rank.report  # type: ignore[attr-defined]
    calls: list[str] = []
    for name in ("read", "send"):
        method = getattr(report, name)
        setattr(report, name, lambda name=name, method=method: [calls.append(name), method()][1])
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        calls.clear()
        optimizer.step()
        assert calls[-1] == "send"


def test_a_nonfinite_norm_skips_third_party_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.OptimizerEntry(lambda groups: torch.optim.SGD(groups, lr=0.1))
    monkeypatch.setitem(registry.optimizers._values, "plain_sgd", entry)
    model = Decoder()
    hybrid = Hybrid(
        model,
        rules=[Rule(match="embed.weight", optimizer="plain_sgd")],
        expert=Expert(on_bad_gradient="skip_step"),
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.embed.weight.grad[0, 0] = torch.nan  # type: ignore[index]
    clip_grad_norm_(model.parameters(), 1.0, optimizer=hybrid)
    hybrid.step()
    assert all(map(torch.equal, before, model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.warns(UserWarning, match="the norm of the gradients was not finite"):
        hybrid.step()
    assert not any(map(torch.equal, before, model.parameters()))
