"""A recipe written as TOML, and the difference of two."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.recipe_files import RULE, error_of, write
from titan_muon.trainer.recipe import Recipe, load, sections, to_toml

# Writing

TEXT = st.text(max_size=8)
NUMBER = st.floats(min_value=0, max_value=0.99)
SCALAR = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT)
OPTIONS = st.dictionaries(TEXT, st.one_of(SCALAR, st.lists(SCALAR, max_size=3).map(tuple)), max_size=3)
NAMES = st.text(min_size=1, max_size=8).filter(str.strip)
RULES = st.builds(sections.Rule, match=NAMES, optimizer=st.just("mine"), options=OPTIONS)
RECIPES = st.builds(
    Recipe,
    name=NAMES.filter(lambda name: name.isprintable() and not {"/", "\\"} & set(name) and name not in (".", "..")),
    muon=st.builds(sections.Muon, lr=NUMBER, momentum=NUMBER, nesterov=st.booleans(), weight_decay=NUMBER),
    adamw=st.builds(sections.AdamW, betas=st.tuples(NUMBER, NUMBER)),
    data=st.builds(sections.Data, dataset_path=st.none() | TEXT)
    | st.builds(sections.Data, source=st.just("files"), files=st.lists(NAMES, min_size=1).map(tuple)),
    lr_scheduler=st.builds(
        sections.LrScheduler,
        total_steps=st.none() | st.integers(min_value=sections.Training().steps),
        decay_ratio=st.none() | NUMBER,
    ),
    optimizer=st.builds(sections.Optimizer, rule=st.lists(RULES, max_size=2).map(tuple)),
)


@settings(max_examples=60, deadline=None)
@given(recipe=RECIPES)
def test_a_written_recipe_loads_as_an_equal_recipe(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.getbasetemp() / "resolved.toml"
    path.write_bytes(to_toml(recipe).encode())
    assert load(path) == recipe


def test_a_resolved_recipe_loads_without_the_base(tmp_path: Path) -> None:
    write(tmp_path, "[muon]\nns_steps = 2\nns_coefficients = [[1, 2, 3], [4, 5, 6]]\n" + RULE + "'muon'", "base.toml")
    recipe = load(write(tmp_path, 'base = "base.toml"\n', "mine.toml"), ["--muon.lr", "0.5", "--debug.seed", "0"])
    again = load(write(tmp_path, to_toml(recipe), "elsewhere/resolved.toml"))
    assert again == recipe
    assert again.name == "mine"
    assert to_toml(again) == to_toml(recipe)


@pytest.mark.parametrize("lr", [math.nan, -math.inf])
def test_unacceptable_numbers_are_not_written(lr: float) -> None:
    assert "muon.lr" in error_of(lambda: to_toml(Recipe(muon=sections.Muon(lr=lr))))
