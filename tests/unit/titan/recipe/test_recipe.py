"""Recipe files: accepted keys, combination of bases, and a single error for refused keys."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.recipe_files import RULE, error_of, write
from titan_muon.trainer.recipe import Recipe, RecipeError, load, sections, to_toml
from titan_muon.trainer.recipe.files import load_with_sources, with_source

# Files


def test_an_empty_file_is_the_default_recipe_named_after_the_file(tmp_path: Path) -> None:
    assert load(write(tmp_path, "", "small.toml")) == Recipe(name="small")


def test_false_and_zero_replace_true_and_nonzero(tmp_path: Path) -> None:
    base = "muon.nesterov = true\nmuon.weight_decay = 0.3\ncheckpoint.keep_latest_k = 4\n"
    write(tmp_path, base, "base.toml")
    text = "base = 'base.toml'\nmuon.nesterov = false\nmuon.weight_decay = 0.0\ncheckpoint.keep_latest_k = 0\n"
    words = ["--muon.nesterov", "false", "--muon.weight_decay", "0.0", "--checkpoint.keep_latest_k", "0"]
    for recipe in (load(write(tmp_path, text)), load(write(tmp_path, base), words)):
        assert recipe.muon.nesterov is False
        assert (recipe.muon.weight_decay, recipe.checkpoint.keep_latest_k) == (0.0, 0)


# Bases


def test_a_recipe_overrides_the_base_tables_merge_and_lists_do_not(tmp_path: Path) -> None:
    write(tmp_path, f"[muon]\nlr = 0.1\nmomentum = 0.1\n[muon.expert]\neps = 0.1\n{RULE}'x'\n{RULE}'y'", "far.toml")
    write(tmp_path, 'base = "../far.toml"\n[muon]\nlr = 0.2\nmomentum = 0.2', "sub/near.toml")
    file = write(tmp_path, f'base = "sub/near.toml"\n[muon]\nlr = 0.3\n{RULE}"z"')
    recipe = load(file, ["--muon.momentum=0.4"])
    assert (recipe.muon.lr, recipe.muon.momentum, recipe.muon.expert.eps) == (0.3, 0.4, 0.1)
    assert recipe.muon.weight_decay == sections.Muon().weight_decay
    assert [rule.optimizer for rule in recipe.optimizer.rule] == ["z"]


@pytest.mark.parametrize(
    ("base", "own", "parts"),
    [
        ("base = 'gone.toml'", "base = 'base.toml'", ("gone.toml: no such file", "run.toml -> ", "base.toml -> ")),
        ("base = 'run.toml'", "base = 'base.toml'", ("cycle: ", "run.toml -> ", "base.toml -> ")),
        ("", "base = ['a.toml']", ('base = ["a.toml"] is not accepted; it takes the path of one recipe',)),
    ],
)
def test_a_bad_base_names_the_chain(tmp_path: Path, base: str, own: str, parts: tuple[str, ...]) -> None:
    write(tmp_path, base, "base.toml")
    message = error_of(lambda: load(write(tmp_path, own)))
    assert [part for part in parts if part not in message] == []


# Errors


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[muon]\nmomentun = 0.9", ["unknown key muon.momentun = 0.9", "Did you mean muon.momentum?", "ns_steps"]),
        ("[muon]\nlearning_rate = 1", ["unknown key muon.learning_rate", "Did you mean muon.lr?"]),
        ("[training]\nlr = 0.9", ["unknown key training.lr", "Did you mean muon.lr?", "seq_len"]),
        ("[optimiser]\nclip = 1", ["unknown table [optimiser]", "Did you mean [optimizer]?", "adamw"]),
        ("[optimiser]", ["unknown table [optimiser]", "Did you mean [optimizer]?"]),
        ("steps = 3", ["unknown key: steps = 3", "Did you mean training.steps?"]),
        (
            "[muon]\nexchange = 'all_gather'",
            ['unknown key muon.exchange = "all_gather"', "Did you mean muon.expert.exchange?"],
        ),
        ("[muon]\nmissing_grad = 'skip'", ["Did you mean muon.expert.on_bad_gradient?"]),
        ("[muon]\nexchang = 'all_gather'", ["Did you mean muon.expert.exchange?"]),
        ("[muon.expert]\nexchang = 'all_gather'", ["Did you mean muon.expert.exchange?", "keep_buffers"]),
        ("[muon.exprt]\nfused = true", ["Did you mean [muon.expert]?"]),
        ("[muon]\nexpert = 3", ["muon.expert = 3", "it takes a table: [muon.expert]"]),
        ("muon = 3", ["muon = 3", "it takes a table: [muon]"]),
        ("[muon.lr]\nx = 1", ["muon.lr = {x = 1}", "a finite number"]),
        ("[training]\nsteps = '3'", ['training.steps = "3"', "an integer"]),
        ("[training]\nsteps = 3.0", ["training.steps = 3.0", "an integer"]),
        ("[training]\nsteps = true", ["training.steps = true", "an integer"]),
        ("[muon]\nlr = 1\nlr = 2\n", [": not valid TOML", "line 3"]),
        ("[muon]\nlr = true", ["muon.lr = true", "a finite number"]),
        ("[muon]\nlr = nan", ["muon.lr = nan", "a finite number"]),
        ("[muon]\nnesterov = 1", ["muon.nesterov = 1", "true or false"]),
        ("[muon]\nlr = 2024-01-01", ["muon.lr = 2024-01-01", "a finite number"]),
        ("[data]\nfiles = 'a'", ['data.files = "a"', "a list, each element a string"]),
        ("[data]\nfiles = ['a', 3]", ["data.files[1] = 3", "a string"]),
        ("[adamw]\nbetas = [0.9]", ["adamw.betas = [0.9]", "a list of 2"]),
        ("[muon]\nns_coefficients = [[1, 2]]", ["muon.ns_coefficients = [[1, 2]]", "a list of 3"]),
        ("[data]\ntokenizer = 'bits'", ['data.tokenizer = "bits"', '"bytes", "bpe", "hf"', 'mean "bytes"?']),
        ("[optimizer.rule]\nmatch = '*'\noptimizer = 'adamw'", ["optimizer.rule = ", "write [[optimizer.rule]]"]),
        ("[optimizer]\nrule = 3", ["optimizer.rule = 3", "a table with the keys match, optimizer, options"]),
        ("[[optimizer.rule]]\nmatch = '*'", ["optimizer.rule[0] = ", "a table that has `optimizer`"]),
        (f"{RULE}'muon'\nlr = 3", ["unknown key optimizer.rule[0].lr = 3", "takes match, optimizer, options"]),
    ],
)
def test_a_mistake_names_file_key_value_and_accepted_values(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path, text)
    message = error_of(lambda: load(path))
    assert message.startswith(f"{path}: ")
    assert message.count(path) == 1
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, "[" * 5000, "9" * 5000, "\udcff"])
def test_a_value_beyond_a_parser_is_a_recipe_error(tmp_path: Path, value: str) -> None:
    """Too deep, too long, or bytes that are not text."""
    path = tmp_path / "run.toml"
    path.write_bytes(f"{RULE}'x'\noptions = {{ a = {value} }}".encode(errors="surrogateescape"))
    assert error_of(lambda: load(path)).startswith(f"{path}: not valid TOML: ")
    assert "cannot be read" in error_of(lambda: load(tmp_path))


def test_the_error_of_a_missing_file_names_a_similar_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "", "llama_muon.toml")
    write(tmp_path, "", "qwen_moe_muon.toml")
    message = error_of(lambda: load(tmp_path / "qwen_mo_muon.toml"))
    assert "no such file" in message
    assert f"Did you mean {tmp_path / 'qwen_moe_muon.toml'}?" in message
    assert "llama" not in message
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "configs/qwen.toml")
    assert "Did you mean configs/qwen.toml?" in error_of(lambda: load("qwen"))
    assert error_of(lambda: load("nothere.toml")).startswith("nothere.toml: no such file. `titan-muon recipes` lists")


# Rules


def test_rule_options_have_the_types_of_the_optimizers_table(tmp_path: Path) -> None:
    text = f"{RULE}'adamw'\noptions = {{lr = 1, betas = [0, 0.5]}}\n{RULE}'mine'\noptions = {{lr = 1, x = [1, 'a']}}"
    first, second = load(write(tmp_path, text)).optimizer.rule
    assert first.options == {"lr": 1.0, "betas": (0.0, 0.5)}
    assert type(first.options["lr"]) is float
    assert second == sections.Rule(match="*", optimizer="mine", options={"lr": 1, "x": (1, "a")})
    assert type(second.options["lr"]) is int


SCHEDULE = "[training]\nsteps = 300\n[lr_scheduler]\nwarmup_steps = 20\n"


@pytest.mark.parametrize(
    ("schedule", "steps", "warmup"),
    [
        ("", 10, 1),
        ("decay_ratio = 1.0", 10, 0),
        ("decay_ratio = 0.9", 100, 6),
        ("decay_ratio = 0.9", 290, 20),
        ("decay_ratio = 0.9", 20, 1),
        ("", 1, 1),
        ("", 20, 20),
        ("", 600, 20),
    ],
)
@pytest.mark.parametrize("by", ["command line", "file"])
def test_fewer_steps_than_in_a_base_or_file_have_a_proportional_warmup(
    tmp_path: Path, by: str, schedule: str, steps: int, warmup: int
) -> None:
    lines: list[str] = []
    file = write(tmp_path, SCHEDULE + schedule, "base.toml")
    words = ["--training.steps", str(steps)]
    if by == "file":
        file, words = write(tmp_path, f"base = 'base.toml'\n[training]\nsteps = {steps}\n"), []
    assert load(file, words, lines.append).lr_scheduler.warmup_steps == warmup
    notice = f"lr_scheduler.warmup_steps = {warmup}: shortened from 20, in proportion to training.steps = {steps} "
    assert lines == ([] if warmup == 20 else [f"{notice}instead of 300"])


def test_a_schedule_beside_its_steps_is_not_changed(tmp_path: Path) -> None:
    write(tmp_path, SCHEDULE, "base.toml")
    own = "base = 'base.toml'\n[training]\nsteps = 24\n[lr_scheduler]\ndecay_ratio = 0.5\n"
    message = error_of(lambda: load(write(tmp_path, own), []))
    assert "a share of training.steps that leaves room for lr_scheduler.warmup_steps" in message
    assert "Here training.steps = 24 (" in message
    write(tmp_path, "[training]\nsteps = 24\n", "base.toml")
    own = "base = 'base.toml'\n[lr_scheduler]\nwarmup_steps = 25\n"
    assert "lr_scheduler.warmup_steps = 25 is not accepted" in error_of(lambda: load(write(tmp_path, own), []))


def test_an_error_of_two_keys_names_the_source_of_both(tmp_path: Path) -> None:
    """The user must not look in the file for a number of the command line."""
    file = write(tmp_path, SCHEDULE)
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


def test_a_schedule_on_the_command_line_is_not_changed(tmp_path: Path) -> None:
    file = write(tmp_path, SCHEDULE)
    for words in (["--lr_scheduler.warmup_steps", "15"], ["--lr_scheduler.total_steps", "12"]):
        assert "lr_scheduler.warmup_steps" in error_of(
            lambda words=words: load(file, ["--training.steps", "10", *words])
        )
    # A run may end in the warm-up of a longer schedule.
    recipe = load(file, ["--training.steps", "10", "--lr_scheduler.total_steps", "300"])
    assert recipe.lr_scheduler.warmup_steps == 20


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


def test_a_resolved_recipe_loads_without_the_base(tmp_path: Path) -> None:
    write(tmp_path, "[muon]\nns_steps = 2\nns_coefficients = [[1, 2, 3], [4, 5, 6]]\n" + RULE + "'muon'", "base.toml")
    recipe = load(write(tmp_path, 'base = "base.toml"\n', "mine.toml"), ["--muon.lr", "0.5", "--debug.seed", "0"])
    again = load(write(tmp_path, to_toml(recipe), "elsewhere/resolved.toml"))
    assert again == recipe
    assert again.name == "mine"
    assert to_toml(again) == to_toml(recipe)


@pytest.mark.parametrize("name", ["llama_muon", "llama_muon.toml"])
def test_a_base_may_be_a_recipe_of_the_package_wherever_the_file_is(tmp_path: Path, name: str) -> None:
    recipe = load(write(tmp_path, f"base = '{name}'\ntraining.steps = 24\n"))
    assert (recipe.model.name, recipe.training.steps) == ("llama3", 24)
