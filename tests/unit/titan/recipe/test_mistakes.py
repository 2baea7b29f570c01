"""One table: mistakes in a recipe. A row is a line: what a user writes, in a file or as words, and parts of the error.

docs/compatibility.md has every relation of keys, and a test of the page tries them.
"""

import importlib.metadata
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

from tests.unit.recipe_files import KEYS, error_of, write
from titan_muon import removed
from titan_muon.options import OptionError
from titan_muon.trainer.recipe import Recipe, degrees, load, recipe_error, schema
from titan_muon.trainer.recipe.command_line import parse
from titan_muon.trainer.recipe.toml import Entry, Words

FILE = r"""
muon.momentun = 0.9 | unknown key muon.momentun = 0.9. Did you mean muon.momentum? | ns_steps
muon.learning_rate = 1 | unknown key muon.learning_rate | Did you mean muon.lr?
training.lr = 0.9 | unknown key training.lr | Did you mean muon.lr? | seq_len
optimiser.clip = 1 | unknown table [optimiser] | Did you mean [optimizer]? | adamw
[optimiser] | unknown table [optimiser] | Did you mean [optimizer]?
steps = 3 | unknown key: steps = 3. Did you mean training.steps?
muon.exchange = 'all_gather' | unknown key muon.exchange = "all_gather". Did you mean muon.expert.exchange?
muon.missing_grad = 'skip' | Did you mean muon.expert.on_bad_gradient?
muon.expert.exchang = 'all_gather' | Did you mean muon.expert.exchange? | keep_buffers
muon.exprt.fused = true | Did you mean [muon.expert]?
muon.expert = 3 | muon.expert = 3 is not accepted; it takes a table: [muon.expert]
muon = 3 | muon = 3 is not accepted; it takes a table: [muon]
muon.lr.x = 1 | muon.lr = {x = 1} | a finite number
muon.lr = 1; muon.lr = 2 | : not valid TOML: | end of document
muon.lr = true | muon.lr = true | a finite number
muon.lr = nan | muon.lr = nan | a finite number
muon.nesterov = 1 | muon.nesterov = 1 | true or false
muon.ns_coefficients = [[1, 2]] | muon.ns_coefficients = [[1, 2]] | a list of 3
muon.ns_coefficients = 'polar_expres' | = "polar_expres" is not | Did you mean "polar_express"?
training.steps = 3.0 | training.steps = 3.0 | an integer
training.steps = true | training.steps = true | an integer
data.files = 'a' | data.files = "a" | a list, each element a string
data.files = ['a', 3] | data.files[1] = 3 | a string
data.tokenizer = 'bits' | data.tokenizer = "bits" | "bytes", "bpe", "hf" | mean "bytes"?
adamw.betas = [0.9] | adamw.betas = [0.9] | a list of 2
optimizer.rule = {match = '*'} | optimizer.rule = {match = "*"} | write [[optimizer.rule]]
optimizer.rule = 3 | optimizer.rule = 3 | a table with the keys match, optimizer, options
optimizer.rule = [{match = '*'}] | optimizer.rule[0] = | a table that has `optimizer`
optimizer.rule = [{match = '*', optimizer = 'muon', lr = 3}] | rule[0].lr = 3 | takes match, optimizer, options
optimizer.rule = [{match = '', optimizer = 'adamw'}] | optimizer.rule[0].match = "" | not empty
optimizer.rule = [{match = '*', optimizer = 'muon', options = {lr = -1}}] | rule[0].options.lr = -1.0 | 0 or more
optimizer.rule = [{match = '*', optimizer = 'adamw', options = {lr = 'x'}}] | rule[0].options.lr = "x" | a finite number
optimizer.rule = [{match = '*', optimizer = 'muon', options = {expert = {x = 1}}}] | options.expert | write its keys
optimizer.rule = [{match = '*', optimizer = 'mine', options = {x = 2024-01-01}}] | options.x = 2024-01-01 | a string
placement.tp_pieces = 'whole' | placement.tp_pieces was removed | leave it out, and each rank keeps its piece
placement.rule = [{match = '*', placement = 'each'}] | placement.rule[0].placement = "each" | "shard0"
placement.rule = [{match = '*', placement = 'owned', owner = 'first'}] | "first" | an integer or one of "balanced"
placement.rule = [{match = '*', placement = 'owned', owner = -1}] | placement.rule[0].owner = -1 | 0 or more
"""
"""A semicolon ends a line of the file."""

COMMAND = r"""
--muon.momentun=1 | unknown key muon.momentun = "1". Did you mean muon.momentum?
--muon.lr | muon.lr is given no value; it takes a finite number.
--muon.lr 1 2 | muon.lr is given 2 values (1 2); it takes a finite number.
--muon.lr 1 --muon.lr fast | muon.lr = "fast" is not accepted; it takes a finite number.
--muon.lr=-1 | muon.lr = -1.0 is not accepted; it takes 0 or more.
--muon.lr 1e400 | muon.lr = inf is not accepted; it takes a finite number.
--muon.lr 1e-3,2e-3 | muon.lr = "1e-3,2e-3" is not accepted; it takes a finite number.
--muon.ns_coefficients 1,2 | muon.ns_coefficients = "1,2" is not accepted; it takes one of "keller_jordan"
--muon.state ownr | muon.state = "ownr" is not accepted; it takes one of "replicated", "owner". Did you mean "owner"?
--muon.overlap backward | muon.overlap = "backward" was removed
--muon.expert 3 | unknown key muon.expert = "3". Did you mean [muon.expert]?
--muon.lr.x 1 | unknown table [muon.lr]: muon.lr.x = "1". Did you mean [muon]?
--muon | unknown key: muon. Did you mean [muon]?
--muon. | unknown key muon.. Did you mean muon.lr?
--muon.beta1 0.9 | Did you mean muon.momentum?
--lr 3 | Did you mean muon.lr?
--tp 2 | Did you mean parallelism.tensor_parallel_degree?
--muon.rule normuon | unknown key muon.rule | Did you mean muon.algorithm?
--epochs 3 | unknown key: epochs = "3". The tables are model, data, training,
--wordl-size=3 | unknown key: wordl_size = "3". Did you mean world_size?
--base x.toml | unknown key: base
muon.lr=1e-3 | config is given 2 values | Write --muon.lr=1e-3 for another key.
-muon.lr 1 | config is given 3 values ( | Write --muon.lr for another key.
--training.steps 3.5 | training.steps = 3.5 | an integer
--compile.enable 1 | compile.enable = "1" | true or false
--adamw.betas 0.9 | adamw.betas = ["0.9"] | a list of 2
--adamw.betas 0.9 x | adamw.betas[1] = "x" | a finite number
--adamw.betas [0.9,x] | adamw.betas = ["[0.9,x]"] is not accepted; it takes a list of 2
--adamw.betas 0.9,1.0 | adamw.betas = [0.9, 1.0] | a list, each element a number from 0 to less than 1
--data.files a '' | data.files = ["a", ""] is not accepted; it takes a list, each element a string that is not empty.
--data.files a b --data.weights 0.33333 1 | to 100 with at most 3 decimals.
--data.files a --data.weights 2 2 | data.weights = [2.0, 2.0] is not accepted; it takes a number for each entry of dat
--data.vocab_size 100 --data.tokenizer bpe | data.vocab_size = 100 is not accepted; it takes 258 or more.
--import '' | imports = [""] is not accepted; it takes a list, each element a string that is not empty.
--optimizer.rule nonsense | optimizer.rule[0] = "nonsense" | a table with the keys match, optimizer, options, as in
--optimizer.rule '{match="*",optimizer="adamw",options={momentum=1}}' | options takes lr, betas, eps, weight_decay,
--full | --full is only for --dry-run
--dry-run false --world-size 2 | --world-size is only for --dry-run
--quiet --dry-run | --quiet is for training
--dry-run --device tpu | device = "tpu" | cpu | cuda
--dry-run --json | json is given no value
--dry-run --html=a.html | --html was removed | --json FILE
--dry-run --machine h200 | machine.name = "h200"
--dry-run --compare placement.moun=owned | unknown key placement.moun | Did you mean
--dry-run --compare placement.muon | write KEY=VALUE,VALUE
--dry-run --compare muon.lr=1 --json a | --compare prints a table only; leave out --json
--dry-run --compare muon.lr=1,2 muon.lr=3 | muon.lr is set twice; leave out muon.lr=3, or the other values.
--help muonn | unknown key: muonn. Did you mean [muon]?
-h muon.lrr | unknown key muon.lrr. Did you mean muon.lr?
"""


def rows(table: str) -> list[tuple[str, list[str]]]:
    return [(text, parts) for text, *parts in (line.split(" | ") for line in table.strip().splitlines())]


@pytest.mark.parametrize(("text", "parts"), rows(FILE))
def test_a_mistake_in_a_file_is_an_error_of_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path, text.replace("; ", "\n"))
    message = error_of(lambda: load(path))
    assert message.startswith(f"{path}: ")
    assert message.count(path) == 1
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(("words", "parts"), rows(COMMAND))
def test_a_mistake_on_the_command_line_is_an_error_without_output(
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


# A key of each kind of range: refused values, accepted values, the text.
RANGES: Mapping[str, tuple[tuple[object, ...], tuple[object, ...], str]] = {
    "training.steps": ((0, -1), (1,), "1 or more"),
    "muon.lr": ((-1,), (0,), "0 or more"),
    "training.max_norm": ((0.0, -1.0), (0.5,), "more than 0"),
    "training.local_batch_size": ((0, -2), (1,), "-1, or 1 or more"),
    "checkpoint.keep_latest_k": ((1, -1), (0, 2), "0, or 2 or more"),
    "data.validation_fraction": ((1.0, -0.1), (0.5,), "a number from 0 to less than 1"),
    "qk_clip.alpha": ((1.1, -0.1), (0.0, 1.0), "a number from 0 to 1"),
    "adamw.betas": (([0.9, 1.0], [-0.1, 0.9]), ([0.0, 0.5],), "a list, each element a number from 0 to less than 1"),
    "model.name": (("", " "), ("x",), "a string that is not empty"),
    "name": (("", "a/b", "..", "a\nb"), ("a b",), "a name that is not empty and has no slash and no line break"),
    "dump_folder": (("", "gs://bucket", "a\nb"), ("/a/b",), "a folder on a file system, not a URL"),
    "checkpoint.folder": (("", ".", "../../x", "a/../..", "/tmp/x", "~/x", "gs://x"), ("a/b",), "a relative path"),
    "checkpoint.initial_load_path": (("a",), ("/a", "gs://a"), "an absolute path or a URL"),
    "compile.components": ((["x"],), (["loss"],), "a list, each element one of model, loss"),
    "loss.chunks": ((0,), ("auto", 1), '"auto" or 1 or more'),
    "muon.expert.buffer_gib": ((0.0,), ("auto", 0.5), '"auto" or more than 0'),
    "muon.ns_coefficients": (([],), ("cans", [[1.0, 2.0, 3.0]]), "or a list that is not empty"),
}


@pytest.mark.parametrize("key", RANGES)
def test_a_value_out_of_range_is_refused(tmp_path: Path, key: str) -> None:
    refused, taken, accepted = RANGES[key]
    for value in refused:
        message = error_of(lambda value=value: load(write(tmp_path, f"{key} = {schema.value_text(value)}")))
        assert f"run.toml: {key} = " in message
        assert accepted in message.split("; it takes ")[1]
    for value in taken:
        load(write(tmp_path, f"{key} = {schema.value_text(value)}"))


def test_every_number_has_a_range() -> None:
    numbers = {float, int, int | None, float | None, float | Literal["auto"], int | Literal["auto"]}
    kinds, ranged = schema.keys(Recipe), schema.keys(Recipe, ranges=True)
    assert [key for key, kind in kinds.items() if kind in numbers and kind == ranged[key]] == []


@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, "[" * 5000, "9" * 5000, "\udcff"])
def test_a_value_beyond_a_parser_is_a_recipe_error(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(f"muon.lr = {value}".encode(errors="surrogateescape"))
    assert error_of(lambda: load(path)).startswith(f"{path}: not valid TOML: ")
    assert "cannot be read" in error_of(lambda: load(tmp_path))


def test_the_error_of_a_missing_file_names_a_similar_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "", "llama_muon.toml")
    write(tmp_path, "", "qwen_moe_muon.toml")
    message = error_of(lambda: load(tmp_path / "qwen_mo_muon.toml"))
    assert f"no such file. Did you mean {tmp_path / 'qwen_moe_muon.toml'}?" in message
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "configs/qwen.toml")
    assert "Did you mean configs/qwen.toml?" in error_of(lambda: load("qwen"))
    assert error_of(lambda: load("nothere.toml")).startswith("nothere.toml: no such file. `titan-muon recipes` lists")


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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--dry-run", "command line: --config FILE is missing"),
        ("my/run.toml", "command line: 'my/run.toml' belongs to no flag; .* Name a recipe by --config my/run.toml."),
        ("--config EMPTY", ".*the recipe has no key; write at least name and flavor under .model."),
    ],
)
def test_a_command_without_a_recipe_is_refused(tmp_path: Path, words: str, text: str) -> None:
    """An empty file would train an unrequested default model."""
    assert re.match(text, error_of(lambda: parse(words.replace("EMPTY", write(tmp_path, "# later\n")).split())))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OptionError("ns_steps", "= 0 is not accepted; it takes 1 or more"), "muon.ns_steps = 0 is not accepted; it "),
        (OptionError("buffer_gib", "= 1 is too small: 5 matrices take at least 1.5 GiB"), "muon.expert.buffer_gib ="),
        (ValueError("muon.split: nothing matches"), "muon.split: nothing matches"),
    ],
)
def test_errors_of_the_library_name_the_recipes_key(error: ValueError, message: str) -> None:
    assert str(recipe_error(error)).startswith(message)


# Degrees, batch and length against the number of ranks, and values that need a newer torch


def recipe(keys: str) -> Recipe:
    """The default recipe with other values, as in `tp=2 length=6`, or with full keys."""
    pairs = [word.split("=") for word in keys.split()]
    return schema.build(Recipe, {KEYS.get(key, key): Entry(Words((value,)), "test") for key, value in pairs})


LAYOUTS = [
    # Keys, ranks, and a part of the error.
    ("", 1, ""),
    ("tp=2 hsdp=2", 8, ""),
    ("tp=2 ep=8", 8, ""),
    ("shard=1", 2, "data_parallel_shard_degree 1 takes 1 process, and this is 2 processes"),
    (
        "hsdp=2 shard=2 cp=2",
        4,
        "takes 8 processes, and this is 4 processes. Start 8 by `torchrun --nproc-per-node=8 train.py ...`, plan them "
        "by --dry-run --world-size 8, or set data_parallel_shard_degree = 1 (or -1); or change the degrees.",
    ),
    ("tp=3", 4, "tensor_parallel_degree 3 takes a multiple of 3 processes, and this is 4"),
    ("ep=3", 1, "expert_parallel_degree = 3 is not accepted on 1 rank; it takes a divisor of"),
    ("hsdp=2 ep=4", 4, "tensor = 2 x 1 x 1 = 2."),
    ("local=4 batch=16", 4, ""),
    ("local=4 batch=16", 8, "local_batch_size x data-parallel ranks = 4 x 8 = 32. training.local_batch_size = 2 (or"),
    ("local=4 batch=16 hsdp=2 tp=2", 8, ""),
    ("local=4 batch=16 hsdp=2 tp=2", 16, "training.global_batch_size = 16 is not accepted on 16 ranks; it takes"),
    ("local=-1 batch=8", 3, "training.global_batch_size = 8 is not accepted on 3 ranks; it takes a multiple of the 3"),
    ("local=-1 batch=8 pp=2 microbatch=3", 4, "microbatch_size = 3 is not accepted; it takes a divisor of the 4 sequ"),
    ("tp=4 length=12", 4, ""),
    ("tp=4 length=14", 4, "training.seq_len = 14 is not a multiple of 4, which parallelism.tensor_parallel_degree = 4"),
    ("cp=2 length=256", 4, ""),
    ("cp=2 length=384", 4, "not a multiple of 256"),
    ("tp=2 cp=2 length=256", 4, ""),
    ("tp=3 cp=2 length=256", 6, "not a multiple of 768"),
    ("tp=2 sequence_parallel=false length=3", 4, ""),
]


@pytest.mark.parametrize(("keys", "world_size", "problem"), LAYOUTS)
def test_degrees_are_accepted_or_refused(
    keys: str, world_size: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(degrees, "TORCH_NEEDS", ())
    if problem:
        assert problem in error_of(lambda: degrees.check_degrees(recipe(keys), world_size))
    else:
        degrees.check_degrees(recipe(keys), world_size)


def test_a_local_batch_of_minus_one_is_a_share_of_the_global_batch() -> None:
    assert [degrees.local_batch_size(recipe("local=-1 batch=8"), world) for world in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert degrees.local_batch_size(recipe("local=-1 batch=8 tp=2"), 2) == 8


@pytest.mark.parametrize("need", degrees.TORCH_NEEDS, ids=lambda need: need.key)
def test_a_value_that_needs_a_newer_torch_is_refused_with_a_remedy_that_works(
    monkeypatch: pytest.MonkeyPatch, need: degrees.TorchNeed
) -> None:
    def check(version: str, value: object) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        degrees.check_degrees(recipe(f"{need.key}={value}"), 4)

    (major, minor), value = need.torch, 2 if 1 in need.older else "spmd_types"
    for version in (f"{major}.{minor}.0", f"{major}.{minor}.0.dev20260101", f"{major}.{minor + 1}.0+cu130", "3.0.0"):
        check(version, value)
    for version in (f"{major}.{minor - 1}.0+cpu", "2.9.1"):
        message = error_of(lambda version=version: check(version, value))
        assert f"{need.key} = {schema.value_text(value)} is not accepted" in message
        assert f"needs torch {major}.{minor} or newer, and torch {version} is installed" in message
        remedy = tomllib.loads(f"value = {message.rpartition('set it to ')[2].removesuffix('.')}")["value"]
        check(version, remedy)
