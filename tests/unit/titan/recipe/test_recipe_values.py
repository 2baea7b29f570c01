"""Refusals beyond types: values, relations between keys, and degrees."""

import dataclasses
import importlib.metadata
import tomllib
from pathlib import Path
from typing import Literal

import pytest

from tests.unit.recipe_files import RULE, error_of, write
from titan_muon.options import OptionError
from titan_muon.titan.recipe import Recipe, check_degrees, load, recipe_error, schema, sections
from titan_muon.titan.recipe.constraints import CONSTRAINTS, RELATIONS
from titan_muon.titan.recipe.degrees import batch_problem, local_batch_size

# Conditions beyond types: (TOML, the wrong key and value, words of the accepted values)

BAD_VALUES = [
    ("name = 'a/b'", 'name = "a/b"', "no slash"),
    ("name = '..'", 'name = ".."', "no slash"),
    ('name = "a\\nb"', 'name = "a\\nb"', "no line break"),
    ('dump_folder = "a\\nb"', 'dump_folder = "a\\nb"', "without line breaks"),
    ("dump_folder = ''", 'dump_folder = ""', "not a URL"),
    ("dump_folder = 'gs://bucket/runs'", 'dump_folder = "gs://bucket/runs"', "not a URL"),
    ("[model]\nname = ''", 'model.name = ""', "not empty"),
    ("[model]\nflavor = ' '", 'model.flavor = " "', "not empty"),
    ("[data]\nfiles = ['']", 'data.files = [""]', "not empty"),
    ("[data]\ndataset = ''", 'data.dataset = ""', "not empty"),
    ("[data]\nvalidation_fraction = 1", "data.validation_fraction = 1.0", "from 0 to less than 1"),
    ("[data]\nvalidation_fraction = -0.1", "data.validation_fraction = -0.1", "from 0 to less than 1"),
    ("[data]\nvocab_size = 200", "data.vocab_size = 200", "258 or more"),
    ("[data]\ntext_key = ''", 'data.text_key = ""', "not empty"),
    ("[data]\nseed = -1", "data.seed = -1", "0 or more"),
    ("[data]\ncache = 's3://bucket'", 'data.cache = "s3://bucket"', "not a URL"),
    *[
        (f"[{table}]\n{key} = '{path}'", f'{table}.{key} = "{path}"', "inside the run's folder")
        for table, key in (
            ("checkpoint", "folder"),
            ("profiler", "save_traces_folder"),
            ("profiler", "save_memory_snapshot_folder"),
        )
        for path in ("", ".", "../../x", "a/../..", "/tmp/x", "~/x", "gs://x")
    ],
    (
        "[profiler]\nenable_profiling = true\nprofile_freq = 3",
        "profiler.profile_freq = 3",
        "profiler_warmup + profiler_active or more",
    ),
    ("[data]\nsource = 'python'\nfiles = ['a']", 'data.files = ["a"]', "leave out data.source"),
    ("[data]\nsource = 'files'", "data.files = []", 'data.source = "files"'),
    ("[data]\ntokenizer = 'hf'", "data.tokenizer_path is missing", 'data.tokenizer = "hf"'),
    ("[data]\nsource = 'hf'", 'data.tokenizer = "bytes"', 'data.source = "hf"'),
    ("[training]\nlocal_batch_size = 0", "training.local_batch_size = 0", "-1, or 1 or more"),
    ("[training]\nlocal_batch_size = -1", "training.local_batch_size = -1", "training.global_batch_size = -1"),
    ("[data]\nnum_workers = -1", "data.num_workers = -1", "0 or more"),
    ("[data]\nnum_workers = 2", "data.num_workers = 2", 'data.source = "hf"'),
    ("[data]\nprefetch_factor = 0", "data.prefetch_factor = 0", "1 or more"),
    ("[data]\nprefetch_factor = 2", "data.prefetch_factor = 2", "data.num_workers = 0"),
    ("[data]\npersistent_workers = true", "data.persistent_workers = true", "data.num_workers = 0"),
    ("[data]\npin_memory = true", "data.pin_memory = true", 'data.source = "hf"'),
    ("[profiler]\nprofiler_active = 0", "profiler.profiler_active = 0", "1 or more"),
    ("[profiler]\nprofiler_warmup = -1", "profiler.profiler_warmup = -1", "0 or more"),
    ("[profiler]\nprofiler_repeat = 0", "profiler.profiler_repeat = 0", "1 or more"),
    ("[profiler]\nprofiler_skip_first = -1", "profiler.profiler_skip_first = -1", "0 or more"),
    ("[profiler]\nprofiler_skip_first_wait = -1", "profiler.profiler_skip_first_wait = -1", "0 or more"),
    ("[profiler]\nmemory_snapshot_freq = 0", "profiler.memory_snapshot_freq = 0", "1 or more"),
    ("[profiler]\nmemory_snapshot_max_entries = 0", "profiler.memory_snapshot_max_entries = 0", "1 or more"),
    (
        "[profiler]\nenable_profiling = true\nprofiler_active = 8",
        "profiler.profile_freq = 10",
        "profiler_warmup + profiler_active or more",
    ),
    ("[comm]\nsave_traces_folder = ''", 'comm.save_traces_folder = ""', "inside dump_folder"),
    ("[comm]\nsave_traces_folder = '../../x'", 'comm.save_traces_folder = "../../x"', "inside dump_folder"),
    ("[comm]\nsave_traces_file_prefix = ''", 'comm.save_traces_file_prefix = ""', "not empty"),
    ("[comm]\nsave_traces_file_prefix = '/x'", 'comm.save_traces_file_prefix = "/x"', "no slash"),
    ("[activation_checkpoint]\nmemory_budget = 2", "activation_checkpoint.memory_budget = 2.0", "from 0 to 1"),
    ('[activation_checkpoint]\nmode = "memory_budget"', "activation_checkpoint.mode = ", "compile.enable = true"),
    (
        "[compile]\nenable = true\nenable_async_tensor_parallel = true",
        "compile.enable_async_tensor_parallel = true",
        "tensor parallelism",
    ),
    ("[metrics]\nsave_tb_folder = '/tb'", 'metrics.save_tb_folder = "/tb"', "inside the run's folder"),
    ("[float8]\nfilter_fqns = ['']", 'float8.filter_fqns = [""]', "not empty"),
    ("[float8]\nemulate = true", "float8.emulate = true", "float8.linear = true"),
    ("[float8]\nlinear = true\nexperts = true\nemulate = true", "float8.emulate = true", "float8.experts = false"),
    (
        "[float8]\nlinear = true\nemulate = true\n[compile]\nenable = true",
        "float8.emulate = true",
        "a model that is not compiled",
    ),
    ("[debug]\ndeterministic_warn_only = true", "debug.deterministic_warn_only = true", "debug.deterministic = false"),
    (
        "[checkpoint]\nload_only = true\nenable_first_step_checkpoint = true",
        "checkpoint.enable_first_step_checkpoint = true",
        "checkpoint.load_only = true",
    ),
    ("[checkpoint]\ninitial_load_in_hf = true", "checkpoint.initial_load_in_hf = true", "model.hf_assets_path"),
    (
        "[checkpoint]\ninitial_load_in_hf_quantized = true",
        "checkpoint.initial_load_in_hf_quantized = true",
        "checkpoint.initial_load_in_hf = true",
    ),
    ("[validator]\nsteps = 0", "validator.steps = 0", "-1, or 1 or more"),
    (
        '[data]\nsource = "hf"\ntokenizer = "hf"\ntokenizer_path = "x"\n[validator]\nsteps = -1',
        "validator.steps = -1",
        'data.source = "hf"',
    ),
    ("[training]\nglobal_batch_size = 0", "training.global_batch_size = 0", "-1, or 1 or more"),
    ("[training]\nglobal_batch_size = -2", "training.global_batch_size = -2", "-1, or 1 or more"),
    ("[training]\nseq_len = 0", "training.seq_len = 0", "1 or more"),
    ("[training]\nsteps = 0", "training.steps = 0", "1 or more"),
    ("[training]\nmax_norm = 0", "training.max_norm = 0.0", "more than 0"),
    ("[training]\ngc_freq = 0", "training.gc_freq = 0", "1 or more"),
    *[
        (f"[parallelism]\n{key} = 0", f"parallelism.{key} = 0", "1 or more")
        for key in (
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "tensor_parallel_degree",
            "context_parallel_degree",
            "expert_parallel_degree",
            "pipeline_parallel_degree",
            "pipeline_parallel_microbatch_size",
        )
    ],
    ("[parallelism]\npipeline_parallel_schedule = ''", 'pipeline_parallel_schedule = ""', "not empty"),
    (
        "[parallelism]\ncontext_parallel_load_balancer = 'x'",
        'context_parallel_load_balancer = "x"',
        '"headtail", "ptrr", "none"',
    ),
    (
        "[training]\nlocal_batch_size = 3\n[parallelism]\npipeline_parallel_degree = 2\n"
        "pipeline_parallel_microbatch_size = 2",
        "parallelism.pipeline_parallel_microbatch_size = 2",
        "a divisor of training.local_batch_size",
    ),
    ("[placement]\nmuon = ''", 'placement.muon = ""', "not empty"),
    ("[placement]\nreplicas = 'all'", 'placement.replicas = "all"', '"each", "one"'),
    ("[placement]\ntensor_parallel = 'one'", 'placement.tensor_parallel = "one"', '"peers", "whole"'),
    ("[placement]\nreplicas = 'one'", 'placement.replicas = "one"', 'placement.muon = "owned"'),
    ("[placement]\nmuon = 'owned'\nreplicas = 'one'", 'placement.replicas = "one"', "replicate_degree of 2 or more"),
    (
        "[placement]\nmuon = 'owned'\ntensor_parallel = 'whole'",
        'placement.tensor_parallel = "whole"',
        "parallelism.tensor_parallel_degree of 2 or more",
    ),
    (
        "[placement]\ntensor_parallel = 'whole'\n[parallelism]\ntensor_parallel_degree = 2",
        'placement.tensor_parallel = "whole"',
        'placement.muon = "owned"',
    ),
    ("[placement]\nmuon = 'owned'\n[muon]\nstate = 'owner'", 'muon.state = "owner"', "on their owner alone"),
    ("[muon]\nstate = 'each'", 'muon.state = "each"', '"owner"'),
    ("[[placement.rule]]\nmatch = ''\nplacement = 'owned'", 'placement.rule[0].match = ""', "not empty"),
    ("[[placement.rule]]\nmatch = '*'\nplacement = 'each'", 'placement.rule[0].placement = "each"', '"shard0"'),
    (
        "[[placement.rule]]\nmatch = '*'\nplacement = 'owned'\nowner = 'first'",
        'placement.rule[0].owner = "first"',
        'an integer or one of "balanced", "layer"',
    ),
    ("[[placement.rule]]\nmatch = '*'\nplacement = 'owned'\nowner = -1", "placement.rule[0].owner = -1", "0 or more"),
    (
        "[[placement.rule]]\nmatch = '*'\nplacement = 'shard0'\nowner = 1",
        "placement.rule[0].owner = 1",
        'with placement = "owned"',
    ),
    ("[placement]\nmuon = 'x'\n[[placement.rule]]\nmatch = '*'\nplacement = 'owned'", "placement.rule = [", "none"),
    ("[muon]\nlr = -1e-3", "muon.lr = -0.001", "0 or more"),
    ("[muon]\nmomentum = 1", "muon.momentum = 1.0", "from 0 to less than 1"),
    ("[muon]\nmomentum = -0.5", "muon.momentum = -0.5", "from 0 to less than 1"),
    ("[muon]\nbeta2 = 1", "muon.beta2 = 1.0", "from 0 to less than 1"),
    ("[muon]\nweight_decay = -1", "muon.weight_decay = -1.0", "0 or more"),
    ("[muon]\nns_steps = 0", "muon.ns_steps = 0", "1 or more"),
    ("[muon]\nns_coefficients = ''", 'muon.ns_coefficients = ""', '"cubic" or a list'),
    (
        "[muon]\nns_coefficients = 'polar_expres'",
        'muon.ns_coefficients = "polar_expres"',
        'Did you mean "polar_express"?',
    ),
    ("[muon]\nrule = 'normoun'", 'muon.rule = "normoun"', 'one of "adamuon", "muon", "muonh", "normuon". Did you'),
    ("[muon]\nexchange = 'gather'", 'muon.exchange = "gather"', 'one of "all_gather", "all_gather_reduce_scatter"'),
    ("[placement]\nmuon = 'own'", 'placement.muon = "own"', 'Did you mean "owned"?'),
    (f"{RULE}'muno'", 'optimizer.rule[0].optimizer = "muno"', 'one of "adamw", "mine", "muon". Did you mean "muon"?'),
    ("[muon]\nns_coefficients = []", "muon.ns_coefficients = []", "not empty"),
    ("[muon]\nns_coefficients = [[1, 2, 3], [1, 2, 3]]", "muon.ns_coefficients = [[1.0, 2.0, 3.0], [1.0", "as many"),
    ("[qk_clip]\nthreshold = 0", "qk_clip.threshold = 0.0", "more than 0"),
    ("[qk_clip]\nalpha = 1.5", "qk_clip.alpha = 1.5", "0 to 1"),
    ("[qk_clip]\nmode = 'on'", 'qk_clip.mode = "on"', 'one of "off", "log", "clip"'),
    ("[muon]\nrule = ''", 'muon.rule = ""', "not empty"),
    ("[muon]\nmomentum_warmup_steps = -1", "muon.momentum_warmup_steps = -1", "0 or more"),
    ("[muon]\nmomentum_start = -1", "muon.momentum_start = -1.0", "less than 1"),
    ("[monitor]\nevery = -1", "monitor.every = -1", "0 or more"),
    ("[monitor]\nmatrices = 0", "monitor.matrices = 0", "1 or more"),
    ("[debug]\ncheck_replicas = -1", "debug.check_replicas = -1", "0 or more"),
    ("[muon]\nadjust_lr_fn = 0", "muon.adjust_lr_fn = 0.0", "a number above 0"),
    ("[muon]\neps = 0", "muon.eps = 0.0", "more than 0"),
    ("[muon]\northogonalize = ''", 'muon.orthogonalize = ""', "auto"),
    ("[muon]\nexchange = ''", 'muon.exchange = ""', "not empty"),
    *[
        (f"muon.overlap = '{overlap}'\n{line}", f'muon.overlap = "{overlap}"', accepted)
        for overlap in ("backward", "forward")
        for line, accepted in (
            ("placement.muon = 'owned'", '"none" with placement.muon = "owned"'),
            ("parallelism.pipeline_parallel_degree = 2", '"none" with pipeline parallelism'),
            ("training.disable_cuda_graphs = false", '"none" with training.disable_cuda_graphs = false'),
        )
    ],
    (
        "muon.overlap = 'backward'\noptimizer.clip = 'all'",
        'muon.overlap = "backward"',
        '"none" or "forward" with optimizer.clip = "all"',
    ),
    (
        "muon.overlap = 'forward'\nqk_clip.mode = 'clip'",
        'muon.overlap = "forward"',
        '"none" or "backward" with qk_clip.mode = "clip"',
    ),
    ("[muon]\nreplicas = 'auto'", 'muon.replicas = "auto"', '"split", "redundant"'),
    ("[muon]\nsplit_over = 3", "muon.split_over = 3", '1, 2, 4, 8 or "auto"'),
    ("[muon]\nfused = 'fast'", 'muon.fused = "fast"', 'true or false or "auto"'),
    ("[muon]\nsplit_over = 'most'", 'muon.split_over = "most"', 'an integer or "auto"'),
    ("[muon]\ntensor_parallel = 'all'", 'muon.tensor_parallel = "all"', "blockwise"),
    ("[muon]\ntensor_parallel = 'blockwise'", 'muon.tensor_parallel = "blockwise"', "tensor_parallel_degree is 2"),
    (
        "[muon]\ntensor_parallel = 'blockwise'\n[parallelism]\ntensor_parallel_degree = 2\n[placement]\n"
        "muon = 'owned'\ntensor_parallel = 'whole'",
        'muon.tensor_parallel = "blockwise"',
        'placement.tensor_parallel = "peers"',
    ),
    ("[muon]\nbuffer_gib = 0", "muon.buffer_gib = 0.0", '"auto" or more than 0'),
    ("[muon]\nbuffer_gib = 'a lot'", 'muon.buffer_gib = "a lot"', 'a finite number or "auto"'),
    ("[machine]\nfile = ' '", 'machine.file = " "', "a string that is not empty"),
    ("[machine]\nranks_per_node = 0", "machine.ranks_per_node = 0", "1 or more"),
    ("[machine]\ntflops_float32 = 0", "machine.tflops_float32 = 0.0", "more than 0"),
    ("[machine]\nmemory_gb = 0", "machine.memory_gb = 0.0", "more than 0"),
    ("[machine]\nnode_gb = 0", "machine.node_gb = 0.0", "more than 0"),
    ("[machine]\nnetwork_latency_us = -1", "machine.network_latency_us = -1.0", "0 or more"),
    ("[machine]\nlaunch_us = -1", "machine.launch_us = -1.0", "0 or more"),
    ("[machine]\nnetwork_gb = 0", "machine.network_gb = 0.0", "more than 0"),
    ("[machine]\nnode_latency_us = -1", "machine.node_latency_us = -1.0", "0 or more"),
    ("[machine]\ntflops = 0", "machine.tflops = 0.0", "more than 0"),
    ("[model]\nvocab_size = 0", "model.vocab_size = 0", "1 or more"),
    ("[data]\nvalidation_fraction = 0", "data.validation_fraction = 0.0", "more than 0"),
    *[
        (f"[{table}]\n{key} = {value}", f"{table}.{key} = {value}", accepted)
        for table in ("adamw",)
        for key, value, accepted in (
            ("lr", "-1.0", "0 or more"),
            ("betas", "[0.9, 1.0]", "from 0 to less than 1"),
            ("betas", "[-0.1, 0.9]", "from 0 to less than 1"),
            ("eps", "-1.0", "0 or more"),
            ("weight_decay", "-1.0", "0 or more"),
        )
    ],
    ("[lr_scheduler]\nwarmup_steps = -1", "lr_scheduler.warmup_steps = -1", "0 or more"),
    ("[lr_scheduler]\ntotal_steps = 0", "lr_scheduler.total_steps = 0", "1 or more"),
    ("[lr_scheduler]\ntotal_steps = 999", "lr_scheduler.total_steps = 999", "training.steps or more"),
    ("[lr_scheduler]\nwarmup_steps = 1001", "lr_scheduler.warmup_steps = 1001", "at most the steps of the schedule"),
    (
        "[lr_scheduler]\nwarmup_steps = 600\ndecay_ratio = 0.5",
        "lr_scheduler.decay_ratio = 0.5",
        "leaves room for lr_scheduler.warmup_steps",
    ),
    *[
        (
            f"[{table}]\nstate_dtype = 'bfloat16'\nbetas = [0.9, 0.999]",
            f"{table}.betas = [0.9, 0.999]",
            f'each at most 0.99, since bfloat16 stops slower averages ({table}.state_dtype = "bfloat16")',
        )
        for table in ("adamw",)
    ],
    (
        f"[adamw]\nstate_dtype = 'bfloat16'\n{RULE}'adamw'\noptions = {{betas = [0.9, 0.995]}}",
        "adamw.betas under optimizer.rule[0].options = [0.9, 0.995]",
        "each at most 0.99",
    ),
    ("[optimizer]\noffload = 'all'", 'optimizer.offload = "all"', 'one of "none", "state"'),
    ("[loss]\nchunks = 0", "loss.chunks = 0", '"auto" or 1 or more'),
    ("[loss]\nchunks = 3", "loss.chunks = 3", "a divisor of training.seq_len"),
    ("[lr_scheduler]\ndecay_ratio = 1.1", "lr_scheduler.decay_ratio = 1.1", "from 0 to 1"),
    ("[lr_scheduler]\nmin_lr_factor = -0.1", "lr_scheduler.min_lr_factor = -0.1", "from 0 to 1"),
    ("[validator]\nfreq = 0", "validator.freq = 0", "1 or more"),
    ("[checkpoint]\ninterval = 0", "checkpoint.interval = 0", "1 or more"),
    ("[checkpoint]\nload = ''", 'checkpoint.load = ""', "not empty"),
    ("[checkpoint]\nload_step = -2", "checkpoint.load_step = -2", "-1, or 0 or more"),
    ("[checkpoint]\nkeep_latest_k = 1", "checkpoint.keep_latest_k = 1", "0, or 2 or more"),
    ("[checkpoint]\nlast_save_in_hf = true", "last_save_model_only = false", "last_save_in_hf = true"),
    ("[checkpoint]\ninitial_load_path = 'a'", 'checkpoint.initial_load_path = "a"', "an absolute path"),
    (
        "[checkpoint]\ninitial_load_in_hf = true\ninitial_load_path = '/x'\ninitial_load_model_only = false",
        "checkpoint.initial_load_model_only = false",
        "initial_load_in_hf = true",
    ),
    ("[checkpoint]\nexclude_from_loading = ['x']", 'checkpoint.exclude_from_loading = ["x"]', "train_state"),
    ("[metrics]\nlog_freq = 0", "metrics.log_freq = 0", "1 or more"),
    ("[compile]\ncomponents = ['x']", 'compile.components = ["x"]', "model, loss"),
    ("[compile]\nbackend = ''", 'compile.backend = ""', "not empty"),
    ("[comm]\ninit_timeout_seconds = 0", "comm.init_timeout_seconds = 0", "1 or more"),
    ("[comm]\ntrain_timeout_seconds = 0", "comm.train_timeout_seconds = 0", "1 or more"),
    ("[comm]\ntrace_buf_size = -1", "comm.trace_buf_size = -1", "0 or more"),
    ("[debug]\nseed = -1", "debug.seed = -1", "0 or more"),
    ("[parallelism]\npipeline_parallel_schedule_csv = ''", 'pipeline_parallel_schedule_csv = ""', "not empty"),
    ("[parallelism]\npipeline_parallel_layers_per_stage = 0", "pipeline_parallel_layers_per_stage = 0", "1 or more"),
    (
        "[parallelism]\npipeline_parallel_first_stage_less_layers = -1",
        "pipeline_parallel_first_stage_less_layers = -1",
        "0 or more",
    ),
    (
        "[parallelism]\npipeline_parallel_last_stage_less_layers = -1",
        "pipeline_parallel_last_stage_less_layers = -1",
        "0 or more",
    ),
    ("[profiler]\nprofile_freq = 0", "profiler.profile_freq = 0", "1 or more"),
    ("[[optimizer.rule]]\nmatch = ''\noptimizer = 'adamw'", 'optimizer.rule[0].match = ""', "not empty"),
    (f"{RULE}''", 'optimizer.rule[0].optimizer = ""', "not empty"),
    (f"{RULE}'muon'\noptions = {{lr = -1}}", "optimizer.rule[0].options.lr = -1.0", "0 or more"),
    (f"{RULE}'adamw'\noptions = {{lr = 'x'}}", 'optimizer.rule[0].options.lr = "x"', "a finite number"),
    (f"{RULE}'adamw'\noptions = {{lrs = 1}}", "optimizer.rule[0].options.lrs = 1", "options takes lr, betas"),
    (f"{RULE}'adamw'\noptions = {{momentum = 1}}", "options.momentum = 1", "options takes lr, betas"),
    (f"{RULE}'mine'\noptions = {{x = 2024-01-01}}", "optimizer.rule[0].options.x = 2024-01-01", "a string"),
    (
        f"{RULE}'muon'\noptions = {{ns_coefficients = [[1, 2, 3], [1, 2, 3]]}}",
        "muon.ns_coefficients under optimizer.rule[0].options = [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]",
        "as many",
    ),
]


@pytest.mark.parametrize(("text", "fault", "accepted"), BAD_VALUES, ids=[row[1] for row in BAD_VALUES])
def test_a_value_out_of_range_is_refused(tmp_path: Path, text: str, fault: str, accepted: str) -> None:
    message = error_of(lambda: load(write(tmp_path, text)))
    assert fault in message
    assert accepted in message
    assert "run.toml: " in message


def test_every_constraint_and_relation_belongs_to_a_key_and_has_a_bad_value_above() -> None:
    faults = [fault for _, fault, _ in BAD_VALUES]
    for key in [*CONSTRAINTS, *(relation.key for relation in RELATIONS)]:
        assert key in schema.keys(Recipe)
        assert any(key.removeprefix("parallelism.").removeprefix("checkpoint.") in fault for fault in faults), key


def test_every_number_has_a_constraint() -> None:
    numbers = {float, int, int | None, float | None, float | Literal["auto"], int | Literal["auto"]}
    numbers.add(tuple[float, float])
    unchecked = {key for key, kind in schema.keys(Recipe).items() if kind in numbers} - set(CONSTRAINTS)
    assert unchecked == set()


def test_boundary_values_are_accepted(tmp_path: Path) -> None:
    recipe = load(
        write(
            tmp_path,
            """
        [data]
        validation_fraction = 0
        [validator]
        enable = false
        [lr_scheduler]
        warmup_steps = 500
        decay_ratio = 0.5
        total_steps = 1000
        [loss]
        chunks = 2048
        [muon]
        lr = 0
        momentum = 0
        ns_steps = 1
        [checkpoint]
        keep_latest_k = 2
        [training]
        global_batch_size = -1
        """,
        )
    )
    assert (recipe.muon.momentum, recipe.checkpoint.keep_latest_k) == (0.0, 2)


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


def degrees(**changes: int) -> Recipe:
    return Recipe(parallelism=sections.Parallelism(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "world_size"),
    [
        ({}, 1),
        ({}, 8),
        ({"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}, 8),
        ({"data_parallel_shard_degree": 2, "context_parallel_degree": 2, "tensor_parallel_degree": 2}, 8),
        ({"tensor_parallel_degree": 2, "expert_parallel_degree": 8}, 8),
    ],
)
def test_fitting_degrees_are_accepted(changes: dict[str, int], world_size: int) -> None:
    check_degrees(degrees(**changes), world_size)


@pytest.mark.parametrize(
    ("changes", "world_size", "parts"),
    [
        ({"data_parallel_shard_degree": 2}, 4, ["data_parallel_shard_degree 2 takes", "_shard_degree = 4 (or -1)"]),
        ({"data_parallel_shard_degree": 1}, 2, ["data_parallel_shard_degree 1 takes 1 process, and this is 2 process"]),
        ({"tensor_parallel_degree": 3}, 4, ["tensor_parallel_degree 3 takes a multiple of 3 processes, and this is 4"]),
        (
            {"tensor_parallel_degree": 4},
            1,
            [
                "parallelism: tensor_parallel_degree 4 takes a multiple of 4 processes, and this is 1 process. Start 4 "
                "by `torchrun --nproc-per-node=4 train.py ...`, plan them by --dry-run --world-size 4; or change"
            ],
        ),
        (
            {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "context_parallel_degree": 2},
            4,
            ["data_parallel_replicate_degree 2", "takes 8 processes, and this is 4", "_shard_degree = 1 (or -1)"],
        ),
        ({"expert_parallel_degree": 3}, 4, ["expert_parallel_degree = 3", "4 x 1 x 1 = 4"]),
        ({"expert_parallel_degree": 3}, 1, ["is not accepted on 1 rank;"]),
        (
            {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 4},
            4,
            ["expert_parallel_degree = 4", "2 x 1 x 1 = 2"],
        ),
    ],
)
def test_unfit_degrees_are_refused(changes: dict[str, int], world_size: int, parts: list[str]) -> None:
    message = error_of(lambda: check_degrees(degrees(**changes), world_size))
    assert [part for part in parts if part not in message] == []


def test_the_global_batch_is_a_multiple_of_the_ranks_local_batches() -> None:
    recipe = Recipe(training=sections.Training(local_batch_size=4, global_batch_size=16))
    check_degrees(recipe, 2)
    check_degrees(recipe, 4)
    message = error_of(lambda: check_degrees(recipe, 8))
    assert "training.global_batch_size = 16" in message
    assert "= 32" in message
    replicated = dataclasses.replace(
        recipe, parallelism=sections.Parallelism(data_parallel_replicate_degree=2, tensor_parallel_degree=2)
    )
    check_degrees(replicated, 8)
    assert "= 32" in error_of(lambda: check_degrees(replicated, 16))
    assert "training.local_batch_size = 2 (or -1) keeps it" in message


def test_a_local_batch_of_minus_one_is_the_ranks_share_of_the_global_batch() -> None:
    recipe = Recipe(training=sections.Training(local_batch_size=-1, global_batch_size=8))
    assert [local_batch_size(recipe, world) for world in (1, 2, 4, 8)] == [8, 4, 2, 1]
    tensor = dataclasses.replace(recipe, parallelism=sections.Parallelism(tensor_parallel_degree=2))
    assert local_batch_size(tensor, 2) == 8
    message = error_of(lambda: check_degrees(recipe, 3))
    assert "training.global_batch_size = 8 is not accepted on 3 ranks; it takes a multiple of the 3" in message
    staged = sections.Parallelism(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=3)
    problem = batch_problem(dataclasses.replace(recipe, parallelism=staged), 4)
    assert problem is not None
    assert "pipeline_parallel_microbatch_size = 3 is not accepted; it takes a divisor of the 4 sequences" in problem


@pytest.mark.parametrize(
    ("changes", "divisor"),
    [
        ({"tensor_parallel_degree": 4}, 4),
        ({"context_parallel_degree": 2}, 4),
        ({"tensor_parallel_degree": 2, "context_parallel_degree": 2}, 8),
    ],
)
def test_the_sequence_divides_over_tensor_and_context_parallel(changes: dict[str, int], divisor: int) -> None:
    recipe = degrees(**changes)
    check_degrees(dataclasses.replace(recipe, training=sections.Training(seq_len=3 * divisor)), 4)
    odd = dataclasses.replace(recipe, training=sections.Training(seq_len=3 * divisor + divisor // 2))
    message = error_of(lambda: check_degrees(odd, 4))
    assert f"no multiple of {divisor}" in message
    assert message.startswith("parallelism."), "the user has set the degree, and not the length"


def test_without_sequence_parallel_the_sequence_need_not_divide_over_tensor_parallel() -> None:
    parallelism = sections.Parallelism(tensor_parallel_degree=2, enable_sequence_parallel=False)
    check_degrees(Recipe(parallelism=parallelism, training=sections.Training(seq_len=7)), 2)


@pytest.mark.parametrize(
    ("section", "key", "value", "needed"),
    [
        ("parallelism", "pipeline_parallel_degree", 2, (2, 14)),
        ("parallelism", "expert_parallel_degree", 2, (2, 12)),
        ("parallelism", "spmd_backend", "spmd_types", (2, 14)),
        ("loss", "chunks", 2, (2, 13)),
    ],
)
def test_a_value_that_needs_a_newer_torch_is_refused_with_a_remedy_that_works(
    monkeypatch: pytest.MonkeyPatch, section: str, key: str, value: object, needed: tuple[int, int]
) -> None:
    def check(version: str, value: object) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        recipe = Recipe()
        table = dataclasses.replace(getattr(recipe, section), **{key: value})
        check_degrees(dataclasses.replace(recipe, **{section: table}), 4)

    major, minor = needed
    for version in (f"{major}.{minor}.0", f"{major}.{minor}.0.dev20260101", f"{major}.{minor + 1}.0+cu130", "3.0.0"):
        check(version, value)
    for version in (f"{major}.{minor - 1}.0+cpu", "2.9.1"):
        message = error_of(lambda version=version: check(version, value))
        assert f"{section}.{key} = {schema.value_text(value)} is not accepted" in message
        assert f"needs torch {major}.{minor} or newer, and torch {version} is installed" in message
        remedy = tomllib.loads(f"value = {message.rpartition('set it to ')[2].removesuffix('.')}")["value"]
        check(version, remedy)
