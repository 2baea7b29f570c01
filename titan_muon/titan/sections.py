"""The tables of a recipe, one frozen dataclass each. Pure data: no torch, no torchtitan, nothing derived.

Tables that TorchTitan also has keep its name and its keys' names and meaning; a test holds them to the installed
TorchTitan. `model`, `data`, `validator.steps`'s default, `muon`, `adamw`, `adam`, `placement` and `optimizer` are ours.
A key that is `None` here is absent from the TOML, which has no null.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model is trained."""

    name: str = "qwen3"
    """Model family: a module of `models/`."""

    flavor: str = "moe_tiny"
    """Size of the family, by its name in that module."""

    vocab_size: int | None = None
    """Rows of embedding and head; absent, the tokenizer's for `bytes` and `bpe` and the flavor's own for `hf`."""

    attention: Literal["auto", "flex", "varlen", "dense"] = "auto"
    """Inner attention. `auto` is `flex` on GPUs and `dense` (SDPA with the packed documents' mask) on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the text comes from and how it becomes tokens."""

    source: Literal["python", "files", "hf"] = "python"
    """`python`: the standard library's source, on every machine. `files`: `data.files`. `hf`: TorchTitan's loader."""

    files: tuple[str, ...] = ()
    """Glob patterns of the text files for source `files`; a relative pattern starts at the working directory."""

    dataset: str = "c4"
    """TorchTitan's name of the dataset, for source `hf`."""

    dataset_path: str | None = None
    """Local folder or hub name that replaces the dataset's own path, for source `hf`."""

    tokenizer: Literal["bytes", "bpe", "hf"] = "bytes"
    """`bytes`: nothing to download. `bpe`: trained once on the text and cached. `hf`: `data.tokenizer_path`."""

    vocab_size: int = 2048
    """Tokens that `bpe` trains, its marks included."""

    tokenizer_path: str | None = None
    """Folder with `tokenizer.json`, for tokenizer `hf`."""

    validation_fraction: float = 0.02
    """Share of the documents held out for validation, chosen by name, the same for every seed."""

    seed: int = 0
    """Seed of the order in which documents are read."""

    cache: str = ".cache/titan_muon"
    """Folder of tokenized text and trained tokenizers."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Batch, length and precision of the run."""

    local_batch_size: int = 8
    """Sequences per data-parallel rank in one forward and backward."""

    global_batch_size: int = -1
    """Sequences per optimizer step over all ranks; -1 is one local batch on each. More accumulates gradients."""

    seq_len: int = 2048
    """Tokens per sequence."""

    steps: int = 1000
    """Optimizer steps of the run."""

    max_norm: float = 1.0
    """Largest gradient norm; gradients above it are scaled down."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters, gradients and optimizer states at rest."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of parameters in forward and backward under FSDP."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Dtype in which FSDP reduces gradients."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory."""

    disable_cuda_graphs: bool = True
    """Run forward and backward without CUDA graphs (they exclude expert parallelism's standard all-to-all)."""

    gc_freq: int = 50
    """Steps between garbage collections."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How many ranks share what. The degrees multiply to the world size."""

    data_parallel_replicate_degree: int = 1
    """Replicas of the sharded model (HSDP)."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of the parameters (FSDP); -1 is all that the other degrees leave."""

    tensor_parallel_degree: int = 1
    """Ranks that share each layer's matrix products (TP)."""

    enable_sequence_parallel: bool = True
    """Shard activations along the sequence between TP layers."""

    context_parallel_degree: int = 1
    """Ranks that share each sequence (CP)."""

    context_parallel_load_balancer: Literal["headtail", "ptrr", "none"] = "headtail"
    """How CP deals out the sequence, so that every rank has as much attention to compute."""

    expert_parallel_degree: int = 1
    """Ranks that share the experts (EP), taken out of FSDP and TP: it divides shard x CP x TP."""

    pipeline_parallel_degree: int = 1
    """Pipeline stages (PP); needs torch 2.14."""

    pipeline_parallel_schedule: str = "1F1B"
    """Pipeline schedule, by PyTorch's name."""

    pipeline_parallel_microbatch_size: int = 1
    """Sequences per pipeline microbatch."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP frees gathered parameters after forward."""

    spmd_backend: Literal["auto", "partial_dtensor", "spmd_types"] = "auto"
    """TorchTitan's SPMD backend. `auto` is `partial_dtensor` before torch 2.14 and `spmd_types` from it on."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the Muon matrices rest between steps."""

    muon: str = "shard0"
    """`shard0`: cut into rows over the FSDP ranks. `owned`: whole on one rank. Or a name registered by a package."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """One `[[muon.split]]`: how parameters whose name matches are cut into matrices."""

    match: str
    """Glob on the parameter's fully qualified name; `*` also crosses dots."""

    rows: tuple[int, ...] = ()
    """Rows of the matrices in order; the pattern repeats. One number cuts heads, three cut fused q, k and v."""

    joined: bool = False
    """Rows at the same place of the repeated pattern are one matrix, as TorchTitan fuses q, k and v."""

    row_dims: int | None = None
    """Leading dims that are flattened to rows; absent, all but the last. 1 makes matrices of convolutions."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What communication costs, for the choices that are `auto`."""

    bandwidth_gb: float = 45.0
    """Gigabytes per second that one rank sends."""

    latency_us: float = 15.0
    """Microseconds of one collective before the first byte."""

    tflops: float = 700.0
    """TFLOP/s at which one rank orthogonalizes."""


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Hyperparameters of Muon (Keller Jordan, 2024) and how it runs on many ranks."""

    lr: float = 1e-3
    """Learning rate."""

    momentum: float = 0.95
    """Decay of the exponential moving average of gradients."""

    nesterov: bool = True
    """Orthogonalize the gradient blended with its average, not the average alone."""

    weight_decay: float = 0.1
    """Decoupled weight decay, scaled by the learning rate."""

    ns_steps: int = 5
    """Newton-Schulz iterations."""

    ns_coefficients: str | tuple[tuple[float, float, float], ...] = "keller_jordan"
    """Name of a coefficient set, or a list of [a, b, c], one for each step."""

    eps: float = 1e-7
    """Smallest norm that a matrix is divided by."""

    lr_scale: Literal["match_rms_adamw", "original", "spectral"] = "match_rms_adamw"
    """Factor on the learning rate from a matrix's shape: 0.2 sqrt(max(m, n)), sqrt(max(1, m/n)) or sqrt(m/n)."""

    orthogonalize: str = "reference"
    """Newton-Schulz algorithm. `reference` is torch.optim.Muon's arithmetic."""

    exchange: str = "all_to_all"
    """How the pieces of a matrix meet: `all_to_all`, `all_gather`, `all_gather_reduce_scatter`, or `auto`."""

    owners: Literal["balanced", "round_robin", "per_layer", "everyone"] = "balanced"
    """Who orthogonalizes which matrix. `balanced` weighs all by their FLOPs; `everyone` is for `all_gather`."""

    replicas: Literal["split", "redundant", "auto"] = "split"
    """Whether ranks that hold copies of a matrix share out the work, repeat it, or do what is faster."""

    buffer_gib: float | None = None
    """Most GiB of exchange buffers on a rank; absent, the smallest that cost no balance, up to 4."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of matrices in transit. bfloat16 loses nothing: Newton-Schulz starts and ends in it."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the momentum."""

    missing_grad: Literal["error", "skip"] = "error"
    """A parameter without a gradient on some rank: an error on all ranks, or left alone by all in that step."""

    release_grads: bool = False
    """Free each gradient as soon as it is packed."""

    split: tuple[Split, ...] = ()
    """Which parameters are cut into several matrices; the first that matches counts."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Hyperparameters of AdamW."""

    lr: float = 1e-3
    """Learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the averages of the gradient and its square."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.1
    """Decoupled weight decay, scaled by the learning rate."""


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Hyperparameters of Adam; its weight decay is added to the gradient."""

    lr: float = 1e-3
    """Learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the averages of the gradient and its square."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.0
    """L2 penalty."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One `[[optimizer.rule]]`: parameters whose name matches go to an optimizer."""

    match: str
    """Glob on the parameter's fully qualified name; `*` also crosses dots."""

    optimizer: str
    """Name of a registered optimizer."""

    options: dict[str, object] = field(default_factory=dict)
    """Hyperparameters that differ from the optimizer's own table, for these parameters only."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Which optimizer takes which parameter."""

    rule: tuple[Rule, ...] = ()
    """Rules in order; the first that matches decides. Parameters that none matches follow the defaults."""

    implementation: Literal["auto", "for-loop", "foreach", "fused"] = "auto"
    """How AdamW and Adam run. `auto` is `fused` on GPUs and `foreach` on the CPU."""

    clip: Literal["adamw", "all", "none"] = "adamw"
    """Whose gradients training.max_norm clips. Muon's update does not grow with its gradient: the default spares it."""

    router: Literal["adamw", "muon"] = "adamw"
    """Default optimizer of MoE router matrices."""

    defaults: bool = True
    """Apply the defaults to what no rule matches. If false, such a parameter is an error."""


@dataclass(frozen=True, kw_only=True)
class LrScheduler:
    """Learning-rate schedule, one shape for all groups: warm up, hold, decay."""

    warmup_steps: int = 0
    """Steps of linear warm-up."""

    total_steps: int | None = None
    """Length of the schedule; absent, training.steps."""

    decay_ratio: float | None = None
    """Share of the steps spent decaying at the end; absent, decay starts right after warm-up."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: float = 0.0
    """Factor reached at the end."""


@dataclass(frozen=True, kw_only=True)
class Validator:
    """Loss on the held-out documents."""

    enable: bool = True
    """Validate during the run."""

    freq: int = 100
    """Steps between validations."""

    steps: int = 10
    """Batches per validation on each data-parallel rank."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming (PyTorch's distributed checkpoints)."""

    enable: bool = True
    """Save checkpoints."""

    folder: str = "checkpoint"
    """Folder inside the run's folder."""

    interval: int = 500
    """Steps between checkpoints. One more is written at the end, and on Ctrl-C or SIGTERM."""

    load: str = "none"
    """`none` starts anew. `latest` continues this recipe's newest run with a whole checkpoint. Or a run's folder."""

    load_step: int = -1
    """Step to load; -1 is the newest whole checkpoint."""

    keep_latest_k: int = 3
    """Checkpoints kept; 0 keeps all."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """How a checkpoint is written."""

    last_save_model_only: bool = False
    """Write only the model at the last step: smaller, but the run cannot be continued from it."""

    last_save_in_hf: bool = False
    """Write the model at the last step as Hugging Face safetensors; needs last_save_model_only."""

    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Dtype of a model-only checkpoint."""

    initial_load_path: str | None = None
    """Checkpoint to start a new run from; an absolute path."""

    initial_load_model_only: bool = True
    """Take only the model from initial_load_path."""

    initial_load_in_hf: bool = False
    """initial_load_path holds Hugging Face safetensors."""

    exclude_from_loading: tuple[str, ...] = ()
    """States that are not loaded: optimizer, lr_scheduler, dataloader, train_state."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Console, TensorBoard and the metrics file."""

    log_freq: int = 10
    """Steps between log lines."""

    enable_tensorboard: bool = True
    """Write TensorBoard events."""

    enable_wandb: bool = False
    """Write to Weights & Biases."""

    disable_color_printing: bool = False
    """Plain log lines."""

    save_for_all_ranks: bool = False
    """Write metrics of every rank, not of one."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """What forward keeps for backward."""

    mode: Literal["none", "selective", "full"] = "none"
    """`selective` keeps matrix products and communication, `full` keeps only the input of each block."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the components."""

    components: tuple[str, ...] = ("model", "loss")
    """What is compiled."""

    backend: str = "inductor"
    """Compiler."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Time-outs of collectives, in seconds."""

    init_timeout_seconds: int = 300
    """Until the first step is done."""

    train_timeout_seconds: int = 100
    """After it."""

    trace_buf_size: int = 0
    """Entries of NCCL's flight recorder; 0 is off."""


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Reproducibility."""

    seed: int = 0
    """Seed of the model's initialisation."""

    deterministic: bool = False
    """Deterministic kernels where PyTorch has them."""

    moe_force_load_balance: bool = False
    """Route tokens round robin: for measuring speed only."""


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """PyTorch profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Write traces."""

    save_traces_folder: str = "profile_traces"
    """Folder inside the run's folder."""

    profile_freq: int = 10
    """Steps between traces."""

    enable_memory_snapshot: bool = False
    """Write memory snapshots."""
