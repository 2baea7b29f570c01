"""Recipe files and the command line: accepted values, bases, sources of keys, writing, flags and the help."""

import inspect
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.recipe_files import RULE, error_of, write
from titan_muon.trainer.recipe import Recipe, RecipeError, command_line, load, schema, sections, to_toml
from titan_muon.trainer.recipe.command_line import Command, parse
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


# The command line: overrides, flags and the help

TWO = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--parallelism.tensor_parallel_degree 2", "parallelism.tensor_parallel_degree", 2),
        ("--parallelism.tensor-parallel-degree 2", "parallelism.tensor_parallel_degree", 2),
        ("--training.steps=3", "training.steps", 3),
        ("--training.steps 3 --training.steps 4", "training.steps", 4),
        ("--training.global_batch_size -1", "training.global_batch_size", -1),
        ("--muon.lr .5", "muon.lr", 0.5),
        ("--compile.enable", "compile.enable", True),
        ("--checkpoint.enable False", "checkpoint.enable", False),
        ("--compile.components", "compile.components", ()),
        ("--data.files 'a b' c", "data.files", ("a b", "c")),
        ('--data.files \'["a/*", "b"]\'', "data.files", ("a/*", "b")),
        ("--data.files [ab]*", "data.files", ("[ab]*",)),
        ("--adamw.betas '[0.1, 0]'", "adamw.betas", (0.1, 0.0)),
        ("--muon.expert.soap_freq 4", "muon.expert.soap_freq", 4),
        ("--muon.ns_coefficients cans", "muon.ns_coefficients", "cans"),
        ("--muon.ns_steps 2 --muon.ns_coefficients '[1, 2, 3]' '[4, 5, 6]'", "muon.ns_coefficients", TWO),
        ("--muon.ns_steps 2 --muon.ns_coefficients '[[1, 2, 3], [4, 5, 6]]'", "muon.ns_coefficients", TWO),
        ('--muon.algorithm \'["normuon", "muonh"]\'', "muon.algorithm", ("normuon", "muonh")),
        ("--muon.algorithm normuon,muonh", "muon.algorithm", ("normuon", "muonh")),
        ("--muon.ns_steps=2 --muon.ns_coefficients 1,2,3 4,5,6", "muon.ns_coefficients", TWO),
        ("--adamw.betas 0.1,0", "adamw.betas", (0.1, 0.0)),
        ("--data.files a/*.txt,b", "data.files", ("a/*.txt", "b")),
        ("--data.files memory://{a,b}.txt", "data.files", ("memory://{a,b}.txt",)),
        ("--model.flavor 8", "model.flavor", "8"),
    ],
)
def test_an_override_wins_over_the_file(tmp_path: Path, words: str, key: str, value: object) -> None:
    path = write(
        tmp_path,
        "name = 'x'\n[training]\nsteps = 100\nglobal_batch_size = 16\n"
        "[muon]\nlr = 0.7\n[compile]\ncomponents = ['model']\n",
    )
    recipe = load(path, shlex.split(words))
    read_value = schema.values(recipe)[key]
    assert read_value == value
    assert type(read_value) is type(value)
    alone = schema.values(load(path))
    differing = [name for name, other in schema.values(recipe).items() if other != alone[name]]
    assert differing in ([key], ["muon.ns_steps", key], ["data.source", key])


@pytest.mark.parametrize(
    ("base", "own", "words", "source"),
    [
        ("", "files = ['a']", "", "files"),
        ("source = 'python'", "files = ['a']", "", "files"),
        ("", "source = 'hf'\ntokenizer = 'hf'\ntokenizer_path = 'x'", "--data.files my/*.txt", "files"),
        ("", "files = ['a']", "--data.files --data.source python", "python"),
        ("", "tokenizer = 'hf'\ntokenizer_path = 'x'", "--data.dataset c4_test", "hf"),
        ("", "files = ['a']", "--data.source python", "refused"),
        ("files = ['a']", "source = 'python'", "", "refused"),
    ],
)
def test_data_is_read_from_the_source_given_last(tmp_path: Path, base: str, own: str, words: str, source: str) -> None:
    write(tmp_path, f"[data]\n{base}\n", "base.toml")
    path = write(tmp_path, f"base = 'base.toml'\n[data]\n{own}\n")
    if source != "refused":
        assert load(path, words.split()).data.source == source
        return
    message = error_of(lambda: load(path, words.split()))
    assert 'data.files = ["a"] is not accepted' in message
    assert 'Here data.source = "python"' in message


@pytest.mark.parametrize("brackets", ["%s", "[%s]"])
def test_an_override_may_give_rules_as_inline_tables(tmp_path: Path, brackets: str) -> None:
    word = brackets % '{match = "*", optimizer = "adamw", options = {lr = 1}}'
    recipe = load(write(tmp_path, ""), ["--optimizer.rule", word])
    assert recipe.optimizer.rule == (sections.Rule(match="*", optimizer="adamw", options={"lr": 1.0}),)


def test_the_command_line_names_the_recipe_and_the_action(tmp_path: Path) -> None:
    path = write(tmp_path, "[muon]\nlr = 0.5")
    plain = parse(["--config", path, "--muon.momentum", "0.1"])
    assert plain == Command(
        config=path, recipe=load(path, ["--muon.momentum", "0.1"]), typed=("muon.momentum",), sources=plain.sources
    )
    assert plain.sources == {"muon.lr": path, "muon.momentum": "command line"}
    flags = ["--dry-run", "--full", "--world-size", "8", "--device=cpu", "--json", "plan.json", "--training.steps", "3"]
    assert parse([*flags, f"--config={path}"]) == Command(
        config=path,
        recipe=load(path, ["--training.steps", "3"]),
        dry_run=True,
        full=True,
        world_size=8,
        device="cpu",
        json="plan.json",
        typed=("training.steps",),
        sources={"muon.lr": path, "training.steps": "command line"},
    )
    assert parse(["--config", path, "--dry_run"]).dry_run


def test_a_recipe_of_this_package_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(Path(__file__).parents[4] / "configs" / "qwen_moe_muon.toml")
    assert parse(["--config", "qwen_moe_muon"]).config == parse(["--config=qwen_moe_muon.toml"]).config == path
    write(tmp_path, "name = 'own'", "qwen_moe_muon")
    assert parse(["--config", "qwen_moe_muon"]).recipe.name == "own"


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert not exit_.value.code
    lines = capsys.readouterr().out.splitlines()
    return " ".join(" ".join(line.strip("│ ") for line in lines).split())


def test_help_lists_every_key_with_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    """tyro would show the comment above a field without a docstring."""
    text = help_of(["--help", "all"], capsys)
    assert [key for key in schema.keys(Recipe) if f"--{key} " not in text] == []
    assert "--muon.ns_steps an integer Newton-Schulz iterations. (default: 5)" in text
    assert '--data.tokenizer one of "bytes", "bpe", "hf"' in text
    assert "--lr_scheduler.decay_ratio a finite number Share of decay steps at the end" in text
    assert "--machine.file a string" in text
    assert "--world_size an integer With dry_run: number of ranks" in text
    assert "The model to train." in text
    for module in (sections, sections.titan, command_line):
        source = inspect.getsource(module)
        assert [line for line in re.findall(r"^ *# (.+)$", source, re.MULTILINE) if line in text] == []


def test_the_short_help_fits_a_screen_and_the_help_of_a_table_shows_the_recipes_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the help is 600 lines."""
    file = write(tmp_path, "[muon]\nns_steps = 17\n" + RULE + "'muon'")
    for words in (["--help", "muon"], ["--help", "muon.lr"], ["-h", "all"]):
        text = help_of(["--config", file, *words], capsys)
        assert "Newton-Schulz iterations. (default: 17)" in text
        assert ("--adamw.lr" in text) == ("all" in words)
    with pytest.raises(SystemExit):
        parse(["--config", file, "--help"])
    text = capsys.readouterr().out
    shown, known = text.splitlines(), set(schema.keys(Recipe))
    assert (len(shown) <= 80, max(map(len, shown)) <= 120) == (True, True)
    named = [line.split()[0].removeprefix("--") for line in shown if line.startswith("  --") and "." in line.split()[0]]
    assert {*named, *schema.MEANT.values()} <= known
    assert re.search(r"--muon\.ns_steps +17$", text, re.MULTILINE)
    assert f"all {len(known)} keys" in text
    assert "with their values in this recipe:" in text
    assert "A list is written `1,2` or `1 2`. The most used keys, with their defaults:" in help_of(["--help"], capsys)
    assert "not accepted" in error_of(lambda: parse(["--config", write(tmp_path, "[muon]\nlr = -1"), "--help"]))


MODULE = """
from dataclasses import dataclass
from titan_muon import registry
from titan_muon.engine.step.muon import MuonAlgorithm

@dataclass(frozen=True)
class Own:
    share: float = 0.5

class Mine(MuonAlgorithm):
    Options = Own

registry.algorithms.register("mine", Mine)
"""


def test_an_algorithm_of_an_imported_module_is_planned(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(MODULE)
    train = [sys.executable, str(Path(__file__).parents[4] / "train.py"), "--config", "qwen_moe_muon", "--dry-run"]
    flags = ["--muon.algorithm=mine", "--muon.expert.algorithm_options", "{mine = {share = 0.1}}", "--import=my_module"]
    command = [*train, "--world-size=2", "--device=cpu", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_a_command_line_is_read_without_torch() -> None:
    imported = "import sys, titan_muon.trainer.recipe.command_line"
    code = f"{imported}; sys.exit('torch' in sys.modules or 'torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
