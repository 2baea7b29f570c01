"""The recipe: one frozen dataclass made of its tables. Pure data: no torch, no torchtitan, nothing derived.

Muon's options are declared in `titan_muon.options`, tables that TorchTitan also has in `torchtitan_sections`. A range
stands at its field. A key that is `None` here is absent from the TOML, which has no null.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_muon.options import (
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    Constraint,
    Hyperparameters,
    Machine,
    PlacementRule,
    Rule,
    StateDtype,
    StepOptions,
    at_least,
    each,
    from_to,
)
from titan_muon.titan.recipe.torchtitan_sections import (
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

# A URL would become a folder of that name on this machine's disk.
LOCAL_FOLDER = Constraint(
    "a folder on a file system, not a URL", lambda value: bool(value.strip()) and "://" not in value
)
FILE_NAME = Constraint(
    "a name that is not empty and has no slash",
    lambda value: bool(value.strip()) and not {"/", "\\"} & set(value) and value not in (".", ".."),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model is trained."""

    name: Annotated[str, TEXT] = "qwen3"
    """Model family: a module of `models/`."""

    flavor: Annotated[str, TEXT] = "moe_tiny"
    """Size of the family, by its name in that module."""

    vocab_size: Annotated[int | None, COUNT] = None
    """Rows of embedding and head; absent, the tokenizer's for `bytes` and `bpe` and the flavor's own for `hf`."""

    hf_assets_path: str | None = None
    """Folder of the model's Hugging Face files: with its safetensors index last_save_in_hf writes the same shards."""

    attention: Literal["auto", "flex", "varlen", "dense"] = "auto"
    """Inner attention. `auto` is `flex` on GPUs and `dense` (SDPA with the packed documents' mask) on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the text comes from and how it becomes tokens."""

    source: Literal["python", "files", "hf"] = "python"
    """`python`: the standard library's source, on every machine. `files`: `data.files`. `hf`: TorchTitan's loader."""

    files: Annotated[tuple[str, ...], each(TEXT)] = ()
    """Glob patterns of the text files for source `files`; a relative pattern starts at the working directory."""

    dataset: Annotated[str, TEXT] = "c4"
    """TorchTitan's name of the dataset, for source `hf`."""

    dataset_path: str | None = None
    """Local folder or hub name that replaces the dataset's own path, for source `hf`."""

    tokenizer: Literal["bytes", "bpe", "hf"] = "bytes"
    """`bytes`: nothing to download. `bpe`: trained once on the text and cached. `hf`: `data.tokenizer_path`."""

    # 256 bytes and two marks: with fewer, some text could not be written in tokens.
    vocab_size: Annotated[int, at_least(258)] = 2048
    """Tokens that `bpe` trains, its marks included."""

    tokenizer_path: str | None = None
    """Folder with `tokenizer.json`, for tokenizer `hf`."""

    validation_fraction: Annotated[float, FRACTION] = 0.02
    """Share of the documents held out for validation, chosen by name, the same for every seed."""

    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of the order in which documents are read."""

    num_workers: Annotated[int, NOT_NEGATIVE] = 0
    """Processes that load and tokenize on each rank, for source `hf`; 0 loads between the steps."""

    prefetch_factor: Annotated[int | None, COUNT] = None
    """Batches that each of them has ready; absent, 2."""

    persistent_workers: bool = False
    """Keep them from one epoch to the next."""

    pin_memory: bool = False
    """Hand out batches of source `hf` in pinned memory, which is copied to a GPU beside the host."""

    cache: Annotated[str, LOCAL_FOLDER] = ".cache/titan_muon"
    """Folder of tokenized text and trained tokenizers."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the Muon matrices are between steps."""

    # Not a Literal: packages register placements, and their names are known only once they are asked for.
    muon: Annotated[str, TEXT] = "shard0"
    """`shard0`: cut into rows over the FSDP ranks. `owned`: whole on one rank. Or a name registered by a package."""

    replicas: Literal["each", "one"] | None = None
    """With `owned` under HSDP: an owner in `each` replica, or `one` in the world, so that each matrix is orthogonalized
    once. Absent: `one`, but `each` under pipeline parallelism and where a rule names an owner by its rank."""

    tensor_parallel: Literal["peers", "whole"] = "peers"
    """With `owned` under TP: `peers` have a piece each and exchange pieces in the step; or one rank has the `whole`,
    and exchanges pieces in every pass, which pays where a step has one microbatch."""

    rule: tuple[PlacementRule, ...] = ()
    """Rules in order; the first that matches decides. What none matches follows `placement.muon` if Muon takes it."""


@dataclass(frozen=True, kw_only=True)
class Muon(StepOptions, Hyperparameters):
    """Hyperparameters of Muon (Keller Jordan, 2024) and how it runs on many ranks."""

    # Muon itself does not know where a recipe has put its matrices; by Muon's own default the replicas would exchange
    # in each step what `owned` has placed so that they need not.
    replicas: Literal["split", "redundant"] | None = None  # type: ignore[assignment]
    """Whether ranks that hold copies `split` the work or repeat it; absent: `redundant` under `owned`, else `split`."""

    # Not Muon's own keyword: people think of memory in GiB, and TOML cannot write the keyword's None.
    buffer_gib: Annotated[
        float | Literal["auto"], Constraint('"auto" or more than 0', lambda value: value == "auto" or value > 0)
    ] = "auto"
    """Most GiB of exchange buffers on a rank. `auto`: 1 with the workspace, more if each saves 3 % or, from 2, 10."""


@dataclass(frozen=True, kw_only=True)
class QKClip:
    """QK-clip (MuonClip; Kimi K2, 2025): heads whose attention logits grow too large are scaled down after a step."""

    mode: Literal["off", "log", "clip"] = "off"
    """`log` reports the largest logit of each layer, `clip` also scales the query and key weights of heads above."""

    threshold: Annotated[float, POSITIVE] = 100.0
    """Largest logit of a head that is let be."""

    alpha: Annotated[float, from_to(0, 1)] = 0.5
    """Share of the factor that query weights take; key weights take the rest."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How the cross entropy is computed."""

    chunks: Annotated[
        int | Literal["auto"], Constraint('"auto" or 1 or more', lambda value: value == "auto" or value >= 1)
    ] = "auto"
    """Pieces of a sequence whose logits exist one after another. `auto`: 8 on GPUs where 8 divides it, 1 on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """What forward keeps for backward."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """`selective` keeps matrix products and communication, `full` each block's input, `memory_budget` what fits."""

    memory_budget: Annotated[float, from_to(0, 1)] = 0.5
    """With `memory_budget`: 0 keeps as little as `full`, 1 all; the compiler chooses what lies between."""

    visualize_memory_budget_pareto: bool = False
    """With `memory_budget`: draw run time against memory for all budgets, in the run's memory_budget_pareto; slow."""

    force_recompute_mm_shapes_by_fqns: tuple[str, ...] = ("moe.router.gate",)
    """With `selective`: matrix products of these modules' shapes are computed again, not kept."""

    preserve_rng_state: bool = True
    """Draw the same random numbers when activations are computed again."""

    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes and dtypes of what is computed again with the first time, or nothing."""

    debug: bool = False
    """Record where activations come from, to find what differs the second time: slow."""


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Matrix products of forward and backward in float8 (TorchTitan's converters; needs torchao and GPUs with it)."""

    # Parameters, their gradients and the optimizer see nothing of it: weights are cast where they are multiplied.

    linear: bool = False
    """Linear layers, where both sizes are multiples of 16."""

    experts: bool = False
    """Experts' grouped products."""

    recipe_name: Literal["rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """Scales of linear layers: one a row, or with the products for the weights' gradients in higher precision."""

    filter_fqns: Annotated[tuple[str, ...], each(TEXT)] = ("lm_head", "router.gate")
    """Linear layers with one of these in their name are left out; `auto_filter_small_kn` leaves out slow sizes."""

    emulate: bool = False
    """Compute linear layers' float8 products by others: to try them where hardware has none."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Hyperparameters of AdamW."""

    lr: Annotated[float, NOT_NEGATIVE] = 1e-3
    """Learning rate."""

    betas: Annotated[tuple[float, float], each(FRACTION)] = (0.9, 0.95)
    """Decay of the averages of the gradient and its square."""

    # 0 is allowed, unlike Muon's: it is added to a root of squares, where Muon's is what a zero matrix is divided by.
    eps: Annotated[float, NOT_NEGATIVE] = 1e-8
    """Added to the denominator."""

    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled weight decay, scaled by the learning rate."""

    state_dtype: StateDtype = "parameter"
    """Dtype of both averages: their parameter's, or `bfloat16`, for betas up to 0.99; float32 computes either."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Which optimizer takes which parameter."""

    rule: tuple[Rule, ...] = ()
    """Rules in order; the first that matches decides. Parameters that none matches follow the defaults."""

    implementation: Literal["auto", "for-loop", "foreach", "fused"] = "auto"
    """How AdamW runs. `auto` is `fused` on GPUs and `foreach` on the CPU."""

    offload: Literal["none", "state"] = "none"
    """`state`: all optimizers' states are in pinned host memory, and a step brings a part at a time to the device."""

    # "adamw" stands for every optimizer but Muon: one that a package brings must not go unclipped by default.
    clip: Literal["adamw", "all", "none"] = "adamw"
    """Whose gradients training.max_norm clips. `adamw`: all but Muon's, since its update does not grow with them."""

    router: Literal["adamw", "muon"] = "adamw"
    """Default optimizer of MoE router matrices."""

    defaults: bool = True
    """Apply the defaults to what no rule matches. If false, such a parameter is an error."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a run is: one field for each table of the TOML file, and nothing derived."""

    # In the order of the help, of the resolved recipe.toml and of `differences`. No comment may stand above a table:
    # tyro would show it in the help, instead of the table's own docstring.

    name: Annotated[str, FILE_NAME] = "recipe"
    """Name of the run; a file that gives none is named after itself."""

    dump_folder: Annotated[str, LOCAL_FOLDER] = "runs"
    """Folder of all runs."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    placement: Placement = field(default_factory=Placement)
    muon: Muon = field(default_factory=Muon)
    machine: Machine = field(default_factory=Machine)
    qk_clip: QKClip = field(default_factory=QKClip)
    adamw: AdamW = field(default_factory=AdamW)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LrScheduler = field(default_factory=LrScheduler)
    loss: Loss = field(default_factory=Loss)
    validator: Validator = field(default_factory=Validator)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    profiler: Profiler = field(default_factory=Profiler)
