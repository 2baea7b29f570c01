"""A continued run trains with the recipe's hyperparameters, not the checkpoint's, and lists changes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.components.optimizer import LRSchedulersContainer

from tests.unit.titan.assign.test_optimizers import Model, rule
from titan_muon.trainer.assign.container import HybridOptimizers, optimizer_config
from titan_muon.trainer.recipe import Recipe, RecipeError, sections
from titan_muon.trainer.run.checkpoints import RunCheckpoints, check_data_ranks
from titan_muon.trainer.run.signals import StopSignals

OTHER = {
    "muon": {"lr": 0.5, "ns_steps": 3, "ns_coefficients": ((3.0, -4.0, 2.0),) * 3},
    "adamw": {"lr": 0.5, "betas": (0.5, 0.75)},
}
STEPS = 4

pytestmark = pytest.mark.usefixtures("world_of_one")


def trainer() -> Any:
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
            states={"train_state": trainer()},
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


def recipe(steps: int = STEPS, **tables: Any) -> Recipe:
    return replace(Recipe(), training=sections.titan.Training(steps=steps), **tables)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    run = Run(recipe(), tmp_path)
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
    run = resumed(recipe(steps=2 * STEPS, **tables), checkpoint)
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
    older = Run(recipe(), checkpoint.parents[1])
    known = {k: v for k, v in older.optimizers.state_dict().items() if not k.endswith((".ns_steps", ".fused"))}
    monkeypatch.setattr(older.optimizers, "state_dict", lambda: known)
    older.checkpoints.states["train_state"].state["step"] = STEPS + 1
    older.checkpoints.save(STEPS + 1, last_step=True)
    run = resumed(recipe(muon=sections.Muon(ns_steps=3)), checkpoint.with_name(f"step-{STEPS + 1}"))
    assert run.group("muon")["ns_steps"] == 3
    missing = "not in the checkpoint, so that the recipe's value counts: "
    shown = sorted(line for line in capsys.readouterr().out.splitlines() if "the checkpoint" in line)
    assert shown == [f"{missing}adamw.fused = False", f"{missing}muon.ns_steps = 3"]
    run.step()


@pytest.mark.parametrize("exclude", [(), ("lr_scheduler",), ("optimizer",)])
def test_the_first_step_has_the_rate_of_the_schedule(checkpoint: Path, exclude: tuple[str, ...]) -> None:
    """Extended from 4 to 8 steps, step 5 has 4/6 of the decay left; the finished run's next rate was 0."""
    run = resumed(recipe(steps=8, muon=sections.Muon(lr=0.3)), checkpoint, exclude=exclude)
    share = 1 / 2 if exclude == ("lr_scheduler",) else 1 - 2 / 6
    assert run.group("muon")["lr"] == pytest.approx(0.3 * share)
    assert run.optimizers.learning_rates() == pytest.approx({"muon": 0.3 * share, "adamw": 1e-3 * share})


def test_a_changed_momentum_dtype_is_applied_and_printed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = resumed(recipe(muon=sections.Muon(state_dtype="bfloat16")), checkpoint)
    line = "changed since the checkpoint: muon momentum_buffer: torch.float32 -> torch.bfloat16"
    assert capsys.readouterr().out.splitlines().count(line) == 1
    averages = [state["momentum_buffer"] for state in run.optimizers.optimizers[1].state.values()]
    assert all(average.dtype == torch.bfloat16 and average.abs().sum() > 0 for average in averages)


def test_a_changed_optimizer_of_a_parameter_is_refused_by_name(checkpoint: Path) -> None:
    other = recipe(optimizer=sections.Optimizer(rule=(rule("*.wq.weight", "adamw"),)))
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
