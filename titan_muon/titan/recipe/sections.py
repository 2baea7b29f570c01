"""The tables of a recipe, one frozen dataclass each. Pure data: no torch, no torchtitan, nothing derived.

Those that TorchTitan also has are in `torchtitan_sections`. A key that is `None` here is absent from the TOML, which
has no null.
"""

from dataclasses import dataclass, field
from typing import Literal

from titan_muon.titan.recipe.torchtitan_sections import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Compile,
    Debug,
    LrScheduler,
    Metrics,
    Parallelism,
    Profiler,
    Training,
    Validator,
)

__all__ = [
    "ActivationCheckpoint",
    "Adam",
    "AdamW",
    "Checkpoint",
    "Comm",
    "Compile",
    "Data",
    "Debug",
    "Link",
    "LrScheduler",
    "Metrics",
    "Model",
    "Muon",
    "Optimizer",
    "Parallelism",
    "Placement",
    "Profiler",
    "Rule",
    "Split",
    "Training",
    "Validator",
]


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
class Placement:
    """Where the Muon matrices rest between steps."""

    muon: str = "shard0"
    """`shard0`: cut into rows over the FSDP ranks. `owned`: whole on one rank. Or a name registered by a package."""

    replicas: Literal["each", "one"] = "each"
    """With `owned` under HSDP: an owner in each replica, or one owner in the world, which sends to all replicas."""


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

    orthogonalize: Literal["auto", "standard", "gram", "reference"] = "auto"
    """`auto`: the cheapest that is safe for each shape. `reference`: torch.optim.Muon's arithmetic, bit for bit."""

    ns_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of Newton-Schulz. `auto`, by the device: bfloat16 on the CPU, float16 after normalization on GPUs."""

    ns_kernel: Literal["auto", "plain", "triton", "quack"] = "auto"
    """What makes symmetric products on GPUs. `auto` is what benchmarks/bench_orthogonalize.py measured to win there."""

    exchange: str = "all_to_all"
    """How the pieces of a matrix meet: `all_to_all`, `all_gather`, `all_gather_reduce_scatter`, or `auto`."""

    owners: Literal["balanced", "round_robin", "per_layer", "everyone"] = "balanced"
    """Who orthogonalizes which matrix. `balanced` weighs all by their FLOPs; `everyone` is for `all_gather`."""

    replicas: Literal["split", "redundant", "auto"] = "split"
    """Whether ranks that hold copies of a matrix share out the work, repeat it, or do what is faster."""

    buffer_gib: float | Literal["auto"] = "auto"
    """Most GiB of exchange buffers on a rank. `auto` is the smallest that cost no balance, up to 4."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of matrices in transit. bfloat16 loses nothing: Newton-Schulz starts and ends in it."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the momentum."""

    missing_grad: Literal["error", "skip"] = "error"
    """A parameter without a gradient on some rank: an error on all ranks, or left alone by all in that step."""

    nonfinite: Literal["error", "skip", "propagate"] = "error"
    """Matrices that are not finite get no update, and the next step is an error on all ranks, or warns and goes on."""

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
