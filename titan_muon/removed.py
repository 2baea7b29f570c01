"""What earlier versions had: what it did, and what to do instead. Keys are those of a recipe."""

from __future__ import annotations

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


TP_PIECES = Removed(
    "peers",
    'was removed: "whole" kept all pieces of an owned matrix on one tensor-parallel rank; leave it out, and each rank '
    "keeps its piece",
)
OPTIONS: Mapping[str, Removed] = MappingProxyType(
    {
        **{
            f"machine.{rate}": Removed(None, "was removed: write the rates into a file, and name it in machine.file")
            for rate in (
                *("tflops", "tflops_float32", "memory_gb", "launch_us"),
                *("node_gb", "node_latency_us", "network_gb", "network_latency_us"),
            )
        },
        **{
            f"monitor.{key}": Removed(
                default,
                "was removed: measure in a hook of the optimizers' step, or judge its updates by titan_muon.audit",
            )
            for key, default in (("freq", 0), ("matrices", 2))
        },
        "qk_clip.rule": Removed(
            [],
            "was removed: qk_clip.threshold is of all heads; AttentionLayer.thresholds of the library has one for each",
        ),
        "metrics.wandb_project": Removed("titan-muon", "was removed: set the environment variable WANDB_PROJECT"),
        "metrics.wandb_offline": Removed(False, "was removed: set the environment variable WANDB_MODE=offline"),
        "metrics.save_for_all_ranks": Removed(
            False, "was removed: the rank with the loss writes the metrics, which are of all ranks; leave it out"
        ),
        **{
            key: Removed(default, f"was removed, because no recipe needed another value than {shown}; leave it out")
            for key, default, shown in (
                ("training.gc_debug", False, "false"),
                ("training.gc_freq", 50, "50"),
                ("training.mixed_precision_reduce", "float32", '"float32"'),
                ("checkpoint.enable_first_step_checkpoint", False, "false"),
                ("metrics.save_tb_folder", "tb", '"tb"'),
                ("activation_checkpoint.visualize_memory_budget_pareto", False, "false"),
                ("activation_checkpoint.preserve_rng_state", True, "true"),
                ("activation_checkpoint.determinism_check", "default", '"default"'),
                ("activation_checkpoint.debug", False, "false"),
                ("comm.save_traces_folder", "comm_traces", '"comm_traces"'),
                ("comm.save_traces_file_prefix", "rank_", '"rank_"'),
                ("profiler.memory_snapshot_max_entries", 1_000_000, "1,000,000"),
            )
        },
        "data.num_workers": Removed(0, "was renamed; set data.workers, which also tokenizes other sources"),
        **{
            f"data.{key}": Removed(False, "was removed; set data.workers, which loads beside training")
            for key in ("prefetch_factor", "persistent_workers", "pin_memory")
        },
        **{
            f"parallelism.pipeline_parallel_{key}_stage_less_layers": Removed(
                1, "was removed: it weighed embedding and head; name each stage's modules in module_fqns_per_model_part"
            )
            for key in ("first", "last")
        },
        "parallelism.pipeline_parallel_schedule_csv": Removed(
            None, "was removed: set parallelism.pipeline_parallel_schedule to one of PyTorch's schedules"
        ),
        "debug.deterministic_warn_only": Removed(
            False, "was removed: it only warned; set debug.deterministic = false to go on with other kernels"
        ),
        **{
            f"profiler.{key}": Removed(None, "was removed; set profiler.profile_freq, the steps between traces")
            for key in ("profiler_repeat", "profiler_skip_first", "profiler_skip_first_wait", "memory_snapshot_freq")
        },
        **{
            f"profiler.{key}": Removed(folder, "was removed; the run's folder profiling/ has traces and snapshots")
            for key, folder in (
                ("save_traces_folder", "profile_traces"),
                ("save_memory_snapshot_folder", "memory_snapshots"),
            )
        },
        "muon.expert.split_over": Removed(
            1,
            "was removed: it let several ranks orthogonalize slices of a matrix; leave it out, and one rank "
            "orthogonalizes each matrix",
        ),
        "muon.expert.tp_mode": Removed(
            "owner",
            "was removed: it let the ranks of a mesh axis orthogonalize slices or blocks of a matrix; leave it out, "
            "and an owner orthogonalizes each matrix",
        ),
        "muon.expert.whole_freq": Removed(
            1,
            "was removed: it orthogonalized the parts that ranks store between two steps on whole matrices (MuonBP); "
            "leave it out, and each step is of whole matrices",
        ),
        "muon.expert.block_lr_scale": Removed(
            1.0, "was removed with whole_freq: it scaled the learning rate of steps on parts; leave it out"
        ),
        "placement.tp_pieces": TP_PIECES,
        # The name before tp_pieces.
        "placement.tensor_parallel": TP_PIECES,
    }
)

VALUES: Mapping[tuple[str, object], str] = MappingProxyType(
    {
        ("muon.overlap", "backward"): "was removed: it gathered matrices during backward, and saved at most 0.24 % of "
        "a training step; set 'forward', which hides the returns, or 'none'",
        (
            "optimizer",
            "adamh",
        ): "was removed, because weights were zero in a step; use 'adamw' for these parameters, and "
        "algorithm = 'muonh' for matrices",
        ("muon.ns_coefficients", "aol"): "was removed: it scaled rows and no run gained by it; set another set, as "
        "'polar_express'",
        (
            "muon.expert.on_bad_gradient",
            "skip",
        ): "was removed, because undoing parts of a step on the device took up to "
        "twice its time; set 'skip_step', which skips whole steps on all ranks, or 'skip_missing'",
        ("muon.expert.on_bad_gradient", "skip_nonfinite"): "was removed, because undoing parts of a step on the device "
        "took up to twice its time; set 'skip_step', which skips whole steps on all ranks",
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
