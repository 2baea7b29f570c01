"""The recipe: a frozen dataclass of tables. `None` is an absent key, because TOML has no null.

The help shows a key's docstring, or the comment after the key.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_muon.assignment.options import Rule
from titan_muon.options import Expert, Hyperparameters, Machine, StateDtype, StepOptions
from titan_muon.planner.ownership import PlacementRule
from titan_muon.ranges import FRACTION, MAY_CHANGE, NOT_NEGATIVE, Constraint, MayChange, at_least, list_of
from titan_muon.trainer.recipe import torchtitan_sections as titan
from titan_muon.trainer.recipe.torchtitan_sections import (
    FILE_NAME,
    Count,
    Fraction,
    Natural,
    NotNegative,
    Positive,
    Share,
    Text,
    Texts,
)

# A URL would become a local folder of that name.
LOCAL_FOLDER = Constraint(
    "a folder on a file system, not a URL and without line breaks",
    lambda value: bool(value.strip()) and value.isprintable() and "://" not in value,
)
# A cycle of the mixture has at most 100,000 blocks for each weight.
THOUSANDTHS = Constraint(
    "a number from 0.001 to 100 with at most 3 decimals",
    lambda value: 0.001 <= value <= 100 and round(value, 3) == value,
)


# Both other modes compute the same.
WITHOUT_CLIP = MayChange(when=lambda mine, theirs: "clip" not in (mine["qk_clip.mode"], theirs["qk_clip.mode"]))


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to train."""

    name: Text = "qwen3"  # Model family: a module of `models/`.
    flavor: Text = "moe_tiny"  # Size of the family, by name in that module.
    vocab_size: Count | None = None  # Rows of embedding and head; absent: the tokenizer's, or the flavor's for `hf`.
    hf_assets_path: str | None = None  # Hugging Face folder; last_save_in_hf writes its safetensors index's shards.

    attention: Annotated[Literal["auto", "flex", "varlen", "dense"], MAY_CHANGE] = "auto"
    """Inner attention. `auto`: `flex` on GPUs, `dense` (SDPA with a mask) on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Text source and tokenizer."""

    source: Literal["python", "files", "hf"] = "python"
    """`python`: the standard library's source code. `files`: `data.files`. `hf`: TorchTitan's loader. Absent: `files`
    with `data.files`, `hf` with `data.dataset` or `data.dataset_path`."""

    files: Texts = ()  # For source `files`: folders and glob patterns, as paths or as URLs that fsspec knows.
    weights: Annotated[tuple[float, ...], list_of(THOUSANDTHS)] = ()
    """Share of training blocks for each entry of `data.files`, in any unit; empty: one stream of all documents."""

    text_key: Text = "text"  # Field with the text in `.jsonl` and `.parquet` rows.
    bad_rows: Literal["refuse", "skip"] = "refuse"  # `skip`: leave out and count rows of `.jsonl` without text.
    token_dtype: Literal["uint16", "uint32"] = "uint16"  # Of `.bin` files: raw tokens, little-endian, no header.
    token_marks: Annotated[tuple[int, ...], list_of(NOT_NEGATIVE)] = ()
    """Ids between the documents of `.bin` and `.npy` files, which the tokenizer's marks replace."""

    dataset: Text = "c4"  # For source `hf`: TorchTitan's name of the dataset.
    dataset_path: str | None = None  # For source `hf`: local folder or hub name instead of the dataset's path.

    tokenizer: Literal["bytes", "bpe", "hf"] = "bytes"
    """`bytes`: no download. `bpe`: trained once on the text and cached. `hf`: `data.tokenizer_path`."""

    # Less than 256 bytes and two special tokens cannot encode every text.
    vocab_size: Annotated[int, at_least(258)] = 2048  # Vocabulary of `bpe`, special tokens included.
    tokenizer_path: str | None = None  # For tokenizer `hf`: folder with `tokenizer.json`.
    validation_fraction: Fraction = 0.02  # Share of documents held out, by content, equal for every seed.
    seed: Natural = 0  # Seed of the documents' order.
    workers: Annotated[int, NOT_NEGATIVE, MAY_CHANGE] = 0
    """Processes that tokenize beside the reading. 0: none. For source `hf`: loaders of each rank."""

    cache: Annotated[str, LOCAL_FOLDER, MAY_CHANGE] = ".cache/titan_muon"
    """Folder of tokenized text and trained tokenizers."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Placement of Muon's matrices between steps."""

    may_change = MAY_CHANGE

    # Not a Literal: packages register placements.
    muon: Text = "shard0"  # `shard0`: rows over the FSDP ranks. `owned`: whole on one rank. Or a registered name.

    replicas: Literal["each", "one"] | None = None
    """Owners under HSDP: `one`, or one in `each` replica. Absent: `each` for PP and owners by rank, else `one`."""

    rule: tuple[PlacementRule, ...] = ()  # Rules in order; the first match decides, else `placement.muon`.


@dataclass(frozen=True, kw_only=True)
class Muon(StepOptions, Hyperparameters):
    """Muon (Keller Jordan, 2024)."""

    expert: Expert = field(default_factory=Expert)


@dataclass(frozen=True, kw_only=True)
class QKClip:
    """QK-clip (MuonClip; Kimi K2, 2025): scales down heads with large attention logits."""

    mode: Annotated[Literal["off", "log", "clip"], WITHOUT_CLIP] = "off"
    """`log`: report each layer's largest logit. `clip`: also scale query and key weights of heads above threshold."""

    threshold: Positive = 100.0  # Largest allowed logit of a head.
    alpha: Share = 0.5  # Share of the factor for queries; keys take the rest.


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Cross entropy."""

    may_change = MAY_CHANGE

    chunks: Annotated[
        int | Literal["auto"], Constraint('"auto" or 1 or more', lambda value: value == "auto" or value >= 1)
    ] = "auto"
    """Chunks of a sequence, one chunk's logits at a time. Above 1 needs torch 2.13. `auto`: 8 on GPUs if 8 divides the
    length, 1 on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Activations kept for backward."""

    may_change = MAY_CHANGE

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """`selective`: keep matrix products and communication. `full`: block inputs. `memory_budget`: as many as fit."""

    memory_budget: Share = 0.5  # With `memory_budget`: from 0, as little as `full`, to 1, all; the compiler chooses.

    force_recompute_mm_shapes_by_fqns: tuple[str, ...] = ("moe.router.gate",)
    """With `selective`: recompute products with the shapes of these modules."""


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Float8 matrix products in forward and backward (TorchTitan's converters; needs torchao and GPUs with float8)."""

    linear: bool = False  # Linear layers with sizes in multiples of 16.
    experts: bool = False  # Grouped products of experts.

    recipe_name: Literal["rowwise", "rowwise_with_gw_hp"] = "rowwise"
    """Scales per row, or also weight gradients in higher precision."""

    filter_fqns: Texts = ("lm_head", "router.gate")
    """Excluded linear layers, by parts of their names; `auto_filter_small_kn` excludes slow sizes."""

    emulate: bool = False  # Emulate linear layers, without float8 hardware.


PRODUCTS = ("attention", "feed_forward", "shared_experts")
"""Parts of the names of linear layers with large products."""


@dataclass(frozen=True, kw_only=True)
class MXFP8:
    """MXFP8 matrix products (TorchTitan's converters; needs torchao and NVIDIA GPUs of compute capability 10.0)."""

    linear: bool = False  # Linear layers.
    experts: bool = False  # Grouped products of experts.
    fqns: Texts = PRODUCTS  # Converted linear layers, by parts of their names; empty: all.
    pad_multiple: Count = 128  # Multiple to which an expert's tokens are padded; kernels need 32 or 128.


@dataclass(frozen=True, kw_only=True)
class NVFP4:
    """NVFP4 matrix products (TorchTitan's converter; needs torchao and NVIDIA GPUs of compute capability 10.0)."""

    linear: bool = False  # Linear layers with sizes in multiples of 128.
    fqns: Texts = PRODUCTS  # Converted linear layers, by parts of their names; empty: all.


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Hyperparameters of AdamW."""

    lr: NotNegative = 1e-3  # Learning rate.

    betas: Annotated[tuple[float, float], list_of(FRACTION)] = (0.9, 0.95)
    """Decay of the averages of the gradient and of its square."""

    # 0 is allowed, unlike for Muon, which would divide a zero matrix by eps.
    eps: NotNegative = 1e-8  # Added to the denominator.
    weight_decay: NotNegative = 0.1  # Decoupled weight decay, times the learning rate.
    state_dtype: StateDtype = "parameter"  # Dtype of both averages; `bfloat16` for betas to 0.99, computed in float32.


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Assignment of optimizers to parameters."""

    rule: tuple[Rule, ...] = ()  # Rules in order; the first match decides, else the defaults.

    implementation: Annotated[Literal["auto", "for-loop", "foreach", "fused"], MAY_CHANGE] = "auto"
    """Implementation of AdamW. `auto`: `fused` on GPUs and `foreach` on the CPU."""

    offload: Annotated[Literal["none", "state"], MAY_CHANGE] = "none"
    """`state`: optimizer states in pinned host memory, copied part by part."""

    # "adamw" means all but Muon, so that other packages' optimizers are clipped by default.
    clip: Literal["adamw", "all", "none"] = "adamw"
    """Gradients that training.max_norm clips. `adamw`: all but Muon's, because Muon's update has a fixed size."""

    router: Literal["adamw", "muon"] = "adamw"  # Default optimizer of MoE router matrices.
    decay_vectors: bool = False  # Decay norms, biases and other vectors too. A rule's own `weight_decay` always holds.
    defaults: bool = True  # Apply the defaults to parameters without a rule; false: refuse these parameters.


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run: a field for each TOML table, in the order of the help."""

    # tyro would show a comment above a table instead of the docstring.

    name: Annotated[str, FILE_NAME, MAY_CHANGE] = "recipe"
    """Name of the run; default: the name of the file."""

    dump_folder: Annotated[str, LOCAL_FOLDER, MAY_CHANGE] = "runs"
    """Folder of all runs."""

    imports: Texts = ()
    """Modules to import first, which register algorithms, optimizers, placements or models (flag `--import`)."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: titan.Training = field(default_factory=titan.Training)
    parallelism: titan.Parallelism = field(default_factory=titan.Parallelism)
    placement: Placement = field(default_factory=Placement)
    muon: Muon = field(default_factory=Muon)
    machine: Machine = field(default_factory=Machine)
    qk_clip: QKClip = field(default_factory=QKClip)
    adamw: AdamW = field(default_factory=AdamW)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: titan.LrScheduler = field(default_factory=titan.LrScheduler)
    loss: Loss = field(default_factory=Loss)
    validator: titan.Validator = field(default_factory=titan.Validator)
    checkpoint: titan.Checkpoint = field(default_factory=titan.Checkpoint)
    metrics: titan.Metrics = field(default_factory=titan.Metrics)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: titan.Compile = field(default_factory=titan.Compile)
    float8: Float8 = field(default_factory=Float8)
    mxfp8: MXFP8 = field(default_factory=MXFP8)
    nvfp4: NVFP4 = field(default_factory=NVFP4)
    comm: titan.Comm = field(default_factory=titan.Comm)
    debug: titan.Debug = field(default_factory=titan.Debug)
    profiler: titan.Profiler = field(default_factory=titan.Profiler)
