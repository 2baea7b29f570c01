"""A recipe's optimizers: parameters, groups, options and refusals, and a run that continues from a checkpoint."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer

from titan_muon import Muon, registry
from titan_muon.adamw import AdamW
from titan_muon.assignment.roles import ParameterInfo, inspect_model
from titan_muon.assignment.table import decay_lines
from titan_muon.engine.exchange.agreement import Agreement
from titan_muon.options import Split
from titan_muon.trainer.assign.container import HybridOptimizers, optimizer_config
from titan_muon.trainer.recipe import Recipe, RecipeError, sections
from titan_muon.trainer.run.checkpoints import RunCheckpoints, check_data_ranks
from titan_muon.trainer.run.signals import StopSignals


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(6, 8, bias=False)
        self.wo = nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6, bias=False)


class Model(nn.Module):
    """Layers named by numbers from `first` on, and the remaining parts of a language model."""

    def __init__(self, layers: int = 2, first: int = 0, ends: bool = True, hidden: bool = True) -> None:
        super().__init__()
        if ends:
            self.tok_embeddings = nn.Embedding(10, 6)
            self.output = nn.Linear(6, 10, bias=False)
        if hidden:
            self.layers = nn.ModuleDict({str(first + i): Block() for i in range(layers)})


HIDDEN = {f"layers.{i}.{name}.weight" for i in range(2) for name in ("wq", "wo")}
TABLES = {"tok_embeddings.weight", "output.weight"}
NORMS = {"layers.0.norm.weight", "layers.1.norm.weight"}
OTHERS = TABLES | NORMS


def rule(match: str, optimizer: str, **options: object) -> sections.Rule:
    return sections.Rule(match=match, optimizer=optimizer, options=options)


def recipe(*rules: sections.Rule, stages: int = 1, **optimizer: Any) -> Recipe:
    return Recipe(
        optimizer=sections.Optimizer(rule=rules, implementation="for-loop", **optimizer),
        parallelism=sections.titan.Parallelism(pipeline_parallel_degree=stages),
        muon=sections.Muon(lr=0.02, state_dtype="bfloat16"),
        adamw=sections.AdamW(lr=0.003),
    )


def container(of: Recipe, *parts: nn.Module) -> HybridOptimizers:
    return HybridOptimizers(optimizer_config(of), model_parts=list(parts) if parts else [Model()])


def names(optimizers: HybridOptimizers) -> dict[str, list[set[str]]]:
    pairs = zip(optimizers.parts.groups, optimizers.optimizers, strict=True)
    return {name: [set(group["param_names"]) for group in taker.param_groups] for name, taker in pairs}


def test_the_default_rules_make_a_group_per_optimizer_and_one_of_vectors_without_weight_decay() -> None:
    model = Model()
    optimizers = container(recipe(), model)
    assert names(optimizers) == {"muon": [HIDDEN], "adamw": [TABLES, NORMS]}
    assert [group["weight_decay"] for group in optimizers.optimizers[0].param_groups] == [0.1, 0.0]
    assert decay_lines(optimizers.parts.groups) == [
        "no weight decay: 2 norms, biases and other vectors (decay_vectors = false)"
    ]
    assert {type(optimizer) for optimizer in optimizers} == {Muon, AdamW}
    assert optimizers.learning_rates() == {"muon": 0.02, "adamw": 0.003}
    named = dict(model.named_parameters())
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        assert all(named[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
        group["lr"] /= 2
    assert optimizers.learning_rates() == {"muon": 0.01, "adamw": 0.0015}, "the current rates"


def test_vectors_decay_if_asked_for_or_if_a_rule_decays_them() -> None:
    assert names(container(recipe(decay_vectors=True)))["adamw"] == [OTHERS]
    adamw = container(recipe(rule("layers.0.norm.*", "adamw", weight_decay=0.3))).optimizers[0]
    decays = {name: group["weight_decay"] for group in adamw.param_groups for name in group["param_names"]}
    assert [decays[f"layers.{i}.norm.weight"] for i in range(2)] == [0.3, 0.0]


def test_options_of_a_whole_optimizer_reach_the_optimizer() -> None:
    adamw, muon = container(replace(recipe(offload="state"), adamw=sections.AdamW(state_dtype="bfloat16")))
    assert isinstance(adamw, AdamW)
    assert isinstance(muon, Muon)
    assert {state["momentum_buffer"].dtype for state in muon.state.values()} == {torch.bfloat16}
    assert (adamw.offloaded, adamw.state_dtype, muon._options.offload) == ("state", "bfloat16", "state")
    optimizers = container(recipe())
    adamw, muon = optimizers
    for move, offload in ((optimizers.offload, "state"), (optimizers.reload, "none")):
        move()
        assert adamw.offloaded == muon._options.offload == offload


@pytest.mark.parametrize("taker", ["adamw", "muon"])
def test_the_recipe_selects_the_optimizer_of_the_router(taker: str) -> None:
    model = Model()
    model.layers["0"].router = nn.ModuleDict({"gate": nn.Linear(6, 4, bias=False)})
    assert any("layers.0.router.gate.weight" in group for group in names(container(recipe(router=taker), model))[taker])


NORMS_TO_ADAMW = rule("*.norm.*", "adamw")
THEIRS = rule("*.norm.*", "their_sgd", lr=0.5, foreach=True)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (rule("*.wq.*", "muon", algorithm="normoun"), "options.algorithm = 'normoun' is unknown; did"),
        (rule("*.wq.*", "muon", algorithm=("normuon", "adamuon")), "options.algorithm .* one of them"),
        (rule("*.wq.*", "muon", ns_coefficients=((100.0, 2.0, 3.0),)), "options.ns_coeff.* no margin"),
        (rule("*.wq.*", "muon", exchange="all_gather"), "options.exchange: .* set muon.expert.exchange$"),
        (rule("*.wq.*", "adamw", fused=True), "options.fused: .* set adamw.fused$"),
        (rule("*.wo.*", "muno"), "optimizer = 'muno' is unknown; did you mean 'muon'"),
        (rule("*.wq.*", "muon", dampening=0.1), "options.dampening: muon has no such option; it takes lr"),
        (rule("tok_*", "their_sgd", momentun=0.8), "options.momentun: their_sgd has no such option; .*lr"),
        (rule("tok_*", "their_sgd", params=0.8), "options.params: their_sgd has no such option; .*lr"),
        (rule("tok_*", "their_sgd", lr=0.5, foreach=False), "options.foreach: .* an earlier rule says True"),
    ],
)
@pytest.mark.usefixtures("sgd")
def test_an_option_that_a_rule_cannot_set_is_refused_at_its_place(second: sections.Rule, message: str) -> None:
    first = THEIRS if second.optimizer == "their_sgd" else NORMS_TO_ADAMW
    with pytest.raises(RecipeError, match=rf"^optimizer\.rule\[1\]\.{message}"):
        container(recipe(first, second))


def test_a_model_without_muon_parameters_is_refused_unless_rules_name_every_parameter() -> None:
    with pytest.raises(RecipeError, match="Muon takes no parameter"):
        container(recipe(rule("layers.*", "adamw")))
    assert list(names(container(recipe(rule("*", "adamw"))))) == ["adamw"]


# Third-party optimizers


@pytest.fixture
def sgd(monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an optimizer registered by another package; `foreach` applies to all parameters."""
    monkeypatch.setattr(registry.optimizers, "_values", dict(registry.optimizers._values))
    entry = registry.OptimizerEntry(lambda groups, **options: torch.optim.SGD(groups, **options), ("foreach",))
    registry.optimizers.register("their_sgd", entry)
    return "their_sgd"


def test_cpu_offload_sets_the_offload_option_of_muon_and_adamw(sgd: str) -> None:
    of = recipe(rule("*.norm.*", sgd, lr=0.5))
    optimizers = container(replace(of, training=replace(of.training, enable_cpu_offload=True)))
    by_name = dict(zip(names(optimizers), optimizers, strict=True))
    assert by_name["adamw"].offloaded == by_name["muon"]._options.offload == "parameters"
    assert isinstance(by_name[sgd], torch.optim.SGD), "another package's steps where its parameters are"


def test_a_third_party_optimizer_gets_the_rules_options(sgd: str) -> None:
    of = recipe(rule("*.norm.*", sgd, lr=0.5, momentum=0.8), rule("tok_*", sgd, lr=0.25, foreach=True))
    taker = dict(zip(names(container(of)), container(of), strict=True))[sgd]
    assert isinstance(taker, torch.optim.SGD)
    groups = {(g["param_names"][0], g["lr"], g["momentum"], g["foreach"]) for g in taker.param_groups}
    assert groups == {("layers.0.norm.weight", 0.5, 0.8, True), ("tok_embeddings.weight", 0.25, 0.0, True)}


def test_an_optimizer_without_offload_is_refused_with_offload_state(sgd: str) -> None:
    of = rule("*.norm.*", sgd, lr=0.5)
    message = r'^optimizer\.offload = "state": their_sgd keeps its states on the device; set "none", .* adamw, muon$'
    with pytest.raises(RecipeError, match=message):
        container(recipe(of, offload="state"))
    with pytest.raises(ValueError, match=r"^offload: their_sgd cannot move its states$"):
        container(recipe(of)).offload()


# Clipping


def test_a_third_party_optimizer_is_clipped_as_adamw(sgd: str) -> None:
    """By default only Muon is exempt: `adamw` must include third-party optimizers."""
    model = Model()
    optimizers = container(recipe(rule("*.norm.*", sgd, lr=0.5), rule("*.wo.*", sgd, lr=0.5)), model)
    parameters = {name: {id(p) for p in optimizers.parameters(name)} for name in ("muon", "adamw", sgd)}
    assert parameters["muon"] == {id(p) for name, p in model.named_parameters() if ".wq." in name}
    assert {id(p) for p in optimizers.clipped_parameters("adamw")} == parameters["adamw"] | parameters[sgd]
    assert {id(p) for p in optimizers.clipped_parameters("all")} == {id(p) for p in model.parameters()}
    assert optimizers.clipped_parameters("none") == []


# Model parts: the chunks of pipeline stages


def test_several_parts_share_an_optimizer_per_name_and_no_parameter_name() -> None:
    parts = Model(layers=1, ends=True), Model(layers=1, first=1, ends=False)
    assert names(container(recipe(stages=2), *parts)) == {"muon": [HIDDEN], "adamw": [TABLES, NORMS]}
    with pytest.raises(AssertionError, match="mismatch"):
        container(recipe(stages=2), Model(), Model())


def whole_model() -> dict[str, ParameterInfo]:
    return inspect_model([Model()])


def test_every_stage_has_the_groups_of_the_whole_model() -> None:
    of = recipe(rule("layers.1.wq.*", "muon", lr=0.5), stages=2)
    config = optimizer_config(of, whole_model())
    first, second = Model(layers=1), Model(layers=1, first=1, ends=False)
    stages = [HybridOptimizers(config, model_parts=[stage]) for stage in (first, second)]
    assert [names(stage)["muon"] for stage in stages] == [
        [{"layers.0.wq.weight", "layers.0.wo.weight"}, set()],
        [{"layers.1.wo.weight"}, {"layers.1.wq.weight"}],
    ]
    rates = {"muon": 0.02, "muon/layers.1.wq.*": 0.5, "adamw": 0.003}
    assert stages[0].learning_rates() == stages[1].learning_rates() == rates
    assert {a.fqn for a in stages[1].assignments} == {name for name, _ in second.named_parameters()}
    # A rule may match no parameter of the first stage, but not of the whole model.
    with pytest.raises(RecipeError, match=r"'layers\.7\.\*' takes no parameter"):
        HybridOptimizers(
            optimizer_config(recipe(rule("layers.7.*", "adamw"), stages=2), whole_model()), model_parts=[first]
        )


def test_splits_are_judged_by_the_whole_model() -> None:
    dims, lengths = "(h f) d -> h | f d", {"f": 2}
    of = recipe(stages=2)
    of = replace(of, muon=replace(of.muon, split=(Split(match="layers.1.wq.*", dims=dims, lengths=lengths),)))
    config = optimizer_config(of, whole_model())
    first, second = Model(layers=1), Model(layers=1, first=1, ends=False)
    plans = [HybridOptimizers(config, model_parts=[stage]).optimizers for stage in (first, second)]
    muon_plans = [next(optimizer for optimizer in built if isinstance(optimizer, Muon)).plan for built in plans]
    assert [len(p.stack.matrices) > 1 for plan in muon_plans for p in plan.parameters] == [False, False, True, False]
    unused = replace(of, muon=replace(of.muon, split=(Split(match="layers.7.*", dims=dims, lengths=lengths),)))
    with pytest.raises(RecipeError, match=r"muon\.split: 'layers\.7\.\*' matches no Muon parameter"):
        HybridOptimizers(optimizer_config(unused, whole_model()), model_parts=[first])


# `HybridOptimizers.Config` in the optimizer slot of TorchTitan's configuration


def in_slot(**options: Any) -> HybridOptimizers:
    built: HybridOptimizers = HybridOptimizers.Config(**options).build(model_parts=[Model()])
    return built


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_torchtitans_implementation_option_reaches_adamw(implementation: str) -> None:
    group = in_slot(implementation=implementation).parts.optimizers["adamw"].param_groups[0]
    assert {name: group[name] for name in ("fused", "foreach")} == {
        name: name == implementation for name in ("fused", "foreach")
    }


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"param_groups": [object()]}, "param_groups is not read by HybridOptimizers; write rules"),
        ({"optimizer_factory_kwargs_by_name": {"Muon": {}}}, r"optimizer_factory_kwargs_by_name \(Muon\).*write"),
        ({"implementation": "fused_opt_states_bf16"}, "'state_dtype': 'bfloat16'"),
        ({"tables": {"muon": {"learning_rate": 0.02}}}, r"muon\.learning_rate"),
    ],
)
def test_unread_fields_and_unknown_options_of_the_slot_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        in_slot(**options)


def test_an_error_of_a_stage_is_sent_to_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage with the embedding has no matrix; the other stage would wait in Muon's first collective."""
    compared: list[int] = []
    monkeypatch.setattr(Agreement, "_reduced", lambda self, rank, _: compared.append(rank) or rank)
    with pytest.raises(ValueError, match="Muon takes no parameter"):
        HybridOptimizers(HybridOptimizers.Config(), model_parts=[Model(hidden=False)])
    assert compared == [0], "the number of the failed rank"


# A torchtitan with moved modules and another slot. An import hook hides the modules missing on its main branch.

ROOT = Path(__file__).parents[4]
MOVED = """
import sys

HIDDEN = ("torchtitan.components.dataloader", "torchtitan.components.data", "torchtitan.components.validate")

class Moved:
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Moved())
"""
SLOT = """
from dataclasses import dataclass, field
from titan_muon.trainer.torchtitan import compat
compat.install()
from torchtitan.components import optimizer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Configurable

class BaseOptimizer(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

class AdamW(BaseOptimizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseOptimizer.Config):
        lr: float = 1e-3

class Slot(OptimizersContainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizers: list[BaseOptimizer.Config] = field(default_factory=list)

optimizer.OptimizersContainer = Slot
"""
TRAIN = """
import torch
from torch import nn
from titan_muon.trainer import HybridOptimizers

model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "layers": nn.ModuleList([nn.Linear(32, 32)])})
optimizers = HybridOptimizers.Config().build(model_parts=[model])
before = [param.detach().clone() for param in model.parameters()]
for param in model.parameters():
    param.grad = torch.randn_like(param)
optimizers.step()
assert not any(map(torch.equal, before, model.parameters()))
assert {"muon", "adamw"} == {assignment.optimizer for assignment in optimizers.assignments}
try:
    HybridOptimizers.Config(optimizers=[AdamW.Config()]).build(model_parts=[model])
except ValueError as error:
    assert str(error).startswith("optimizers (AdamW.Config) is not read by HybridOptimizers; write rules"), error
else:
    raise AssertionError("accepted")
"""
REFUSED = """
import runpy
sys.argv = ["train.py", "--config", "configs/qwen_moe_muon.toml", "--dry-run"]
runpy.run_path("train.py", run_name="__main__")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", MOVED + code]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_the_optimizer_fits_another_form_of_the_slot() -> None:
    done = run(SLOT + TRAIN)
    assert done.returncode == 0, done.stderr


def test_recipes_on_an_unsupported_torchtitan_are_refused_with_the_version() -> None:
    done = run(REFUSED)
    assert done.returncode == 2, done.stderr
    place = r"the torchtitan in \S+/torchtitan \(version \S+\) has other loaders: `pip install"
    assert len(re.findall(f"error: recipes know torchtitan's release 0.3.0, and {place}", done.stderr)) == 1
    assert "HybridOptimizers.Config()" in done.stderr
    assert "Traceback" not in done.stderr


# A continued run trains with the recipe's hyperparameters, not the checkpoint's, and lists changes

OTHER = {
    "muon": {"lr": 0.5, "ns_steps": 3, "ns_coefficients": ((3.0, -4.0, 2.0),) * 3},
    "adamw": {"lr": 0.5, "betas": (0.5, 0.75)},
}
STEPS = 4


def trainer_state() -> Any:
    state = {"step": STEPS, "ntokens_seen": 0}
    save = {"state_dict": lambda: state, "load_state_dict": state.update, "check_before_save": lambda: None}
    return SimpleNamespace(state=state, stop=StopSignals(), **save)


class Run:
    def __init__(self, recipe: Recipe, folder: Path, resume: str | None = None, exclude: tuple[str, ...] = ()) -> None:
        torch.manual_seed(0)
        self.model = Model(layers=1)
        self.optimizers = HybridOptimizers(optimizer_config(recipe), model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=recipe.training.steps)
        config = RunCheckpoints.Config(
            enable=True, keep_latest_k=0, last_save_model_only=False, resume=resume, excluded=("dataloader", *exclude)
        )
        self.checkpoints = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": trainer_state()},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizers.step()
        self.schedulers.step()

    def group(self, optimizer: str) -> dict[str, Any]:
        return self.optimizers.parts.optimizers[optimizer].param_groups[0]


def continuing(steps: int = STEPS, **tables: Any) -> Recipe:
    return replace(Recipe(), training=sections.titan.Training(steps=steps), **tables)


@pytest.fixture
def checkpoint(tmp_path: Path, world_of_one: None) -> Path:
    run = Run(continuing(), tmp_path)
    for _ in range(STEPS):
        run.step()
    run.checkpoints.save(STEPS, last_step=True)
    return tmp_path / "checkpoint" / f"step-{STEPS}"


def resumed(of: Recipe, checkpoint: Path, **options: Any) -> Run:
    run = Run(of, checkpoint.parents[1], str(checkpoint), **options)
    assert run.checkpoints.load()
    return run


def test_a_resume_uses_the_options_of_the_recipe_and_prints_changes(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old: dict[str, Any] = {"muon": sections.Muon(), "adamw": sections.AdamW()}
    tables = {name: replace(section, **OTHER[name]) for name, section in old.items()}
    run = resumed(continuing(steps=2 * STEPS, **tables), checkpoint)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(
        f"changed since the checkpoint: {table}.{option}: {getattr(old[table], option)} -> {value}"
        for table, options in OTHER.items()
        for option, value in options.items()
    )
    for _ in range(2):
        for table, options in OTHER.items():
            for option, value in options.items():
                assert run.group(table)["initial_lr" if option == "lr" else option] == value
        run.step()


def test_a_checkpoint_without_an_option_continues_with_the_recipes_value(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new option would otherwise make all older checkpoints unreadable."""
    older = Run(continuing(), checkpoint.parents[1])
    known = {k: v for k, v in older.optimizers.state_dict().items() if not k.endswith((".ns_steps", ".fused"))}
    monkeypatch.setattr(older.optimizers, "state_dict", lambda: known)
    older.checkpoints.states["train_state"].state["step"] = STEPS + 1
    older.checkpoints.save(STEPS + 1, last_step=True)
    run = resumed(continuing(muon=sections.Muon(ns_steps=3)), checkpoint.with_name(f"step-{STEPS + 1}"))
    assert run.group("muon")["ns_steps"] == 3
    missing = "not in the checkpoint, so that the recipe's value counts: "
    shown = sorted(line for line in capsys.readouterr().out.splitlines() if "the checkpoint" in line)
    assert shown == [f"{missing}adamw.fused = False", f"{missing}muon.ns_steps = 3"]
    run.step()


@pytest.mark.parametrize("exclude", [(), ("lr_scheduler",), ("optimizer",)])
def test_the_first_step_has_the_rate_of_the_schedule(checkpoint: Path, exclude: tuple[str, ...]) -> None:
    """Extended from 4 to 8 steps, step 5 has 4/6 of the decay left; the finished run's next rate was 0."""
    run = resumed(continuing(steps=8, muon=sections.Muon(lr=0.3)), checkpoint, exclude=exclude)
    share = 1 / 2 if exclude == ("lr_scheduler",) else 1 - 2 / 6
    assert run.group("muon")["lr"] == pytest.approx(0.3 * share)
    assert run.optimizers.learning_rates() == pytest.approx({"muon": 0.3 * share, "adamw": 1e-3 * share})


def test_a_changed_momentum_dtype_is_applied_and_printed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = resumed(continuing(muon=sections.Muon(state_dtype="bfloat16")), checkpoint)
    line = "changed since the checkpoint: muon momentum_buffer: torch.float32 -> torch.bfloat16"
    assert capsys.readouterr().out.splitlines().count(line) == 1
    averages = [state["momentum_buffer"] for state in run.optimizers.optimizers[1].state.values()]
    assert all(average.dtype == torch.bfloat16 and average.abs().sum() > 0 for average in averages)


def test_a_changed_optimizer_of_a_parameter_is_refused_by_name(checkpoint: Path) -> None:
    other = continuing(optimizer=sections.Optimizer(rule=(rule("*.wq.weight", "adamw"),)))
    problem = r"(?s)optimizer\.rule.*adamw trains layers\.0\.wq\.weight.*exclude_from_loading"
    with pytest.raises(RecipeError, match=problem):
        resumed(other, checkpoint)
    resumed(other, checkpoint, exclude=("optimizer",))


def test_torchtitans_loader_refuses_a_changed_number_of_data_ranks() -> None:
    saved = ["dataloader.dp_rank_0", "dataloader.dp_rank_1", "dataloader.world_size", "train_state.step"]
    check_data_ranks(SimpleNamespace(dp_world_size=2), saved)
    with pytest.raises(
        RecipeError, match=r"data\.source = 'hf'.*on 2 data-parallel ranks.*has 4.*exclude_from_loading"
    ):
        check_data_ranks(SimpleNamespace(dp_world_size=4), saved)
