"""Overrides, the flags of train.py, and the help."""

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.recipe_files import RULE, error_of, write
from titan_muon import removed
from titan_muon.trainer.recipe import Recipe, command_line, load, schema, sections, torchtitan_sections
from titan_muon.trainer.recipe.command_line import Command, parse

# Overrides

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
        ("--muon.lr 3e-4", "muon.lr", 3e-4),
        ("--compile.enable", "compile.enable", True),
        ("--checkpoint.enable False", "checkpoint.enable", False),
        ("--compile.components loss", "compile.components", ("loss",)),
        ("--compile.components", "compile.components", ()),
        ("--data.files 'a b' c", "data.files", ("a b", "c")),
        ('--data.files \'["a/*", "b"]\'', "data.files", ("a/*", "b")),
        ("--data.files [ab]*", "data.files", ("[ab]*",)),
        ("--adamw.betas '[0.1, 0]'", "adamw.betas", (0.1, 0.0)),
        ("--adamw.betas 0.1 0", "adamw.betas", (0.1, 0.0)),
        ("--muon.expert.soap_freq 4", "muon.expert.soap_freq", 4),
        ("--muon.ns_coefficients cans", "muon.ns_coefficients", "cans"),
        ("--muon.ns_steps 2 --muon.ns_coefficients '[1, 2, 3]' '[4, 5, 6]'", "muon.ns_coefficients", TWO),
        ("--muon.ns_steps 2 --muon.ns_coefficients '[[1, 2, 3], [4, 5, 6]]'", "muon.ns_coefficients", TWO),
        ("--muon.ns_coefficients '[1, 2, 3]'", "muon.ns_coefficients", ((1.0, 2.0, 3.0),)),
        ("--muon.algorithm normuon muonh", "muon.algorithm", ("normuon", "muonh")),
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
    """Files beside another source are refused."""
    write(tmp_path, f"[data]\n{base}\n", "base.toml")
    path = write(tmp_path, f"base = 'base.toml'\n[data]\n{own}\n")
    if source != "refused":
        assert load(path, words.split()).data.source == source
        return
    message = error_of(lambda: load(path, words.split()))
    assert 'data.files = ["a"] is not accepted' in message
    assert 'Here data.source = "python"' in message


def test_a_recipe_without_a_key_is_refused(tmp_path: Path) -> None:
    """An empty file would train an unrequested default model."""
    message = error_of(lambda: parse(["--config", write(tmp_path, "# later\n")]))
    assert "the recipe has no key; write at least name and flavor under [model]" in message


@pytest.mark.parametrize("brackets", ["%s", "[%s]"])
def test_an_override_may_give_rules_as_inline_tables(tmp_path: Path, brackets: str) -> None:
    word = brackets % '{match = "*", optimizer = "adamw", options = {lr = 1}}'
    recipe = load(write(tmp_path, ""), ["--optimizer.rule", word])
    assert recipe.optimizer.rule == (sections.Rule(match="*", optimizer="adamw", options={"lr": 1.0}),)


MORE = r"""
--muon.lr=-1 | muon.lr = -1.0 is not accepted; it takes 0 or more.
--muon.lr 1e400 | muon.lr = inf is not accepted; it takes a finite number.
--muon.lr '' | muon.lr = "" is not accepted; it takes a finite number.
--muon.lr 1e-3,2e-3 | muon.lr = "1e-3,2e-3" is not accepted; it takes a finite number.
--muon.lr=0.1=0.2 | muon.lr = "0.1=0.2" is not accepted; it takes a finite number.
--muon.momentum 95% | muon.momentum = "95%" is not accepted; it takes a finite number.
--muon.nesterov yes | muon.nesterov = "yes" is not accepted; it takes true or false.
--muon.ns_coefficients 1,2 | muon.ns_coefficients = "1,2" is not accepted; it takes one of "keller_jordan"
--muon.algorithm '' | muon.algorithm = "" is not accepted; it takes a name, or a list of different names.
--muon.state ownr | muon.state = "ownr" is not accepted; it takes one of "replicated", "owner". Did you mean "owner"?
--muon.overlap backward | muon.overlap = "backward" was removed
--muon.expert 3 | unknown key muon.expert = "3". Did you mean [muon.expert]?
--muon.expert.lr 1 | unknown key muon.expert.lr = "1". Did you mean muon.lr?
--muon.lr.x 1 | unknown table [muon.lr]: muon.lr.x = "1". Did you mean [muon]?
--muon | unknown key: muon. Did you mean [muon]?
--muon. | unknown key muon.. Did you mean muon.lr?
-muon.lr 1 | config is given 3 values (
muon.lr 1 | Write --muon.lr for another key.
--adamw.betas 0.9,0.95,0.99 | adamw.betas = ["0.9", "0.95", "0.99"] is not accepted; it takes a list of 2
--adamw.betas [0.9,x] | adamw.betas = ["[0.9,x]"] is not accepted; it takes a list of 2
--adamw.betas 0.9,1.0 | adamw.betas = [0.9, 1.0] is not accepted; it takes a list, each element a number from 0 to les
--training.steps 1e3 | training.steps = 1000.0 is not accepted; it takes an integer.
--training.seq_len 2k | training.seq_len = "2k" is not accepted; it takes an integer.
--training.dtype fp32 | training.dtype = "fp32" is not accepted; it takes one of "float32", "bfloat16".
--training.mixed_precision_param bf16 | Did you mean "bfloat16"?
--lr_scheduler.warmup_steps 2000 | it takes at most the steps of the schedule (lr_scheduler.total_steps, or training.s
--lr_scheduler.total_steps 10 | lr_scheduler.total_steps = 10 is not accepted; it takes training.steps or more, or lef
--data.files a --data.source hf | it takes nothing, unless data.source is "files"; leave out data.source or data.files.
--data.files a b --data.weights 1 | it takes a number for each entry of data.files, or none at all. Here data.files =
--data.files a b --data.weights 0 1 | data.weights = [0.0, 1.0] is not accepted; it takes a list, each element a numbe
--data.files a b --data.weights 0.33333 1 | to 100 with at most 3 decimals.
--data.weights 1 2 | data.weights = [1.0, 2.0] is not accepted; it takes a number for each entry of data.files, or none
--data.files a b --data.weights 1,x | data.weights[1] = "x" is not accepted; it takes a finite number.
--data.files a --data.weights 2 2 | data.weights = [2.0, 2.0] is not accepted; it takes a number for each entry of dat
--data.files a '' | data.files = ["a", ""] is not accepted; it takes a list, each element a string that is not empty.
--data.vocab_size 100 --data.tokenizer bpe | data.vocab_size = 100 is not accepted; it takes 258 or more.
--data.validation_fraction 0 | it takes more than 0, because validator.enable = true.
--data.workers -1 | data.workers = -1 is not accepted; it takes 0 or more.
--data.cache s3://bucket | it takes a folder on a file system, not a URL and without line breaks.
--name a/b | name = "a/b" is not accepted; it takes a name that is not empty and has no slash and no line break.
--name '' | name = "" is not accepted; it takes a name that is not empty and has no slash and no line break.
--name | name is given no value; it takes a string.
--name a b | name is given 2 values (a b); it takes a string.
--dump_folder gs://bucket | it takes a folder on a file system, not a URL and without line breaks.
--checkpoint.folder ../x | checkpoint.folder = "../x" is not accepted; it takes a relative path inside the run's folder.
--checkpoint.load '' | checkpoint.load = "" is not accepted; it takes a string that is not empty.
--checkpoint.load | checkpoint.load is given no value; it takes a string.
--checkpoint.load latest runs | checkpoint.load is given 2 values (latest runs); it takes a string.
--checkpoint.load latest --checkpoint.load_step -2 | checkpoint.load_step = -2 is not accepted; it takes -1, or 0 or
--checkpoint.load latest --checkpoint.exclude_from_loading optimiser | each element one of optimizer, lr_scheduler,
--checkpoint.resume latest | unknown key checkpoint.resume = "latest". Did you mean checkpoint.load?
--checkpoint.keep_latest_k 1 | checkpoint.keep_latest_k = 1 is not accepted; it takes 0, or 2 or more.
--checkpoint.initial_load_path runs/x | it takes an absolute path or a URL.
--checkpoint.initial_load_in_hf | it takes true only with checkpoint.initial_load_path or model.hf_assets_path.
--import '' | imports = [""] is not accepted; it takes a list, each element a string that is not empty.
--imports my_module, | imports = ["my_module", ""] is not accepted; it takes a list, each element a string that is not
--optimizer.rule '{match="*"}' | optimizer.rule[0] = {match = "*"} is not accepted; it takes a table that has `optimiz
--optimizer.rule '[{match="*",optimizer="adamw"}' | it takes a table with the keys match, optimizer, options, as in
--optimizer.rule '{match="*",optimizer="adamw",options={momentum=1}}' | options takes lr, betas, eps, weight_decay,
--placement.rule '{match="*",placement="shard0",owner=1}' | placement.rule = [{match = "*", placement = "shard0", owner
--placement.replicas one | placement.replicas = "one" is not accepted; it takes "one" only with placement.muon = "owned"
--parallelism.tp 2 | unknown key parallelism.tp = "2". Did you mean parallelism.tensor_parallel_degree?
--qk_clip.mode clip --muon.overlap forward | it takes "none" with qk_clip.mode = "clip", which scales weights.
--loss.chunks 3 | it takes "auto", or a divisor of training.seq_len / parallelism.context_parallel_degree.
--activation_checkpoint.mode memory_budget | unless compile.enable = true and compile.components has "model".
--profiler.enable_profiling --profiler.profile_freq 2 | it takes profiler_warmup + profiler_active or more
--epochs 3 | unknown key: epochs = "3". The tables are model, data, training,
--dry-run --compare muon.lr=1,2 muon.lr=3 | muon.lr is set twice; leave out muon.lr=3, or the other values.
--dry-run --compare =1,2 | unknown key:  = "1". The tables are
--dry-run --compare muon.lr=1,2 --full | --compare prints a table only; leave out --full.
--quiet maybe | quiet = "maybe" is not accepted; it takes true or false.
"""
"""Words of a command line, and a part of the error: numbers, lists, mixtures, names, `latest`, imports and others."""


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--muon.momentun=1", ['unknown key muon.momentun = "1"', "Did you mean muon.momentum?"]),
        ("--base x.toml", ["unknown key: base"]),
        ("--muon.lr", ["muon.lr is given no value", "a finite number"]),
        ("--muon.lr 1 2", ["muon.lr is given 2 values (1 2)", "a finite number"]),
        ("--muon.lr 1 --muon.lr fast", ['muon.lr = "fast"', "a finite number"]),
        ("--training.steps 3.5", ["training.steps = 3.5", "an integer"]),
        ("--training.steps true", ['training.steps = "true"', "an integer"]),
        ("--compile.enable 1", ['compile.enable = "1"', "true or false"]),
        ("--data.tokenizer bits", ['data.tokenizer = "bits"', 'Did you mean "bytes"?']),
        ("--adamw.betas 0.9", ['adamw.betas = ["0.9"]', "a list of 2"]),
        ("--adamw.betas 0.9 x", ['adamw.betas[1] = "x"', "a finite number"]),
        ("--optimizer.rule nonsense", ['optimizer.rule[0] = "nonsense"', "a table with the keys match, "]),
        ("--muon.ns_coefficients '[1, 2'", ['muon.ns_coefficients = "[1, 2"', '" or a list']),
        ("--full", ["--full is only for --dry-run"]),
        ("--dry-run false --world-size 2", ["--world-size is only for --dry-run"]),
        ("--quiet --dry-run", ["--quiet is for training"]),
        ("muon.lr=1e-3", ["config is given 2 values", "Write --muon.lr=1e-3 for another key."]),
        ("--help muonn", ["unknown key: muonn. Did you mean [muon]?"]),
        ("-h muon.lrr", ["unknown key muon.lrr. Did you mean muon.lr?"]),
        ("--dry-run --device tpu", ['device = "tpu"', "cpu", "cuda"]),
        ("--dry-run --world-size 0", ["world_size = 0", "1 or more"]),
        ("--dry-run --json", ["json is given no value"]),
        ("--dry-run --html=a.html", ["--html was removed", "--json FILE"]),
        ("--muon.rule normuon", ["unknown key muon.rule", "Did you mean muon.algorithm?"]),
        ("--data.text_key body", ["data.text_key", "it takes its default only, unless data.source"]),
        ("--adamw.betas 0.9,x", ['adamw.betas[1] = "x"', "a finite number"]),
        ("--dry-run --machine h200", ['machine.name = "h200"']),
        ("--dry-run --compare placement.moun=owned", ["unknown key placement.moun", "Did you mean"]),
        ("--dry-run --compare placement.muon", ["write KEY=VALUE,VALUE"]),
        ("--dry-run --compare muon.lr=1 --json a", ["--compare prints a table only; leave out --json"]),
        ("--dry-run --suggest --world-size=8", ["--suggest was removed", "--compare KEY=A,B"]),
        ("--wordl-size=3", ['unknown key: wordl_size = "3".', "Did you mean world_size?"]),
        ("--muon.lrr 3", ["unknown key muon.lrr", "Did you mean muon.lr?"]),
        ("--lr 3", ["Did you mean muon.lr?"]),
        ("--tp 2", ["Did you mean parallelism.tensor_parallel_degree?"]),
        ("--machine.tflops 9", ["machine.tflops was removed", "name it in machine.file"]),
        ("--completion bash", ["--completion was removed"]),
        ("--muon.beta1 0.9", ["Did you mean muon.momentum?"]),
        ("--training.batch_size 4", ["Did you mean training.global_batch_size?"]),
        ("--training.learning_rate 1", ["Did you mean muon.lr?"]),
        ("--seed 1", ["Did you mean debug.seed?"]),
        *((words, [error]) for words, error in (row.split(" | ") for row in MORE.strip().splitlines())),
    ],
)
def test_a_bad_command_is_a_recipe_error_without_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, parts: list[str]
) -> None:
    message = error_of(lambda: parse(["--config", write(tmp_path, "muon.lr = 0.1"), *shlex.split(words)]))
    assert message.startswith("command line: ")
    assert [part for part in parts if part not in message] == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("key", removed.OPTIONS)
def test_a_removed_key_is_refused_with_what_to_do(tmp_path: Path, key: str) -> None:
    message = error_of(lambda: parse(["--config", write(tmp_path, "muon.lr = 0.1"), f"--{key}", "7"]))
    assert message.removesuffix(".") == f"command line: {key} {removed.OPTIONS[key].problem.removesuffix('.')}"


# The command line


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


def test_a_command_without_a_recipe_is_an_error() -> None:
    assert "--config FILE is missing" in error_of(lambda: parse(["--dry-run"]))
    message = error_of(lambda: parse(["my/run.toml", "--dry-run"]))
    assert message.startswith("command line: 'my/run.toml' belongs to no flag")
    assert message.endswith("Name a recipe by --config my/run.toml.")


def test_a_recipe_of_this_package_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(Path(__file__).parents[4] / "configs" / "qwen_moe_muon.toml")
    assert parse(["--config", "qwen_moe_muon"]).config == parse(["--config=qwen_moe_muon.toml"]).config == path
    write(tmp_path, "name = 'own'", "qwen_moe_muon")
    assert parse(["--config", "qwen_moe_muon"]).recipe.name == "own"


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 0
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
    for module in (sections, torchtitan_sections, command_line):
        source = inspect.getsource(module)
        assert [line for line in re.findall(r"^ *# (.+)$", source, re.MULTILINE) if line in text] == []


@pytest.mark.parametrize("words", [["--help", "muon"], ["--help", "muon.lr"], ["-h", "all"]])
def test_help_shows_the_recipes_values_of_all_tables_or_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """All of the help is 600 lines."""
    text = help_of(["--config", write(tmp_path, "[muon]\nns_steps = 17\n" + RULE + "'muon'"), *words], capsys)
    assert "Newton-Schulz iterations. (default: 17)" in text
    assert ("--adamw.lr" in text) == ("all" in words)
    assert "not accepted" in error_of(lambda: parse(["--config", write(tmp_path, "[muon]\nlr = -1"), "--help"]))


def test_the_short_help_fits_a_screen_and_shows_the_recipes_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--config", write(tmp_path, "[muon]\nns_steps = 17\n"), "--help"])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 80
    assert max(map(len, shown)) <= 120
    named = [line.split()[0].removeprefix("--") for line in shown if line.startswith("  --") and "." in line.split()[0]]
    assert len(named) <= 60
    assert set(named) <= set(schema.keys(Recipe))
    assert re.search(r"--muon\.ns_steps +17$", "\n".join(shown), re.MULTILINE)
    assert f"all {len(schema.keys(Recipe))} keys" in "\n".join(shown)
    assert "with their values in this recipe:" in "\n".join(shown)
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert "A list is written `1,2` or `1 2`. The most used keys, with their defaults:" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--muon.expert.algorithm_options", "{mine = {share = 0.1}}", "--import=my_module"], ""),
        (
            ["--muon.expert.algorithm_options", "{mine = {shar = 0.1}}", "--import=my_module"],
            "error: muon.expert.algorithm_options.mine.shar is unknown; leave it out: the algorithm takes share",
        ),
        (
            ["--import", "no_module"],
            "error: imports: there is no module 'no_module'; install it, or start in the folder of",
        ),
    ],
)
def test_an_algorithm_of_an_imported_module_is_planned(tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "my_module.py").write_text(MODULE)
    train = [sys.executable, str(Path(__file__).parents[4] / "train.py"), "--config", "qwen_moe_muon", "--dry-run"]
    command = [*train, "--world-size=2", "--device=cpu", "--muon.algorithm=mine", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, said in done.stderr) == (2 if said else 0, True), done.stderr[-500:]


def test_every_suggestion_by_meaning_is_a_key() -> None:
    known = set(schema.keys(Recipe))
    assert set(schema.MEANT.values()) <= known


def test_a_command_line_is_read_without_torch() -> None:
    imported = "import sys, titan_muon.trainer.recipe.command_line"
    code = f"{imported}; sys.exit('torch' in sys.modules or 'torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
