"""Tables with TorchTitan's names and keys (a test compares them).

The help shows a key's docstring, or the comment after the key.
"""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from titan_muon.ranges import (
    COUNT,
    FRACTION,
    MAY_CHANGE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    TEXT,
    Constraint,
    MayChange,
    at_least,
    list_of,
    one_of,
)

FILE_NAME = Constraint(
    "a name that is not empty and has no slash and no line break",
    lambda value: (
        bool(value.strip()) and value.isprintable() and not {"/", "\\"} & set(value) and value not in (".", "..")
    ),
)


# Outside, two runs could share a folder and delete each other's checkpoints.
def _is_inside(path: str) -> bool:
    inside = posixpath.normpath(f"run/{path}").startswith("run/")
    return inside and path.isprintable() and not path.startswith(("/", "~")) and "://" not in path


Count = Annotated[int, COUNT]
CountOrMinusOne = Annotated[int, at_least(1, but=-1)]
Natural = Annotated[int, NOT_NEGATIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, POSITIVE]
Fraction = Annotated[float, FRACTION]
Share = Annotated[float, SHARE]
Text = Annotated[str, TEXT]
Texts = Annotated[tuple[str, ...], list_of(TEXT)]
InsideRun = Annotated[str, Constraint("a relative path inside the run's folder", _is_inside)]
PathFromRoot = Annotated[
    str, Constraint("an absolute path or a URL", lambda value: value.startswith("/") or "://" in value)
]
States = Annotated[tuple[str, ...], list_of(one_of("optimizer", "lr_scheduler", "dataloader", "train_state"))]


# A fixed global batch may be divided differently, and the schedule follows the number of steps.
WITH_GLOBAL_BATCH = MayChange(when=lambda mine, theirs: mine["training.global_batch_size"] != -1)
WITH_STEPS = MayChange(when=lambda mine, theirs: mine["training.steps"] != theirs["training.steps"])


@dataclass(frozen=True, kw_only=True)
class Training:
    """Batch, length and precision of the run."""

    local_batch_size: Annotated[CountOrMinusOne, WITH_GLOBAL_BATCH] = 8
    """Sequences per data-parallel rank and pass; -1: share of global_batch_size."""

    global_batch_size: CountOrMinusOne = -1  # Sequences per step, accumulated over passes; -1: a local batch per rank.
    seq_len: Count = 2048  # Tokens per sequence.
    steps: Annotated[Count, MAY_CHANGE] = 1000  # Optimizer steps of the run.
    max_norm: Positive = 1.0  # Largest gradient norm; larger ones are scaled down.
    dtype: Literal["float32", "bfloat16"] = "float32"  # Dtype of parameters, gradients and optimizer states.
    # auto: bfloat16, but float32 on a CPU without instructions for bfloat16.
    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"  # FSDP's dtype of parameters in passes.
    enable_cpu_offload: Annotated[bool, MAY_CHANGE] = False
    """Keep parameters, gradients and optimizer states in host memory."""

    # TorchTitan's default fails with expert parallelism on GPUs.
    disable_cuda_graphs: bool = True  # No CUDA graphs (they exclude expert parallelism's standard all-to-all).


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Parallel degrees. Their product is the world size."""

    may_change = MAY_CHANGE

    data_parallel_replicate_degree: Count = 1  # Replicas of the sharded model (HSDP).
    data_parallel_shard_degree: CountOrMinusOne = -1  # Ranks per replica (FSDP); -1: all remaining ranks.
    tensor_parallel_degree: Count = 1  # Ranks that split each layer's matrix products (TP).
    enable_sequence_parallel: bool = True  # Shard activations by sequence between TP layers.
    context_parallel_degree: Count = 1  # Ranks that split each sequence (CP).
    context_parallel_load_balancer: Literal["headtail", "ptrr", "none"] = "headtail"  # CP's split of the sequence.
    expert_parallel_degree: Count = 1  # Ranks that split the experts (EP): divides shard x CP x TP; needs torch 2.12.
    pipeline_parallel_degree: Count = 1  # Pipeline stages (PP); needs torch 2.14.
    # Not a Literal: PyTorch's list of schedules grows.
    pipeline_parallel_schedule: Text = "1F1B"  # PyTorch's name of the pipeline schedule.
    pipeline_parallel_layers_per_stage: Count | None = None  # Absent: one stage per rank, two by some schedules.

    module_fqns_per_model_part: tuple[tuple[str, ...], ...] | None = None
    """Modules of each stage, such as [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]."""

    pipeline_parallel_microbatch_size: Count = 1  # Sequences per pipeline microbatch.
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"  # When FSDP frees gathered weights.
    enable_fsdp_symm_mem: bool = False  # FSDP through symmetric memory; NVIDIA GPUs of compute capability 9.0 or newer.

    spmd_backend: Literal["auto", "partial_dtensor", "spmd_types"] = "auto"
    """TorchTitan's backend. `auto`: `partial_dtensor` before torch 2.14, then `spmd_types`."""


DEGREES: Mapping[str, str] = MappingProxyType(
    {
        "hsdp": "data_parallel_replicate_degree",
        "fsdp": "data_parallel_shard_degree",
        "tp": "tensor_parallel_degree",
        "ep": "expert_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "cp": "context_parallel_degree",
    }
)
"""Keys of [parallelism] by the usual names of the degrees."""


@dataclass(frozen=True, kw_only=True)
class LrScheduler:
    """Learning-rate schedule: warm up, hold, decay."""

    warmup_steps: Annotated[Natural, WITH_STEPS] = 0  # Steps of linear warm-up.
    total_steps: Annotated[Count | None, WITH_STEPS] = None  # Length of the schedule; absent: training.steps.
    decay_ratio: Share | None = None  # Share of decay steps at the end; absent: decay follows warm-up.
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"  # Shape of the decay.
    min_lr_factor: Share = 0.0  # Factor at the end.


@dataclass(frozen=True, kw_only=True)
class Validator:
    """Loss on the held-out documents."""

    may_change = MAY_CHANGE

    enable: bool = True  # Validate during the run.
    freq: Count = 100  # Steps between validations.
    steps: CountOrMinusOne = 10  # Global batches per validation, equal on every layout; -1: all of the text.


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming (PyTorch's distributed checkpoints)."""

    may_change = MAY_CHANGE

    enable: bool = True  # Save checkpoints.
    folder: InsideRun = "checkpoint"  # Folder inside the run's folder.
    freq: Count = 500  # Steps between checkpoints; the last step, Ctrl-C and SIGTERM save too.
    load_only: bool = False  # Load checkpoints and never write.

    load: Text = "none"
    """`none`: new run. `latest`: continue the newest run of this recipe and name. Or a run's folder."""

    load_step: Annotated[int, at_least(0, but=-1)] = -1  # Step to load; -1: the newest whole checkpoint.
    # TorchTitan keeps the previous checkpoint, because the newest may not be on disk yet.
    keep_latest_k: Annotated[int, at_least(2, but=0)] = 3  # Number of checkpoints to keep; 0: all.
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"  # How to write beside training.
    last_save_model_only: bool = False  # Write only the model at the last step; the run cannot continue.
    last_save_in_hf: bool = False  # Write the last step as Hugging Face safetensors; needs last_save_model_only.
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"  # Dtype of a model-only checkpoint.
    initial_load_path: PathFromRoot | None = None  # Absolute path of a checkpoint for the start of a new run.
    initial_load_model_only: bool = True  # Load only the model from initial_load_path.
    initial_load_in_hf: bool = False  # initial_load_path, or else model.hf_assets_path, has Hugging Face safetensors.
    initial_load_in_hf_quantized: bool = False  # The safetensors are quantized, like DeepSeek-V3's.
    exclude_from_loading: States = ()  # States not to load: optimizer, lr_scheduler, dataloader, train_state.


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Console, TensorBoard and the metrics file."""

    may_change = MAY_CHANGE

    log_freq: Count = 10  # Steps between log lines.
    enable_tensorboard: bool = True  # Write TensorBoard events.
    enable_wandb: bool = False  # Write to Weights & Biases, as its variables say (WANDB_PROJECT, WANDB_MODE).
    disable_color_printing: bool = False  # Plain log lines.


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile."""

    may_change = MAY_CHANGE

    enable: bool = False  # Compile the components.
    components: Annotated[tuple[str, ...], list_of(one_of("model", "loss"))] = ("model", "loss")  # Compiled components.
    backend: Text = "inductor"  # Compiler.
    enable_async_tensor_parallel: bool = False  # Overlap TP's collectives with matrix products; GPUs only.


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Time-outs of collectives, in seconds."""

    may_change = MAY_CHANGE

    init_timeout_seconds: Count = 300  # Until the end of the first step.
    train_timeout_seconds: Count = 100  # After the first step.
    trace_buf_size: Natural = 0  # Entries of NCCL's flight recorder, for files in dump_folder/comm_traces; 0: off.


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Reproducibility."""

    seed: Natural = 0  # Seed of the model's initialisation.
    deterministic: bool = False  # Deterministic kernels, or an error.
    detect_anomaly: Annotated[bool, MAY_CHANGE] = False  # Name the forward operation in a failed backward; slow.
    moe_force_load_balance: bool = False  # Route tokens round robin, for speed measurements only.
    check_replicas_freq: Annotated[Natural, MAY_CHANGE] = 100
    """Steps between comparisons of replicas; 0 compares before each save only."""


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """PyTorch profiler traces and memory snapshots."""

    may_change = MAY_CHANGE

    enable_profiling: bool = False  # Write traces into the run's profiling/traces.
    profile_freq: Count = 10  # Steps per trace: wait, profiler_warmup, profiler_active.
    profiler_active: Count = 1  # Steps in a trace.
    profiler_warmup: Natural = 3  # Warm-up steps before a trace.
    enable_memory_snapshot: bool = False  # Write snapshots into the run's profiling/memory_snapshot; GPUs only.
