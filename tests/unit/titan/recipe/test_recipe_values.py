"""Refusals beyond types: ranges of values, relations between keys, and degrees."""

import importlib.metadata
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from tests.unit.recipe_files import RULE, error_of, write
from titan_muon.options import OptionError
from titan_muon.titan.recipe import Recipe, check_degrees, constraints, load, recipe_error, schema, sections
from titan_muon.titan.recipe.constraints import CONSTRAINTS
from titan_muon.titan.recipe.degrees import batch_problem, local_batch_size

OUTSIDE = ("", ".", "../../x", "a/../..", "/tmp/x", "~/x", "gs://x")

# Range: keys, refused values, accepted values.
RANGES: Mapping[str, tuple[str, tuple[object, ...], tuple[object, ...]]] = {
    "1 or more": (
        "model.vocab_size data.prefetch_factor training.seq_len training.steps training.gc_freq validator.freq "
        "parallelism.data_parallel_replicate_degree parallelism.tensor_parallel_degree metrics.log_freq "
        "parallelism.context_parallel_degree parallelism.expert_parallel_degree parallelism.pipeline_parallel_degree "
        "parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_microbatch_size muon.ns_steps "
        "machine.ranks_per_node lr_scheduler.total_steps checkpoint.interval monitor.matrices "
        "comm.init_timeout_seconds comm.train_timeout_seconds profiler.profile_freq profiler.profiler_active "
        "profiler.profiler_repeat profiler.memory_snapshot_freq profiler.memory_snapshot_max_entries",
        (0, -1),
        (1,),
    ),
    "0 or more": (
        "data.seed data.num_workers parallelism.pipeline_parallel_first_stage_less_layers muon.lr muon.weight_decay "
        "parallelism.pipeline_parallel_last_stage_less_layers muon.momentum_warmup_steps machine.node_latency_us "
        "machine.network_latency_us machine.launch_us adamw.lr adamw.eps adamw.weight_decay lr_scheduler.warmup_steps "
        "monitor.every comm.trace_buf_size debug.seed debug.check_replicas profiler.profiler_warmup "
        "profiler.profiler_skip_first profiler.profiler_skip_first_wait",
        (-1,),
        (0,),
    ),
    "more than 0": (
        "training.max_norm muon.eps machine.tflops machine.tflops_float32 machine.memory_gb "
        "machine.node_gb machine.network_gb qk_clip.threshold",
        (0.0, -1.0),
        (0.5,),
    ),
    "-1, or 1 or more": (
        "training.local_batch_size training.global_batch_size parallelism.data_parallel_shard_degree validator.steps",
        (0, -2),
        (-1, 1),
    ),
    "-1, or 0 or more": ("checkpoint.load_step", (-2,), (-1, 0)),
    "0, or 2 or more": ("checkpoint.keep_latest_k", (1, -1), (0, 2)),
    "258 or more": ("data.vocab_size", (257,), (258,)),
    "a number from 0 to less than 1": (
        "data.validation_fraction muon.momentum muon.beta2 muon.momentum_start",
        (1.0, -0.1),
        (0.0,),
    ),
    "a number from 0 to 1": (
        "qk_clip.alpha lr_scheduler.decay_ratio lr_scheduler.min_lr_factor activation_checkpoint.memory_budget",
        (1.1, -0.1),
        (0.0, 1.0),
    ),
    "a list, each element a number from 0 to less than 1": ("adamw.betas", ([0.9, 1.0], [-0.1, 0.9]), ([0.0, 0.5],)),
    "a string that is not empty": (
        "model.name model.flavor data.text_key data.dataset parallelism.pipeline_parallel_schedule machine.file "
        "parallelism.pipeline_parallel_schedule_csv placement.muon muon.algorithm checkpoint.load "
        "compile.backend",
        ("", " "),
        (),
    ),
    "a list, each element a string that is not empty": ("data.files float8.filter_fqns", ([""],), (["a"],)),
    "a name that is not empty and has no slash and no line break": (
        "name comm.save_traces_file_prefix",
        ("", "a/b", "..", "a\nb"),
        ("a b",),
    ),
    "a folder on a file system, not a URL and without line breaks": (
        "dump_folder data.cache",
        ("", "gs://bucket", "a\nb"),
        ("/a/b",),
    ),
    "a relative path inside the run's folder": (
        "checkpoint.folder metrics.save_tb_folder profiler.save_traces_folder profiler.save_memory_snapshot_folder",
        OUTSIDE,
        ("a/b",),
    ),
    "a relative path inside dump_folder": ("comm.save_traces_folder", OUTSIDE, ("a/b",)),
    "an absolute path or a URL": ("checkpoint.initial_load_path", ("a",), ("/a", "gs://a")),
    "a list, each element one of optimizer, lr_scheduler, dataloader, train_state": (
        "checkpoint.exclude_from_loading",
        (["x"],),
        (["train_state"],),
    ),
    "a list, each element one of model, loss": ("compile.components", (["x"],), (["loss"],)),
    '"auto" or 1 or more': ("loss.chunks", (0,), ("auto", 1)),
    '"auto" or more than 0': ("muon.buffer_gib", (0.0,), ("auto", 0.5)),
    '1, 2, 4, 8 or "auto"': ("muon.split_over", (3,), (1, "auto")),
    'a boolean or "auto"': ("muon.fused", (), (True, "auto")),
    "or a number above 0": ("muon.adjust_lr_fn", (0.0,), (0.18, "original")),
    "or a list that is not empty": ("muon.ns_coefficients", ([],), ("cans", [[1.0, 2.0, 3.0]])),
}


@pytest.mark.parametrize("accepted", RANGES)
def test_a_value_out_of_range_is_refused(tmp_path: Path, accepted: str) -> None:
    """The first key of a range is loaded from a file. The other keys have the same constraint."""
    keys, refused, taken = RANGES[accepted]
    key, *others = keys.split()
    for value in refused:
        message = error_of(lambda value=value: load(write(tmp_path, f"{key} = {schema.value_text(value)}")))
        assert f"run.toml: {key} = " in message
        assert f"it takes {CONSTRAINTS[key].accepted}" in message
    for name in (key, *others):
        assert CONSTRAINTS[name].accepted.endswith(accepted), name
        assert not any(CONSTRAINTS[name].holds(value) for value in refused), name
        assert all(CONSTRAINTS[name].holds(value) for value in taken), name


def test_every_constraint_has_a_range_above_and_every_number_a_constraint() -> None:
    assert sorted(key for keys, _, _ in RANGES.values() for key in keys.split()) == sorted(CONSTRAINTS)
    numbers = {float, int, int | None, float | None, float | Literal["auto"], int | Literal["auto"]}
    numbers.add(tuple[float, float])
    kinds = schema.keys(Recipe)
    assert set(CONSTRAINTS) <= set(kinds)
    assert {key for key, kind in kinds.items() if kind in numbers} <= set(CONSTRAINTS)


OWNED = "placement.muon = 'owned'\n"
HF = "data.source = 'hf'\ndata.tokenizer = 'hf'\ndata.tokenizer_path = 'x'\n"
OWNER_RULE = "[[placement.rule]]\nmatch = '*'\nplacement = "

# Lines, the refused key and value, words of the accepted values.
RELATED = [
    ("placement.replicas = 'one'", 'placement.replicas = "one"', 'placement.muon = "owned" and parallelism.data_par'),
    (f"{OWNED}placement.replicas = 'one'", 'placement.replicas = "one"', "replicate_degree of 2 or more"),
    (f"{OWNED}placement.tensor_parallel = 'whole'", 'placement.tensor_parallel = "whole"', "tensor_parallel_degree of"),
    (
        "placement.tensor_parallel = 'whole'\nparallelism.tensor_parallel_degree = 2",
        'placement.tensor_parallel = "whole"',
        'only with placement.muon = "owned"',
    ),
    (f"{OWNED}muon.state = 'owner'", 'muon.state = "owner"', "on their owner alone"),
    ("muon.tensor_parallel = 'blockwise'", 'muon.tensor_parallel = "blockwise"', "tensor_parallel_degree is 2 or more"),
    (
        f"{OWNED}placement.tensor_parallel = 'whole'\nparallelism.tensor_parallel_degree = 2\n"
        "muon.tensor_parallel = 'blockwise'",
        'muon.tensor_parallel = "blockwise"',
        'placement.tensor_parallel = "peers"',
    ),
    (f"placement.muon = 'x'\n{OWNER_RULE}'owned'", "placement.rule = [", 'none, unless placement.muon is "shard0" or'),
    ("data.source = 'files'", "data.files = []", 'data.source = "files"'),
    ("data.source = 'python'\ndata.files = ['a']", 'data.files = ["a"]', "leave out data.source or data.files"),
    ("data.source = 'hf'", 'data.tokenizer = "bytes"', 'data.source = "hf"'),
    ("data.tokenizer = 'hf'", "data.tokenizer_path is missing", 'data.tokenizer = "hf"'),
    ("data.validation_fraction = 0", "data.validation_fraction = 0.0", "more than 0, because validator.enable = true"),
    ("training.local_batch_size = -1", "training.local_batch_size = -1", "training.global_batch_size = -1"),
    (f"{HF}validator.steps = -1", "validator.steps = -1", '1 or more, because data.source = "hf"'),
    (
        "training.local_batch_size = 3\nparallelism.pipeline_parallel_degree = 2\n"
        "parallelism.pipeline_parallel_microbatch_size = 2",
        "parallelism.pipeline_parallel_microbatch_size = 2",
        "a divisor of training.local_batch_size",
    ),
    ("loss.chunks = 3", "loss.chunks = 3", "a divisor of training.seq_len"),
    ("lr_scheduler.total_steps = 999", "lr_scheduler.total_steps = 999", "training.steps or more"),
    ("lr_scheduler.warmup_steps = 1001", "lr_scheduler.warmup_steps = 1001", "at most the steps of the schedule"),
    (
        "lr_scheduler.warmup_steps = 600\nlr_scheduler.decay_ratio = 0.5",
        "lr_scheduler.decay_ratio = 0.5",
        "leaves room for lr_scheduler.warmup_steps",
    ),
    (
        "muon.ns_coefficients = [[1, 2, 3], [1, 2, 3]]",
        "muon.ns_coefficients = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]",
        "as many [a, b, c] as muon.ns_steps",
    ),
    *(
        (f"muon.overlap = '{overlap}'\n{line}", f'muon.overlap = "{overlap}"', f"{others} with {shown or line}")
        for overlaps, line, others, shown in (
            ("backward forward", "placement.muon = 'owned'", '"none"', 'placement.muon = "owned"'),
            ("backward forward", "parallelism.pipeline_parallel_degree = 2", '"none"', "pipeline parallelism"),
            ("backward forward", "training.disable_cuda_graphs = false", '"none"', ""),
            ("backward", "optimizer.clip = 'all'", '"none" or "forward"', 'optimizer.clip = "all"'),
            ("forward", "qk_clip.mode = 'clip'", '"none" or "backward"', 'qk_clip.mode = "clip"'),
        )
        for overlap in overlaps.split()
    ),
    ("adamw.state_dtype = 'bfloat16'\nadamw.betas = [0.9, 0.999]", "adamw.betas = [0.9, 0.999]", "each at most 0.99"),
    ("data.num_workers = 2", "data.num_workers = 2", 'data.source = "hf"'),
    ("data.prefetch_factor = 2", "data.prefetch_factor = 2", "data.num_workers = 0"),
    ("data.persistent_workers = true", "data.persistent_workers = true", "data.num_workers = 0"),
    ("data.pin_memory = true", "data.pin_memory = true", 'data.source = "hf"'),
    (
        "profiler.enable_profiling = true\nprofiler.profiler_active = 8",
        "profiler.profile_freq = 10",
        "profiler_warmup + profiler_active or more",
    ),
    ("activation_checkpoint.mode = 'memory_budget'", "activation_checkpoint.mode = ", "compile.enable = true"),
    (
        "compile.enable = true\ncompile.enable_async_tensor_parallel = true",
        "compile.enable_async_tensor_parallel = true",
        "tensor parallelism",
    ),
    ("float8.emulate = true", "float8.emulate = true", "float8.linear = true"),
    ("float8 = {linear = true, experts = true, emulate = true}", "float8.emulate = true", "float8.experts = false"),
    ("float8 = {linear = true, emulate = true}\ncompile.enable = true", "float8.emulate = true", "is not compiled"),
    ("debug.deterministic_warn_only = true", "debug.deterministic_warn_only = true", "debug.deterministic = false"),
    (
        "checkpoint = {load_only = true, enable_first_step_checkpoint = true}",
        "checkpoint.enable_first_step_checkpoint = true",
        "checkpoint.load_only = true",
    ),
    ("checkpoint.initial_load_in_hf = true", "checkpoint.initial_load_in_hf = true", "model.hf_assets_path"),
    (
        "checkpoint.initial_load_in_hf_quantized = true",
        "checkpoint.initial_load_in_hf_quantized = true",
        "checkpoint.initial_load_in_hf = true",
    ),
    ("checkpoint.last_save_in_hf = true", "last_save_model_only = false", "checkpoint.last_save_in_hf = true"),
    (
        "checkpoint = {initial_load_in_hf = true, initial_load_path = '/x', initial_load_model_only = false}",
        "checkpoint.initial_load_model_only = false",
        "checkpoint.initial_load_in_hf = true",
    ),
]
# Values of rules, and names of a registry.
REFUSED = [
    (
        "muon.algorithm = 'normoun'",
        'muon.algorithm = "normoun"',
        'one of "adamuon", "muon", "muonh", "normuon"',
    ),
    ("muon.exchange = 'gather'", 'muon.exchange = "gather"', 'one of "all_to_all", "all_gather"'),
    ("placement.muon = 'own'", 'placement.muon = "own"', 'Did you mean "owned"?'),
    ("muon.ns_coefficients = 'polar_expres'", '= "polar_expres" is not', 'Did you mean "polar_express"?'),
    (f"{OWNER_RULE}'each'", 'placement.rule[0].placement = "each"', '"shard0"'),
    ("[[placement.rule]]\nmatch = ''\nplacement = 'owned'", 'placement.rule[0].match = ""', "not empty"),
    (f"{OWNER_RULE}'owned'\nowner = 'first'", 'placement.rule[0].owner = "first"', 'an integer or one of "balanced"'),
    (f"{OWNER_RULE}'owned'\nowner = -1", "placement.rule[0].owner = -1", "0 or more"),
    (f"{OWNER_RULE}'shard0'\nowner = 1", "placement.rule[0].owner = 1", 'with placement = "owned"'),
    ("[[optimizer.rule]]\nmatch = ''\noptimizer = 'adamw'", 'optimizer.rule[0].match = ""', "not empty"),
    (f"{RULE}''", 'optimizer.rule[0].optimizer = ""', "not empty"),
    (f"{RULE}'muno'", 'optimizer.rule[0].optimizer = "muno"', 'one of "adamw", "mine", "muon". Did you mean "muon"?'),
    (f"{RULE}'muon'\noptions = {{lr = -1}}", "optimizer.rule[0].options.lr = -1.0", "0 or more"),
    (f"{RULE}'adamw'\noptions = {{lr = 'x'}}", 'optimizer.rule[0].options.lr = "x"', "a finite number"),
    (f"{RULE}'adamw'\noptions = {{momentum = 1}}", "options.momentum = 1", "options takes lr, betas"),
    (f"{RULE}'mine'\noptions = {{x = 2024-01-01}}", "optimizer.rule[0].options.x = 2024-01-01", "a string"),
    (
        f"{RULE}'muon'\noptions = {{ns_coefficients = [[1, 2, 3], [1, 2, 3]]}}",
        "muon.ns_coefficients under optimizer.rule[0].options = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]",
        "as many",
    ),
    (
        f"[adamw]\nstate_dtype = 'bfloat16'\n{RULE}'adamw'\noptions = {{betas = [0.9, 0.995]}}",
        "adamw.betas under optimizer.rule[0].options = [0.9, 0.995]",
        "each at most 0.99",
    ),
]


@pytest.mark.parametrize(("text", "fault", "accepted"), [*RELATED, *REFUSED])
def test_a_value_that_does_not_fit_is_refused(tmp_path: Path, text: str, fault: str, accepted: str) -> None:
    message = error_of(lambda: load(write(tmp_path, text)))
    assert "run.toml: " in message
    assert fault in message
    assert accepted in message


def test_every_check_of_related_keys_refuses_a_recipe_above(tmp_path: Path) -> None:
    messages = {
        error_of(lambda text=text: load(write(tmp_path, text))).split("; it takes ")[1] for text, _, _ in RELATED
    }
    texts = {message.partition(". Here ")[0].removesuffix(".") for message in messages}
    assert len(texts) == inspect.getsource(constraints).count("\n        yield ")


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
        (
            OptionError("buffer_bytes", f"= {2**30} is too small: 5 matrices take at least {3 * 2**29} bytes"),
            "muon.buffer_gib = 1 is too small: 5 matrices take at least 1.5 GiB",
        ),
        (ValueError("muon.split: nothing matches"), "muon.split: nothing matches"),
    ],
)
def test_errors_of_the_library_name_the_recipes_key(error: ValueError, message: str) -> None:
    assert str(recipe_error(error)).startswith(message)


# Degrees


def recipe(**values: object) -> Recipe:
    """The default recipe with other values; a key such as `training__steps` is training.steps."""
    changed = Recipe()
    for key, value in values.items():
        table, _, leaf = key.partition("__")
        changed = replace(changed, **{table: replace(getattr(changed, table), **{leaf: value})})
    return changed


def degrees(**changes: int) -> Recipe:
    return recipe(**{f"parallelism__{key}": value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "world_size", "parts"),
    [
        ({}, 1, ()),
        ({}, 8, ()),
        ({"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, 8, ()),
        ({"data_parallel_shard_degree": 2, "context_parallel_degree": 2, "tensor_parallel_degree": 2}, 8, ()),
        ({"tensor_parallel_degree": 2, "expert_parallel_degree": 8}, 8, ()),
        ({"data_parallel_shard_degree": 2}, 4, ("data_parallel_shard_degree 2 takes", "_shard_degree = 4 (or -1)")),
        (
            {"data_parallel_shard_degree": 1},
            2,
            ("data_parallel_shard_degree 1 takes 1 process, and this is 2 process",),
        ),
        (
            {"tensor_parallel_degree": 3},
            4,
            ("tensor_parallel_degree 3 takes a multiple of 3 processes, and this is 4",),
        ),
        (
            {"tensor_parallel_degree": 4},
            1,
            (
                "parallelism: tensor_parallel_degree 4 takes a multiple of 4 processes, and this is 1 process. Start 4 "
                "by `torchrun --nproc-per-node=4 train.py ...`, plan them by --dry-run --world-size 4; or change",
            ),
        ),
        (
            {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "context_parallel_degree": 2},
            4,
            ("data_parallel_replicate_degree 2", "takes 8 processes, and this is 4", "_shard_degree = 1 (or -1)"),
        ),
        ({"expert_parallel_degree": 3}, 4, ("expert_parallel_degree = 3", "4 x 1 x 1 = 4")),
        ({"expert_parallel_degree": 3}, 1, ("is not accepted on 1 rank;",)),
        (
            {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 4},
            4,
            ("expert_parallel_degree = 4", "2 x 1 x 1 = 2"),
        ),
    ],
)
def test_degrees_are_accepted_or_refused(changes: dict[str, int], world_size: int, parts: tuple[str, ...]) -> None:
    if not parts:
        check_degrees(degrees(**changes), world_size)
        return
    message = error_of(lambda: check_degrees(degrees(**changes), world_size))
    assert [part for part in parts if part not in message] == []


def test_the_global_batch_is_a_multiple_of_the_ranks_local_batches() -> None:
    batch = {"training__local_batch_size": 4, "training__global_batch_size": 16}
    check_degrees(recipe(**batch), 2)
    check_degrees(recipe(**batch), 4)
    message = error_of(lambda: check_degrees(recipe(**batch), 8))
    assert "training.global_batch_size = 16" in message
    assert "= 32" in message
    assert "training.local_batch_size = 2 (or -1) keeps it" in message
    replicas = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__tensor_parallel_degree": 2}
    check_degrees(recipe(**batch, **replicas), 8)
    assert "= 32" in error_of(lambda: check_degrees(recipe(**batch, **replicas), 16))


def test_a_local_batch_of_minus_one_is_the_ranks_share_of_the_global_batch() -> None:
    batch = {"training__local_batch_size": -1, "training__global_batch_size": 8}
    assert [local_batch_size(recipe(**batch), world) for world in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert local_batch_size(recipe(**batch, parallelism__tensor_parallel_degree=2), 2) == 8
    message = error_of(lambda: check_degrees(recipe(**batch), 3))
    assert "training.global_batch_size = 8 is not accepted on 3 ranks; it takes a multiple of the 3" in message
    stages = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_microbatch_size": 3}
    problem = batch_problem(recipe(**batch, **stages), 4)
    assert problem is not None
    assert "pipeline_parallel_microbatch_size = 3 is not accepted; it takes a divisor of the 4 sequences" in problem


@pytest.mark.parametrize(
    ("changes", "divisor"),
    [
        ({"tensor_parallel_degree": 4}, 4),
        ({"context_parallel_degree": 2}, 4),
        ({"tensor_parallel_degree": 2, "context_parallel_degree": 2}, 8),
        ({"tensor_parallel_degree": 2, "enable_sequence_parallel": False}, 1),
    ],
)
def test_the_sequence_divides_over_tensor_and_context_parallel(changes: dict[str, int], divisor: int) -> None:
    check_degrees(replace(degrees(**changes), training=sections.Training(seq_len=3 * divisor)), 4)
    if divisor > 1:
        odd = replace(degrees(**changes), training=sections.Training(seq_len=3 * divisor + divisor // 2))
        message = error_of(lambda: check_degrees(odd, 4))
        assert f"no multiple of {divisor}" in message
        assert message.startswith("parallelism."), "the user has set the degree, and not the length"


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
        check_degrees(recipe(**{key.replace(".", "__"): value}), 4)

    major, minor = needed
    for version in (f"{major}.{minor}.0", f"{major}.{minor}.0.dev20260101", f"{major}.{minor + 1}.0+cu130", "3.0.0"):
        check(version, value)
    for version in (f"{major}.{minor - 1}.0+cpu", "2.9.1"):
        message = error_of(lambda version=version: check(version, value))
        assert f"{key} = {schema.value_text(value)} is not accepted" in message
        assert f"needs torch {major}.{minor} or newer, and torch {version} is installed" in message
        remedy = tomllib.loads(f"value = {message.rpartition('set it to ')[2].removesuffix('.')}")["value"]
        check(version, remedy)
