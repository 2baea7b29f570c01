"""Hybrid trains and saves all parameters of a model like separate Muon and AdamW, as one torch.optim.Optimizer."""

import copy
import inspect
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as torchs

from titan_muon import Expert, Hybrid, Muon, Rule, assign, clip_grad_norm_, parameter_groups, registry
from titan_muon.adamw import AdamW
from titan_muon.options import OptionError, Split

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


# State dicts: tests/conformance and tests/dist/step


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda things: pickle.loads(pickle.dumps(things))])
def test_a_copied_adamw_keeps_the_options(copied: Callable[[Any], Any]) -> None:
    options: dict[str, Any] = {"state_dtype": "bfloat16", "on_bad_gradient": "skip_step"}
    adamw = copied(AdamW([nn.Parameter(torch.zeros(2))], betas=(0.9, 0.95), **options))
    assert (adamw.state_dtype, adamw.expert.on_bad_gradient) == ("bfloat16", "skip_step")


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


def test_the_line_in_the_refusal_of_four_dims_works_as_written() -> None:
    kernel = [("conv2d.weight", nn.Conv2d(32, 32, 3).weight)]
    with pytest.raises(ValueError, match=r"^conv2d\.weight: Muon takes matrices .* or describe its") as refused:
        Muon(kernel)
    described = re.findall(r"'(.*? -> .*?)'", str(refused.value))
    muons = (Muon(kernel, split=[Split(match="conv2d.weight", dims=dims)]) for dims in described)
    assert [len(muon.build().plan.matrices) for muon in muons] == [32 * 32, 1]


def test_a_model_of_only_lora_is_refused_with_the_rule_for_muon() -> None:
    model = Decoder().requires_grad_(False)
    model.layers[0].up.lora_A = nn.Linear(16, 4, bias=False)
    with pytest.raises(ValueError, match=r"\(1 lora\); add a rule \(match = '\*lora_\*', optimizer = 'muon'\)"):
        Hybrid(model)
    rule = Rule(match="*lora_*", optimizer="muon")
    assert [a.optimizer for a in Hybrid(model, rules=[rule]).assignments] == ["muon"]


def test_the_table_has_optimizer_and_reason_of_every_parameter() -> None:
    table = Hybrid(Decoder(), **OPTIONS).table()
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert rows["layers.*.up.weight"].split()[-2:] == ["hidden", "matrix"]
    assert " adamw " in rows["embed.weight"]
    assert "looked up" in rows["embed.weight"]


def test_a_nonfinite_norm_skips_third_party_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.OptimizerEntry(lambda groups: torch.optim.SGD(groups, lr=0.1))
    monkeypatch.setitem(registry.optimizers._values, "plain_sgd", entry)
    model = Decoder()
    hybrid = Hybrid(
        model, rules=[Rule(match="embed.weight", optimizer="plain_sgd")], expert=Expert(on_bad_gradient="skip_step")
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.embed.weight.grad[0, 0] = torch.nan
    clip_grad_norm_(model.parameters(), 1.0, optimizer=hybrid)
    hybrid.step()
    assert all(map(torch.equal, before, model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.warns(UserWarning, match="the norm of the gradients was not finite"):
        hybrid.step()
    assert not any(map(torch.equal, before, model.parameters()))


def of_transformers(name: str, hybrid: Hybrid, **options: Any) -> Any:
    return pytest.importorskip("transformers").get_scheduler(name, hybrid, 1, 10, options)


CYCLE: dict[str, Any] = {"max_lr": 0.02, "cycle_momentum": False}
SCHEDULERS: dict[str, Callable[[Hybrid], Any]] = {
    "LambdaLR": lambda hybrid: torchs.LambdaLR(hybrid, lambda step: 0.9**step),
    "SequentialLR": lambda hybrid: torchs.SequentialLR(
        hybrid, [torchs.ConstantLR(hybrid), torchs.ExponentialLR(hybrid, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda hybrid: torchs.ReduceLROnPlateau(hybrid, patience=0, factor=0.5),
    "CyclicLR": lambda hybrid: torchs.CyclicLR(hybrid, 0.001, step_size_up=3, **CYCLE),
    "OneCycleLR": lambda hybrid: torchs.OneCycleLR(hybrid, total_steps=9, **CYCLE),
    "cosine": lambda hybrid: of_transformers("cosine", hybrid),
    "warmup_stable_decay": lambda hybrid: of_transformers("warmup_stable_decay", hybrid, num_decay_steps=7),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_sets_the_rate_of_every_group(name: str) -> None:
    model = Decoder()
    hybrid = Hybrid(model, **OPTIONS)
    scheduler = SCHEDULERS[name](hybrid)
    needs_loss = "metrics" in inspect.signature(scheduler.step).parameters
    rates = []
    for step in range(5):
        train(model, hybrid, range(step, step + 1))
        scheduler.step(1.0 + step) if needs_loss else scheduler.step()
        rates.append({float(group["lr"]) for group in hybrid.param_groups})
    assert all(len(of_step) == 1 for of_step in rates), rates
    assert len(set.union(*rates)) > 1, rates


def test_defaults_have_the_rate_and_the_decay() -> None:
    defaults = Hybrid(Decoder(), lr=0.01, weight_decay=0.2).defaults
    assert (defaults["lr"], defaults["weight_decay"]) == (0.01, 0.2)


def test_a_key_of_another_package_passes_through_a_checkpoint() -> None:
    model = Decoder()
    hybrid = Hybrid(model, **OPTIONS)
    for group in hybrid.param_groups:
        group["foreign"] = 0.65
    train(model, hybrid, range(1))
    other = Hybrid(Decoder(1), **OPTIONS)
    other.load_state_dict(hybrid.state_dict())
    assert [group["foreign"] for group in other.param_groups] == [0.65] * 3


def test_the_remedy_for_a_missing_gradient_works_as_written() -> None:
    model = Decoder()
    with pytest.raises(ValueError, match=r"expert.on_bad_gradient = 'skip_missing'"):
        Hybrid(model).step()
    Hybrid(model, expert=Expert(on_bad_gradient="skip_missing")).step()


@pytest.mark.parametrize(("named", "groups"), [(False, 1), (True, 1), (True, 2)])
def test_an_adamw_run_continues_under_hybrid(named: bool, groups: int) -> None:
    model, other = Decoder(), Decoder(1)
    params: list[Any] = list(model.named_parameters() if named else model.parameters())
    adamw = torch.optim.AdamW(params if groups == 1 else [{"params": params[:3]}, {"params": params[3:]}], lr=0.02)
    train(model, adamw, range(3))
    hybrid = Hybrid(other, **OPTIONS)
    with pytest.warns(UserWarning, match=r"no momentum for layers\.0\.up\.weight, .* and 2 more, whose momentum stays"):
        hybrid.load_state_dict(adamw.state_dict())
    theirs = {name: adamw.state[p] for name, p in model.named_parameters()}
    for name, parameter in other.named_parameters():
        state = hybrid.state.get(parameter, {})
        if "layers" in name and "weight" in name and "norm" not in name:
            assert not state, name
        else:
            assert all(torch.equal(state[key], theirs[name][key]) for key in ("step", "exp_avg", "exp_avg_sq")), name
    train(other, hybrid, range(1))


def test_a_state_dict_with_other_groups_loads_by_name() -> None:
    model = Decoder()
    saved = Hybrid(model, decay_vectors=True, **OPTIONS)
    train(model, saved, range(2))
    other = Decoder(1)
    other.load_state_dict(model.state_dict())
    loading = Hybrid(other, **OPTIONS)
    loading.load_state_dict(saved.state_dict())
    assert [group["weight_decay"] for group in loading.param_groups] == [0.1, 0.1, 0.1]
    for optimized, hybrid in ((model, saved), (other, loading)):
        train(optimized, hybrid, range(2, 4))
    assert equal(model, other)


# Groups of Keller Jordan's and of dion's Muon


def marked(model: Decoder, matrices: dict[str, Any], rest: dict[str, Any]) -> list[dict[str, Any]]:
    """A group of the matrices and one of the other parameters."""
    named = dict(model.named_parameters())
    return [
        {"params": [named[name] for name in named if name not in MATRICES], **rest},
        {"params": [named[name] for name in named if name in MATRICES], **matrices},
    ]


def test_groups_of_keller_jordan_train_as_muon_and_adamw_of_torch() -> None:
    model, other = Decoder(), Decoder()
    muons, adamws = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}, {"lr": 0.02, "betas": (0.8, 0.95)}
    groups = marked(model, {**muons, "use_muon": True}, {**adamws, "use_muon": False})
    train(model, Hybrid.from_groups(model, groups, expert=Expert(orthogonalize="reference")), range(3))
    rest, matrices = (group["params"] for group in marked(other, {}, {}))
    # His decay of AdamW is 0, and his eps 1e-10.
    adamw = torch.optim.AdamW(rest, **adamws, eps=1e-10, weight_decay=0)
    train(other, [adamw, torch.optim.Muon(matrices, **muons, adjust_lr_fn="original")], range(3))
    assert equal(model, other)


def test_groups_of_dion_have_its_defaults_and_its_constructors_keywords() -> None:
    model = Decoder()
    groups = marked(model, {}, {"algorithm": "adamw", "lr": 3e-4, "weight_decay": 0.0})
    hybrid = Hybrid.from_groups(model, groups, lr=0.02, mu=0.9, betas=(0.8, 0.9), weight_decay=0.1)
    made = {group["optimizer"]: group for group in hybrid.param_groups}
    given = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    defaults = {"nesterov": False, "adjust_lr_fn": "spectral_unclamped", "eps": 1e-8, "ns_coefficients": "you_jiacheng"}
    assert made["muon"].items() >= (given | defaults).items()
    assert made["adamw"].items() >= {"lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0}.items()
    assert "groups[1]" in hybrid.table()
    groups[0]["params"].pop()
    with pytest.warns(UserWarning, match=r"lm_head\.weight: in no group, so that no optimizer trains them"):
        Hybrid.from_groups(model, [groups[0], {**groups[1], "algorithm": "muon"}])


# A Hybrid saves the state that its optimizers train, whatever happens to parameters, states and groups

MUON, ADAMW, OTHER = "layers.0.up.weight", "embed.weight", "lm_head.weight"
"""A parameter of each optimizer."""


@dataclass
class Run:
    """A model and its Hybrid, where torch.optim.Adam trains the output head."""

    model: nn.Module
    hybrid: Hybrid


def run_of(
    seed: int = 0, shard: Callable[[nn.Module], object] | None = None, frozen: str = "", others: bool = True
) -> Run:
    model = Decoder(seed)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    if shard is not None:
        shard(model)
    rules = [Rule(match=OTHER, optimizer="torch_adam")] if others else []
    return Run(model, Hybrid(model, rules=rules, others={"torch_adam": {"lr": 0.02}} if others else {}, **OPTIONS))


@contextmanager
def torch_adam() -> Iterator[None]:
    registry.optimizers.register("torch_adam", registry.OptimizerEntry(torch.optim.Adam))
    try:
        yield
    finally:
        del registry.optimizers._values["torch_adam"]


_registered = pytest.fixture(autouse=True)(torch_adam.__wrapped__)


def replace_parameters(run: Run) -> None:
    new: dict[Any, nn.Parameter] = {}
    for module in run.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            new[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(module, name, new[parameter])
    for group in run.hybrid.param_groups:
        group["params"] = [new[parameter] for parameter in group["params"]]
    run.hybrid.rebuild()


def load_its_own(run: Run) -> None:
    run.hybrid.load_state_dict(copy.deepcopy(run.hybrid.state_dict()))


def add_a_group(run: Run) -> None:
    for optimizer in (run.hybrid, run.hybrid.optimizers["adamw"]):
        with pytest.raises(ValueError, match="build a new Hybrid"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))], "param_names": ["new"]})


def refuse_to_offload(run: Run) -> None:
    with pytest.raises(OptionError, match="torch_adam cannot move its states"):
        run.hybrid.offload()


def load_after_a_refused_load(run: Run) -> None:
    saved = copy.deepcopy(run.hybrid.state_dict())
    wrong = copy.deepcopy(saved)
    key = next(
        key for g in saved["param_groups"] for key, n in zip(g["params"], g["param_names"], strict=True) if n == ADAMW
    )
    if key in saved["state"]:
        for state in wrong["state"].values():
            for value in state.values():
                value.mul_(2)
        wrong["state"][key]["exp_avg"] = torch.zeros(3, 3)
        with pytest.raises(ValueError, match=r"^embed\.weight: the state dict has no exp_avg with this optimizer's"):
            run.hybrid.load_state_dict(wrong)


def copied_by(copying: Callable[[Any], Any]) -> Callable[[Run], None]:
    def event(run: Run) -> None:
        run.model, run.hybrid = copying((run.model, run.hybrid))

    return event


def freeze_and_thaw(run: Run) -> None:
    for needed in (False, True):
        for name in (MUON, ADAMW, OTHER):
            run.model.get_parameter(name).requires_grad_(needed)
        run.hybrid.rebuild()


SAME: dict[str, Callable[[Run], Any]] = {
    "read_state": lambda run: [run.hybrid.state[parameter] for parameter in run.model.parameters()],
    "rebuild": lambda run: run.hybrid.rebuild(),
    "replace_parameters": replace_parameters,
    "load_its_own": load_its_own,
    "load_into_the_parts": lambda run: [
        part.load_state_dict(copy.deepcopy(part.state_dict())) for part in run.hybrid.optimizers.values()
    ],
    "add_a_group": add_a_group,
    "deep_copy": copied_by(copy.deepcopy),
    "pickled": copied_by(lambda things: pickle.loads(pickle.dumps(things))),
    "refuse_to_offload": refuse_to_offload,
    "freeze_and_thaw": freeze_and_thaw,
    "load_after_a_refused_load": load_after_a_refused_load,
}
MOMENTS = ("before the first step", "between steps", "after a load")


def shares_one_state(run: Run) -> bool:
    parts = run.hybrid.optimizers.values()
    groups = [group for part in parts for group in part.param_groups]
    same_groups = all(mine is group for mine, group in zip(run.hybrid.param_groups, groups, strict=True))
    known = {parameter for group in groups for parameter in group["params"]}
    same_states = all(run.hybrid.state[p] is values for part in parts for p, values in part.state.items())
    names = [name for name, part in run.hybrid.optimizers.items() for _ in part.param_groups]
    named = [group["optimizer"] for group in run.hybrid.param_groups] == names
    return same_groups and same_states and named and set(run.hybrid.state) <= known


@cache
def undisturbed(first: int, shard: Callable[[nn.Module], object] | None) -> nn.Module:
    """A model after the steps from `first` to 3 without an event."""
    run = run_of(shard=shard)
    train(run.model, run.hybrid, range(first, 4))
    return run.model


def problems_of(run: Run, moment: str, event: Callable[[Run], Any], shard: Any = None) -> list[str]:
    """Failed claims about a run with an event at a moment, beside a run without."""
    first = 2 if moment == "before the first step" else 0
    train(run.model, run.hybrid, range(first, 2))
    if moment == "after a load":
        load_its_own(run)
    event(run)
    train(run.model, run.hybrid, range(2, 4))
    problems = [] if equal(run.model, undisturbed(first, shard)) else ["the event changed digits"]
    problems += [] if shares_one_state(run) else ["parts and Hybrid have different states or groups"]
    resumed = run_of(seed=1, shard=shard)
    resumed.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    resumed.hybrid.load_state_dict(copy.deepcopy(run.hybrid.state_dict()))
    for each in (run, resumed):
        train(each.model, each.hybrid, range(4, 6))
    return problems + ([] if equal(run.model, resumed.model) else ["the saved state is not the trained one"])


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("event", SAME)
def test_the_saved_state_is_the_trained_state(event: str, moment: str) -> None:
    assert problems_of(run_of(), moment, SAME[event]) == []


def test_offload_and_reload_keep_the_state() -> None:
    run, reference = run_of(others=False), run_of(others=False)
    for each in (run, reference):
        train(each.model, each.hybrid, range(2))
    run.hybrid.offload()
    train(run.model, run.hybrid, range(2, 3))
    run.hybrid.reload()
    train(run.model, run.hybrid, range(3, 4))
    train(reference.model, reference.hybrid, range(2, 4))
    assert equal(run.model, reference.model)
    assert shares_one_state(run)
    saved, expected = run.hybrid.state_dict()["state"], reference.hybrid.state_dict()["state"]
    assert all(torch.equal(saved[key][name], value) for key, s in expected.items() for name, value in s.items())


@pytest.mark.parametrize("name", [MUON, ADAMW, OTHER])
def test_a_parameter_frozen_at_the_start_trains_after_it_is_thawed(name: str) -> None:
    run = run_of(frozen=name)
    parameter = run.model.get_parameter(name)
    before = parameter.detach().clone()
    train(run.model, run.hybrid, range(2))
    assert torch.equal(parameter, before)
    assert name in run.hybrid.table().splitlines()[-1]
    parameter.requires_grad_(True)
    if name != OTHER:
        with pytest.raises(ValueError, match=r"frozen when the optimizer was built need a gradient now; call rebuild"):
            train(run.model, run.hybrid, range(2, 4))
    run.hybrid.zero_grad()
    run.hybrid.rebuild()
    train(run.model, run.hybrid, range(4, 6))
    assert not torch.equal(parameter, before)
    assert parameter in run.hybrid.state


def test_a_write_to_the_state_reaches_the_part_of_the_parameter() -> None:
    run = run_of()
    parts = run.hybrid.optimizers
    for name, part in ((MUON, "muon"), (ADAMW, "adamw")):
        parameter, values = run.model.get_parameter(name), {"mine": torch.ones(1)}
        assert parameter not in run.hybrid.state
        run.hybrid.state[parameter] = values
        assert parts[part].state[parameter] is run.hybrid.state[parameter] is values
    assert [len(part.state) for part in parts.values()].count(1) == len(run.hybrid.state) == 2
    run.hybrid.state = defaultdict(dict)
    assert not run.hybrid.state
    assert not any(part.state for part in parts.values())
    with pytest.raises(KeyError):
        run.hybrid.state[nn.Parameter(torch.ones(1))]
