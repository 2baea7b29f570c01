"""Refusals beyond types: ranges of values, relations between keys, and degrees."""

import importlib.metadata
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

from tests.unit.recipe_files import RULE, error_of, write
from titan_muon.options import OptionError
from titan_muon.trainer.recipe import Recipe, degrees, load, recipe_error, schema
from titan_muon.trainer.recipe.toml import Entry, Words

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
    "checkpoint.folder": (
        ("", ".", "../../x", "a/../..", "/tmp/x", "~/x", "gs://x"),
        ("a/b",),
        "a relative path insid",
    ),
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


PLACED = "[[placement.rule]]\nmatch = '*'\nplacement = "
REFUSED = [
    # docs/compatibility.md has every relation of keys, and a test of the page tries them.
    ("placement.tp_pieces = 'whole'", "placement.tp_pieces was removed", "leave it out, and each rank keeps its piece"),
    ("data.tokenizer = 'hf'", "data.tokenizer_path is missing", 'because data.tokenizer = "hf"'),
    ("data.token_marks = [0]", "data.token_marks = [0]", 'its default only, unless data.source is "files"'),
    ("muon.expert.exchange = 'gather'", 'muon.expert.exchange = "gather"', 'one of "all_to_all", "two_hops"'),
    ("muon.ns_coefficients = 'polar_expres'", '= "polar_expres" is not', 'Did you mean "polar_express"?'),
    # Rules.
    (f"placement.muon = 'x'\n{PLACED}'owned'", "placement.rule = [", 'none, unless placement.muon is "shard0" or'),
    (f"{PLACED}'each'", 'placement.rule[0].placement = "each"', '"shard0"'),
    (f"{PLACED}'owned'\nowner = 'first'", 'placement.rule[0].owner = "first"', 'an integer or one of "balanced"'),
    (f"{PLACED}'owned'\nowner = -1", "placement.rule[0].owner = -1", "0 or more"),
    ("[[optimizer.rule]]\nmatch = ''\noptimizer = 'adamw'", 'optimizer.rule[0].match = ""', "not empty"),
    (f"{RULE}'muon'\noptions = {{lr = -1}}", "optimizer.rule[0].options.lr = -1.0", "0 or more"),
    (f"{RULE}'adamw'\noptions = {{lr = 'x'}}", 'optimizer.rule[0].options.lr = "x"', "a finite number"),
    (f"{RULE}'muon'\noptions = {{expert = {{x = 1}}}}", "optimizer.rule[0].options.expert", "write its keys under"),
    (f"{RULE}'mine'\noptions = {{x = 2024-01-01}}", "optimizer.rule[0].options.x = 2024-01-01", "a string"),
]


@pytest.mark.parametrize(("text", "fault", "accepted"), REFUSED)
def test_a_value_that_does_not_fit_is_refused(tmp_path: Path, text: str, fault: str, accepted: str) -> None:
    message = error_of(lambda: load(write(tmp_path, text)))
    assert "run.toml: " in message
    assert fault in message
    assert accepted in message


def test_values_at_the_limits_of_relations_are_accepted(tmp_path: Path) -> None:
    limits = """
        data.validation_fraction = 0
        validator.enable = false
        lr_scheduler = {warmup_steps = 500, decay_ratio = 0.5, total_steps = 1000}
        loss.chunks = 2048
        """
    assert load(write(tmp_path, limits)).lr_scheduler.decay_ratio == 0.5


# Refusals of the library


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


# Degrees


KEYS = {
    "replicate": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "microbatch": "parallelism.pipeline_parallel_microbatch_size",
    "sequence_parallel": "parallelism.enable_sequence_parallel",
    "local": "training.local_batch_size",
    "batch": "training.global_batch_size",
    "length": "training.seq_len",
}


def recipe(keys: str) -> Recipe:
    """The default recipe with other values, as in `tp=2 length=6`, or with full keys."""
    pairs = [word.split("=") for word in keys.split()]
    return schema.build(Recipe, {KEYS.get(key, key): Entry(Words((value,)), "test") for key, value in pairs})


LAYOUTS = [
    ("", 1, ""),
    ("tp=2 replicate=2", 8, ""),
    ("tp=2 ep=8", 8, ""),
    ("shard=1", 2, "data_parallel_shard_degree 1 takes 1 process, and this is 2 processes"),
    (
        "replicate=2 shard=2 cp=2",
        4,
        "takes 8 processes, and this is 4 processes. Start 8 by `torchrun --nproc-per-node=8 train.py ...`, plan them "
        "by --dry-run --world-size 8, or set data_parallel_shard_degree = 1 (or -1); or change the degrees.",
    ),
    ("tp=3", 4, "tensor_parallel_degree 3 takes a multiple of 3 processes, and this is 4"),
    ("ep=3", 1, "expert_parallel_degree = 3 is not accepted on 1 rank; it takes a divisor of"),
    ("replicate=2 ep=4", 4, "tensor = 2 x 1 x 1 = 2."),
    ("local=4 batch=16", 4, ""),
    ("local=4 batch=16", 8, "local_batch_size x data-parallel ranks = 4 x 8 = 32. training.local_batch_size = 2 (or"),
    ("local=4 batch=16 replicate=2 tp=2", 8, ""),
    ("local=4 batch=16 replicate=2 tp=2", 16, "training.global_batch_size = 16 is not accepted on 16 ranks; it takes"),
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


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("parallelism.pipeline_parallel_degree", 2, (2, 14)),
        ("parallelism.expert_parallel_degree", 2, (2, 12)),
        ("parallelism.spmd_backend", "spmd_types", (2, 14)),
        ("loss.chunks", 2, (2, 13)),
    ],
)
def test_a_value_that_needs_a_newer_torch_is_refused_with_a_remedy_that_works(
    monkeypatch: pytest.MonkeyPatch, key: str, value: object, needed: tuple[int, int]
) -> None:
    def check(version: str, value: object) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        degrees.check_degrees(recipe(f"{key}={value}"), 4)

    major, minor = needed
    for version in (f"{major}.{minor}.0", f"{major}.{minor}.0.dev20260101", f"{major}.{minor + 1}.0+cu130", "3.0.0"):
        check(version, value)
    for version in (f"{major}.{minor - 1}.0+cpu", "2.9.1"):
        message = error_of(lambda version=version: check(version, value))
        assert f"{key} = {schema.value_text(value)} is not accepted" in message
        assert f"needs torch {major}.{minor} or newer, and torch {version} is installed" in message
        remedy = tomllib.loads(f"value = {message.rpartition('set it to ')[2].removesuffix('.')}")["value"]
        check(version, remedy)
