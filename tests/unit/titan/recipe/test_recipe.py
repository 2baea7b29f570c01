"""Recipe files: accepted keys, combination of bases, sources of keys, and writing."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.recipe_files import RULE, error_of, write
from titan_muon.trainer.recipe import Recipe, RecipeError, load, sections, to_toml
from titan_muon.trainer.recipe.files import load_with_sources, with_source


def test_an_empty_file_is_the_default_recipe_named_after_the_file(tmp_path: Path) -> None:
    assert load(write(tmp_path, "", "small.toml")) == Recipe(name="small")


@pytest.mark.parametrize("by", ["command line", "file"])
def test_false_and_zero_replace_true_and_nonzero(tmp_path: Path, by: str) -> None:
    base = write(tmp_path, "muon = {nesterov = true, weight_decay = 0.3}\ncheckpoint.keep_latest_k = 4\n", "base.toml")
    text = "base = 'base.toml'\nmuon = {nesterov = false, weight_decay = 0.0}\ncheckpoint.keep_latest_k = 0\n"
    words = ["--muon.nesterov", "false", "--muon.weight_decay", "0.0", "--checkpoint.keep_latest_k", "0"]
    recipe = load(write(tmp_path, text)) if by == "file" else load(base, words)
    assert recipe.muon.nesterov is False
    assert (recipe.muon.weight_decay, recipe.checkpoint.keep_latest_k) == (0.0, 0)


def test_a_recipe_overrides_the_base_tables_merge_and_lists_do_not(tmp_path: Path) -> None:
    write(tmp_path, f"[muon]\nlr = 0.1\nmomentum = 0.1\n[muon.expert]\neps = 0.1\n{RULE}'x'\n{RULE}'y'", "far.toml")
    write(tmp_path, 'base = "../far.toml"\n[muon]\nlr = 0.2\nmomentum = 0.2', "sub/near.toml")
    file = write(tmp_path, f'base = "sub/near.toml"\n[muon]\nlr = 0.3\n{RULE}"z"')
    recipe = load(file, ["--muon.momentum=0.4"])
    assert (recipe.muon.lr, recipe.muon.momentum, recipe.muon.expert.eps) == (0.3, 0.4, 0.1)
    assert recipe.muon.weight_decay == sections.Muon().weight_decay
    assert [rule.optimizer for rule in recipe.optimizer.rule] == ["z"]


def test_rule_options_have_the_types_of_the_optimizers_table(tmp_path: Path) -> None:
    text = f"{RULE}'adamw'\noptions = {{lr = 1, betas = [0, 0.5]}}\n{RULE}'mine'\noptions = {{lr = 1, x = [1, 'a']}}"
    first, second = load(write(tmp_path, text)).optimizer.rule
    assert first.options == {"lr": 1.0, "betas": (0.0, 0.5)}
    assert type(first.options["lr"]) is float
    assert second == sections.Rule(match="*", optimizer="mine", options={"lr": 1, "x": (1, "a")})
    assert type(second.options["lr"]) is int


SCHEDULE = "training.steps = 300; lr_scheduler.warmup_steps = 20"
TEN = "--training.steps 10 --lr_scheduler"


@pytest.mark.parametrize(
    ("base", "own", "words", "warmup"),
    [
        (SCHEDULE, "training.steps = 10", "", 1),
        (SCHEDULE, "", "--training.steps 10", 1),
        (f"{SCHEDULE}; lr_scheduler.decay_ratio = 1.0", "training.steps = 10", "", 0),
        (f"{SCHEDULE}; lr_scheduler.decay_ratio = 0.9", "", "--training.steps 100", 6),
        (f"{SCHEDULE}; lr_scheduler.decay_ratio = 0.9", "training.steps = 290", "", 20),
        (f"{SCHEDULE}; lr_scheduler.decay_ratio = 0.9", "training.steps = 20", "", 1),
        (SCHEDULE, "", "--training.steps 1", 1),
        (SCHEDULE, "training.steps = 20", "", 20),
        (SCHEDULE, "training.steps = 600", "", 20),
        # A schedule beside its steps is not changed. A run may end in the warm-up of a longer schedule.
        (SCHEDULE, "", f"{TEN}.total_steps 300", 20),
        (SCHEDULE, "", f"{TEN}.total_steps 12", "lr_scheduler.warmup_steps"),
        (SCHEDULE, "", f"{TEN}.warmup_steps 15", "lr_scheduler.warmup_steps"),
        (SCHEDULE, "training.steps = 24; lr_scheduler.decay_ratio = 0.5", "", "leaves room for lr_scheduler.warmup_s"),
        ("training.steps = 24", "lr_scheduler.warmup_steps = 25", "", "lr_scheduler.warmup_steps = 25 is not accepted"),
    ],
)
def test_fewer_steps_than_in_a_base_or_file_have_a_proportional_warmup(
    tmp_path: Path, base: str, own: str, words: str, warmup: int | str
) -> None:
    lines: list[str] = []
    write(tmp_path, base.replace("; ", "\n"), "base.toml")
    file = write(tmp_path, f"base = 'base.toml'; {own}".replace("; ", "\n"))
    if isinstance(warmup, str):
        assert warmup in error_of(lambda: load(file, words.split(), lines.append))
        return
    recipe = load(file, words.split(), lines.append)
    assert recipe.lr_scheduler.warmup_steps == warmup
    notice = f"{warmup}: shortened from 20, in proportion to training.steps = {recipe.training.steps} instead of 300"
    assert lines == ([] if warmup == 20 else [f"lr_scheduler.warmup_steps = {notice}"])


def test_an_error_of_two_keys_names_the_source_of_both(tmp_path: Path) -> None:
    """The user must not look in the file for a number of the command line."""
    file = write(tmp_path, SCHEDULE.replace("; ", "\n"))
    message = error_of(lambda: load(file, ["--lr_scheduler.total_steps", "10"]))
    assert message.startswith("command line: lr_scheduler.total_steps = 10 is not accepted")
    assert f"Here training.steps = 300 ({file})" in message
    file = write(tmp_path, "[data]\nsource = 'hf'\n")
    message = error_of(lambda: load(file, ["--data.tokenizer", "bpe"]))
    assert message.startswith('command line: data.tokenizer = "bpe"')
    assert message.endswith(f'Here data.source = "hf" ({file}).')
    message = error_of(lambda: load(file, ["--data.files", "a", "b", "--data.weights", "1"]))
    assert message.startswith("command line: data.weights = [1.0] is not accepted; it takes a number for each entry")


def test_a_late_error_names_the_source_of_the_key(tmp_path: Path) -> None:
    """The model, the data or a checkpoint may refuse a value long after the recipe was read."""
    base = write(tmp_path, f"{RULE}'adamw'\n[muon]\nlr = 1e-3\n", "base.toml")
    file = write(tmp_path, 'base = "base.toml"\n[data]\nsource = "files"\nfiles = ["a"]\n')
    _, sources = load_with_sources(file, ["--muon.lr", "2e-3"], print)
    for key, source in (("optimizer.rule[0]", f"{base}: "), ("data.files", f"{file}: "), ("muon.lr", "command line: ")):
        error = with_source(RecipeError(": bad", key=key), sources)
        assert str(error) == f"{source}{key}: bad"
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.key, again.source) == (str(error), key, error.source)
    for key, text in (("adamw.lr", "is a default"), ("", "Muon takes no parameter"), ("", "muon.lr/a.b is no folder")):
        assert str(with_source(RecipeError(text, key=key), sources)) == f"{key} {text}".strip()


@pytest.mark.parametrize("line", ["[muon]\nlr = -1.0", "[muon]\nlr = 'fast'"])
def test_the_command_line_may_replace_a_wrong_value_of_a_file(tmp_path: Path, line: str) -> None:
    file = write(tmp_path, line)
    recipe, sources = load_with_sources(file, ["--muon.lr", "2e-3"], print)
    assert recipe.muon.lr == 2e-3
    assert str(with_source(RecipeError(": bad", key="muon.lr"), sources)) == "command line: muon.lr: bad"
    assert load(write(tmp_path, "[training]\nsteps = 0"), ["--training.steps", "10"]).training.steps == 10


TEXT = st.text(max_size=8)
NUMBER = st.floats(min_value=0, max_value=0.99)
SCALAR = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT)
OPTIONS = st.dictionaries(TEXT, st.one_of(SCALAR, st.lists(SCALAR, max_size=3).map(tuple)), max_size=3)
NAMES = st.text(min_size=1, max_size=8).filter(str.strip)
RULES = st.builds(sections.Rule, match=NAMES, optimizer=st.just("mine"), options=OPTIONS)
RECIPES = st.builds(
    Recipe,
    name=NAMES.filter(lambda name: name.isprintable() and not {"/", "\\"} & set(name) and name not in (".", "..")),
    muon=st.builds(
        sections.Muon,
        lr=NUMBER,
        nesterov=st.booleans(),
        ns_steps=st.just(2),
        ns_coefficients=st.sampled_from(["cans", ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))]),
    ),
    adamw=st.builds(sections.AdamW, betas=st.tuples(NUMBER, NUMBER)),
    data=st.builds(sections.Data, dataset_path=st.none() | TEXT)
    | st.builds(sections.Data, source=st.just("files"), files=st.lists(NAMES, min_size=1).map(tuple)),
    lr_scheduler=st.builds(
        sections.titan.LrScheduler,
        total_steps=st.none() | st.integers(min_value=sections.titan.Training().steps),
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


@pytest.mark.parametrize("name", ["llama_muon", "llama_muon.toml"])
def test_a_base_may_be_a_recipe_of_the_package_wherever_the_file_is(tmp_path: Path, name: str) -> None:
    recipe = load(write(tmp_path, f"base = '{name}'\ntraining.steps = 24\n"))
    assert (recipe.model.name, recipe.training.steps) == ("llama3", 24)
