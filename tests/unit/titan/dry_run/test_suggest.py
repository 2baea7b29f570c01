"""`--suggest`: the layouts fit, training accepts them, and the written recipe is the first of them."""

from pathlib import Path

import pytest

import models  # noqa: F401 (registers the families)
from titan_muon.plan.terms.machine import MACHINES
from titan_muon.titan.dry_run import suggest as module
from titan_muon.titan.dry_run.stages import dry_run
from titan_muon.titan.dry_run.suggest import Suggestion, search, suggest
from titan_muon.titan.recipe import Recipe, RecipeError, load

CONFIG = "configs/qwen_moe_muon.toml"
BATCH = ("--training.global_batch_size", "64")


def recipe(machine: str, *words: str) -> Recipe:
    return load(CONFIG, [*BATCH, "--machine.name", machine, *words])


def keys(found: list[Suggestion]) -> list[tuple[object, ...]]:
    return [(one.recipe.parallelism, one.recipe.training, one.slowest.seconds, one.peak) for one in found]


@pytest.mark.parametrize(("machine", "world"), [("h100x8", 16), ("h200x8", 8), ("gb200x72", 64)])
def test_the_best_layouts_fit_and_are_what_a_dry_run_says(machine: str, world: int) -> None:
    asked = recipe(machine)
    told: list[str] = []
    found = search(asked, world, MACHINES[machine], told.append)
    assert len(found) == module.SHOWN
    assert len(told) >= 1 + module.SHOWN, "a line for each plan"
    assert [one.order for one in found] == sorted(one.order for one in found)
    layouts = [module.layout_text(one.recipe) for one in found]
    assert len(set(layouts)) == len(layouts), "each has other degrees"
    first = found[0]
    parts = dry_run(first.recipe, world, "cuda")
    assert first.verdicts == tuple(part.verdict for part in parts)
    assert all(part.verdict.fits for part in parts)
    today = dry_run(asked, world, "cuda")
    assert first.slowest.seconds <= max(part.verdict.seconds for part in today) * 1.01


def test_a_search_is_repeatable() -> None:
    first, second = (search(recipe("h100x8"), 8, MACHINES["h100x8"], lambda line: None) for _ in range(2))
    assert keys(first) == keys(second)


def test_a_layout_that_training_refuses_is_never_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has four key-value heads, so that only a dry run knows of TP 8."""
    layouts = [recipe("h100x8", "--parallelism.tensor_parallel_degree", degree) for degree in ("2", "8")]
    with pytest.raises(RecipeError):
        dry_run(layouts[1], 8, "cuda")
    monkeypatch.setattr(module, "_layouts", lambda *_: iter(layouts))
    told: list[str] = []
    (only,) = search(recipe("h100x8"), 8, MACHINES["h100x8"], told.append)
    assert only.recipe.parallelism.tensor_parallel_degree == 2
    assert any("TP 8" in line for line in told), "the refusal came from its plan"


def test_the_written_recipe_has_base_command_line_and_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fast.toml"
    asked = recipe("h100x8", "--muon.lr", "1e-3")
    suggest(asked, 8, None, CONFIG, str(file))
    printed = capsys.readouterr().out
    assert "layouts for 8 ranks of h100x8, modelled" in printed
    assert f"wrote {file}" in printed
    written = load(file)
    assert written.muon.lr == 1e-3
    assert written.training.global_batch_size == 64
    (first, *_) = search(asked, 8, MACHINES["h100x8"], lambda line: None)
    assert written.parallelism == first.recipe.parallelism
    assert written.training == first.recipe.training
    assert "muon.momentum" not in file.read_text(), "other keys stay with the base"
    with pytest.raises(RecipeError, match="the file exists"):
        suggest(asked, 8, None, CONFIG, str(file))


def test_a_machine_without_known_or_enough_memory_is_an_error() -> None:
    with pytest.raises(RecipeError, match="the memory of cpu is unknown"):
        suggest(recipe("cpu"), 8, "cpu", CONFIG, None)
    large = load("configs/llama3_70b_muon.toml", ["--machine.name", "h100x8"])
    with pytest.raises(RecipeError, match="no layout fits into 2 ranks of h100x8"):
        suggest(large, 2, None, "configs/llama3_70b_muon.toml", None)
