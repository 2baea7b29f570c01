"""What earlier versions had: what it did, and what to do instead. Keys are those of a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import NamedTuple, ParamSpec, TypeVar

from .ranges import OptionError

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


class Removed(NamedTuple):
    """A removed option. `default`: its value without effect. `problem`: follows the option's name."""

    default: object
    problem: str


BY_PROBLEM: Mapping[str, Mapping[str, object]] = {
    "was removed: write the rates into a file, and name it in machine.file": {
        **dict.fromkeys(("machine.tflops", "machine.tflops_float32", "machine.memory_gb", "machine.launch_us")),
        **dict.fromkeys(("machine.node_gb", "machine.node_latency_us")),
        **dict.fromkeys(("machine.network_gb", "machine.network_latency_us")),
    },
    "was removed: measure in a hook of the optimizers' step, or judge its updates by titan_muon.audit": {
        "monitor.freq": 0,
        "monitor.matrices": 2,
    },
    "was removed: qk_clip.threshold is of all heads; AttentionLayer.thresholds of the library has one for each": {
        "qk_clip.rule": []
    },
    "was removed: set the environment variable WANDB_PROJECT": {"metrics.wandb_project": "titan-muon"},
    "was removed: set the environment variable WANDB_MODE=offline": {"metrics.wandb_offline": False},
    "was removed: the rank with the loss writes the metrics, which are of all ranks; leave it out": {
        "metrics.save_for_all_ranks": False
    },
    "was removed, because no recipe needed another value than {}; leave it out": {
        "training.gc_debug": False,
        "training.gc_freq": 50,
        "training.mixed_precision_reduce": "float32",
        "checkpoint.enable_first_step_checkpoint": False,
        "metrics.save_tb_folder": "tb",
        "activation_checkpoint.visualize_memory_budget_pareto": False,
        "activation_checkpoint.preserve_rng_state": True,
        "activation_checkpoint.determinism_check": "default",
        "activation_checkpoint.debug": False,
        "comm.save_traces_folder": "comm_traces",
        "comm.save_traces_file_prefix": "rank_",
        "profiler.memory_snapshot_max_entries": 1_000_000,
    },
    "was renamed; set data.workers, which also tokenizes other sources": {"data.num_workers": 0},
    "was removed; set data.workers, which loads beside training": {
        **dict.fromkeys(("data.prefetch_factor", "data.persistent_workers", "data.pin_memory"), False)
    },
    "was removed: it weighed embedding and head; name each stage's modules in module_fqns_per_model_part": {
        "parallelism.pipeline_parallel_first_stage_less_layers": 1,
        "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    },
    "was removed: set parallelism.pipeline_parallel_schedule to one of PyTorch's schedules": {
        "parallelism.pipeline_parallel_schedule_csv": None
    },
    "was removed: it only warned; set debug.deterministic = false to go on with other kernels": {
        "debug.deterministic_warn_only": False
    },
    "was removed; set profiler.profile_freq, the steps between traces": {
        **dict.fromkeys(("profiler.profiler_repeat", "profiler.profiler_skip_first")),
        **dict.fromkeys(("profiler.profiler_skip_first_wait", "profiler.memory_snapshot_freq")),
    },
    "was removed; the run's folder profiling/ has traces and snapshots": {
        "profiler.save_traces_folder": "profile_traces",
        "profiler.save_memory_snapshot_folder": "memory_snapshots",
    },
    "was removed: it let several ranks orthogonalize slices of a matrix; leave it out, and one rank orthogonalizes "
    "each matrix": {"muon.expert.split_over": 1},
    "was removed: it let the ranks of a mesh axis orthogonalize slices or blocks of a matrix; leave it out, and an "
    "owner orthogonalizes each matrix": {"muon.expert.tp_mode": "owner"},
    "was removed: it orthogonalized the parts that ranks store between two steps on whole matrices (MuonBP); leave it "
    "out, and each step is of whole matrices": {"muon.expert.whole_freq": 1},
    "was removed with whole_freq: it scaled the learning rate of steps on parts; leave it out": {
        "muon.expert.block_lr_scale": 1.0
    },
    # `tensor_parallel`: the name before `tp_pieces`.
    'was removed: "whole" kept all pieces of an owned matrix on one tensor-parallel rank; leave it out, and each rank '
    "keeps its piece": {"placement.tp_pieces": "peers", "placement.tensor_parallel": "peers"},
}
"""Problem -> values without effect, by key. `{}` in a problem is the value."""
OPTIONS: Mapping[str, Removed] = MappingProxyType(
    {
        key: Removed(default, problem.format(json.dumps(default)))
        for problem, defaults in BY_PROBLEM.items()
        for key, default in defaults.items()
    }
)

UNDOING = "was removed, because undoing parts of a step on the device took up to twice its time; set 'skip_step', which"
VALUES: Mapping[tuple[str, object], str] = MappingProxyType(
    {
        ("muon.overlap", "backward"): "was removed: it gathered matrices during backward, and saved at most 0.24 % of "
        "a training step; set 'forward', which hides the returns, or 'none'",
        ("optimizer", "adamh"): "was removed, because weights were zero in a step; use 'adamw' for these parameters, "
        "and algorithm = 'muonh' for matrices",
        ("muon.ns_coefficients", "aol"): "was removed: it scaled rows and no run gained by it; set another set, as "
        "'polar_express'",
        ("muon.expert.on_bad_gradient", "skip"): f"{UNDOING} skips whole steps on all ranks, or 'skip_missing'",
        ("muon.expert.on_bad_gradient", "skip_nonfinite"): f"{UNDOING} skips whole steps on all ranks",
        ("muon.expert.ns_kernel", "quack"): "was removed: no run measured it; set 'auto' or 'triton'",
    }
)
"""Removed values of options, each with a problem."""

FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "completion": "was removed; --help TABLE lists the keys of a table",
        "html": "was removed; the plan is text, and --json FILE has it as numbers",
        "suggest": "was removed, because its model ranked layouts that no cluster had measured; compare some by "
        "--compare KEY=A,B, or take the layout of a shipped recipe",
    }
)
"""Removed flags of train.py, each with a problem."""


def refuse_removed(names: Iterable[str]) -> None:
    """Raise OptionError for an option of an earlier version."""
    for name in names:
        for table in ("muon.expert", "muon", "placement"):
            if found := OPTIONS.get(f"{table}.{name}"):
                raise OptionError(name, found.problem)


def refusing_removed(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which raises OptionError for a keyword of an earlier version."""

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> T:
        refuse_removed(keywords)
        return function(*args, **keywords)

    return call


def refuses_removed(options: type[C]) -> type[C]:
    """The class with a constructor that raises OptionError for an option of an earlier version."""
    options.__init__ = refusing_removed(options.__init__)  # type: ignore[method-assign]
    return options


def removed_value(name: str, value: object) -> str | None:
    """The problem of a removed value of an option of Muon. None for another value."""
    if not isinstance(value, str):
        return None
    problem = VALUES.get((f"muon.{name}", value)) or VALUES.get((f"muon.expert.{name}", value))
    return None if problem is None else f"= {value!r} {problem}"
