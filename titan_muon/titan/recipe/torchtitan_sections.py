"""The tables of a recipe that TorchTitan also has, with its names for them and their keys: a test holds them so."""

# Pure data, frozen: no torch, no torchtitan, nothing derived. A key that is `None` here is absent from the TOML.

import posixpath
from dataclasses import dataclass
from typing import Annotated, Literal

from titan_muon.options import COUNT, NOT_NEGATIVE, POSITIVE, TEXT, Constraint, at_least, each, from_to, one_of

# A path that leads elsewhere would let two runs share a folder, and each purge the other's checkpoints.
INSIDE_RUN = Constraint(
    "a relative path inside the run's folder",
    lambda path: (
        not path.startswith(("/", "~")) and "://" not in path and posixpath.normpath(f"run/{path}").startswith("run/")
    ),
)
STATES = each(one_of("optimizer", "lr_scheduler", "dataloader", "train_state"))
PATH_FROM_ROOT = Constraint("an absolute path or a URL", lambda value: value.startswith("/") or "://" in value)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Batch, length and precision of the run."""

    local_batch_size: Annotated[int, at_least(1, but=-1)] = 8
    """Sequences per data-parallel rank in one forward and backward; -1 is a rank's share of global_batch_size."""

    global_batch_size: Annotated[int, at_least(1, but=-1)] = -1
    """Sequences per optimizer step over all ranks, accumulating gradients; -1 is one local batch on each rank."""

    seq_len: Annotated[int, COUNT] = 2048
    """Tokens per sequence."""

    steps: Annotated[int, COUNT] = 1000
    """Optimizer steps of the run."""

    max_norm: Annotated[float, POSITIVE] = 1.0
    """Largest gradient norm; gradients above it are scaled down."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which parameters, gradients and optimizer states are stored."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of parameters in forward and backward under FSDP."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Dtype in which FSDP reduces gradients."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory."""

    # Not TorchTitan's default, under which a recipe with expert parallelism would not start on a GPU.
    disable_cuda_graphs: bool = True
    """Run forward and backward without CUDA graphs (they exclude expert parallelism's standard all-to-all)."""

    gc_freq: Annotated[int, COUNT] = 50
    """Steps between garbage collections."""

    gc_debug: bool = False
    """Collect garbage in every step and look for reference cycles that keep tensors alive: slow."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How many ranks share what. The degrees multiply to the world size."""

    data_parallel_replicate_degree: Annotated[int, COUNT] = 1
    """Replicas of the sharded model (HSDP)."""

    data_parallel_shard_degree: Annotated[int, at_least(1, but=-1)] = -1
    """Ranks that share one copy of the parameters (FSDP); -1 is all that the other degrees leave."""

    tensor_parallel_degree: Annotated[int, COUNT] = 1
    """Ranks that share each layer's matrix products (TP)."""

    enable_sequence_parallel: bool = True
    """Shard activations along the sequence between TP layers."""

    context_parallel_degree: Annotated[int, COUNT] = 1
    """Ranks that share each sequence (CP)."""

    context_parallel_load_balancer: Literal["headtail", "ptrr", "none"] = "headtail"
    """How CP deals out the sequence, so that every rank has as much attention to compute."""

    expert_parallel_degree: Annotated[int, COUNT] = 1
    """Ranks that share the experts (EP), taken out of FSDP and TP: it divides shard x CP x TP."""

    pipeline_parallel_degree: Annotated[int, COUNT] = 1
    """Pipeline stages (PP); needs torch 2.14."""

    # Not a Literal: PyTorch looks schedules up by name, and its list grows.
    pipeline_parallel_schedule: Annotated[str, TEXT] = "1F1B"
    """Pipeline schedule, by PyTorch's name."""

    pipeline_parallel_schedule_csv: Annotated[str | None, TEXT] = None
    """File with a schedule of your own; pipeline_parallel_schedule is then PipelineScheduleMulti."""

    pipeline_parallel_layers_per_stage: Annotated[int | None, COUNT] = None
    """Layers per stage; absent, one stage on each rank, and two under schedules that take several."""

    pipeline_parallel_first_stage_less_layers: Annotated[int, NOT_NEGATIVE] = 1
    """Layers that the embedding counts for when layers are dealt out to stages."""

    pipeline_parallel_last_stage_less_layers: Annotated[int, NOT_NEGATIVE] = 1
    """Layers that the head counts for when layers are dealt out to stages."""

    module_fqns_per_model_part: tuple[tuple[str, ...], ...] | None = None
    """Modules of each stage, such as [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]."""

    pipeline_parallel_microbatch_size: Annotated[int, COUNT] = 1
    """Sequences per pipeline microbatch."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP frees gathered parameters after forward."""

    enable_fsdp_symm_mem: bool = False
    """Have FSDP communicate through symmetric memory; NVIDIA GPUs of compute capability 9.0 and newer."""

    spmd_backend: Literal["auto", "partial_dtensor", "spmd_types"] = "auto"
    """TorchTitan's SPMD backend. `auto` is `partial_dtensor` before torch 2.14 and `spmd_types` from it on."""


@dataclass(frozen=True, kw_only=True)
class LrScheduler:
    """Learning-rate schedule, one shape for all groups: warm up, hold, decay."""

    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps of linear warm-up."""

    total_steps: Annotated[int | None, COUNT] = None
    """Length of the schedule; absent, training.steps."""

    decay_ratio: Annotated[float | None, from_to(0, 1)] = None
    """Share of the steps spent decaying at the end; absent, decay starts right after warm-up."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: Annotated[float, from_to(0, 1)] = 0.0
    """Factor reached at the end."""


@dataclass(frozen=True, kw_only=True)
class Validator:
    """Loss on the held-out documents."""

    enable: bool = True
    """Validate during the run."""

    freq: Annotated[int, COUNT] = 100
    """Steps between validations."""

    steps: Annotated[int, at_least(1, but=-1)] = 10
    """Global batches of held-out text per validation, the same on every layout; -1 is all of the held-out text."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming (PyTorch's distributed checkpoints)."""

    enable: bool = True
    """Save checkpoints."""

    folder: Annotated[str, INSIDE_RUN] = "checkpoint"
    """Folder inside the run's folder."""

    interval: Annotated[int, COUNT] = 500
    """Steps between checkpoints. One more is written at the end, and on Ctrl-C or SIGTERM."""

    enable_first_step_checkpoint: bool = False
    """Write one after the first step too, to see early that saving works."""

    load_only: bool = False
    """Load checkpoints and never write one."""

    load: Annotated[str, TEXT] = "none"
    """`none` starts anew. `latest` continues this recipe's newest run with a whole checkpoint. Or a run's folder."""

    load_step: Annotated[int, at_least(0, but=-1)] = -1
    """Step to load; -1 is the newest whole checkpoint."""

    # The newest checkpoint may still be on its way to disk, so TorchTitan keeps the one before it too.
    keep_latest_k: Annotated[int, at_least(2, but=0)] = 3
    """Checkpoints kept; 0 keeps all."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """How a checkpoint is written."""

    last_save_model_only: bool = False
    """Write only the model at the last step: smaller, but the run cannot be continued from it."""

    last_save_in_hf: bool = False
    """Write the model at the last step as Hugging Face safetensors; needs last_save_model_only."""

    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Dtype of a model-only checkpoint."""

    initial_load_path: Annotated[str | None, PATH_FROM_ROOT] = None
    """Checkpoint to start a new run from; an absolute path."""

    initial_load_model_only: bool = True
    """Take only the model from initial_load_path."""

    initial_load_in_hf: bool = False
    """initial_load_path, or without it model.hf_assets_path, holds Hugging Face safetensors."""

    initial_load_in_hf_quantized: bool = False
    """Those safetensors are quantized, as DeepSeek-V3 is published."""

    exclude_from_loading: Annotated[tuple[str, ...], STATES] = ()
    """States that are not loaded: optimizer, lr_scheduler, dataloader, train_state."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Console, TensorBoard and the metrics file."""

    log_freq: Annotated[int, COUNT] = 10
    """Steps between log lines."""

    enable_tensorboard: bool = True
    """Write TensorBoard events."""

    save_tb_folder: Annotated[str, INSIDE_RUN] = "tb"
    """Folder of those inside the run's folder."""

    enable_wandb: bool = False
    """Write to Weights & Biases."""

    disable_color_printing: bool = False
    """Plain log lines."""

    save_for_all_ranks: bool = False
    """Write metrics of every rank, not of one."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the components."""

    components: Annotated[tuple[str, ...], each(one_of("model", "loss"))] = ("model", "loss")
    """What is compiled."""

    backend: Annotated[str, TEXT] = "inductor"
    """Compiler."""

    enable_async_tensor_parallel: bool = False
    """Overlap the collectives of TP with its matrix products, piece by piece; GPUs only."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Time-outs of collectives, in seconds."""

    init_timeout_seconds: Annotated[int, COUNT] = 300
    """Until the first step is done."""

    train_timeout_seconds: Annotated[int, COUNT] = 100
    """After it."""

    trace_buf_size: Annotated[int, NOT_NEGATIVE] = 0
    """Entries of NCCL's flight recorder; 0 is off."""

    save_traces_folder: Annotated[str, TEXT] = "comm_traces"
    """Folder inside dump_folder where the flight recorder writes what each rank waited for when a collective hung."""

    save_traces_file_prefix: Annotated[str, TEXT] = "rank_"
    """Beginning of its files' names; the rank follows."""


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Reproducibility."""

    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of the model's initialisation."""

    deterministic: bool = False
    """Deterministic kernels; an operation that has none is an error."""

    deterministic_warn_only: bool = False
    """With deterministic: an operation that has none warns."""

    detect_anomaly: bool = False
    """Name the forward operation in the error of a backward that fails: slow."""

    moe_force_load_balance: bool = False
    """Route tokens round robin: for measuring speed only."""


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """PyTorch profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Write traces."""

    save_traces_folder: Annotated[str, INSIDE_RUN] = "profile_traces"
    """Folder inside the run's folder."""

    profile_freq: Annotated[int, COUNT] = 10
    """Steps from one trace to the next: waiting, then profiler_warmup, then profiler_active."""

    profiler_active: Annotated[int, COUNT] = 1
    """Steps in a trace."""

    profiler_warmup: Annotated[int, NOT_NEGATIVE] = 3
    """Steps before them in which the profiler runs and records nothing."""

    profiler_repeat: Annotated[int | None, COUNT] = None
    """Traces in all; absent, until the run ends."""

    profiler_skip_first: Annotated[int | None, NOT_NEGATIVE] = None
    """Steps before the first profile_freq steps begin."""

    profiler_skip_first_wait: Annotated[int | None, NOT_NEGATIVE] = None
    """1 begins the first trace without waiting."""

    enable_memory_snapshot: bool = False
    """Write memory snapshots; GPUs only."""

    memory_snapshot_freq: Annotated[int | None, COUNT] = None
    """Steps between memory snapshots; absent, profile_freq."""

    save_memory_snapshot_folder: Annotated[str, TEXT] = "memory_snapshots"
    """Folder inside the run's folder."""

    memory_snapshot_max_entries: Annotated[int, COUNT] = 1_000_000
    """Allocations in a snapshot, the last ones."""
