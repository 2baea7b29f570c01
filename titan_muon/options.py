"""Every option of Muon: name, type, default, meaning and range.

Imports only the standard library, because `planner/` and a recipe's `--help` work without PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .ranges import COUNT, FRACTION, MAY_CHANGE, NOT_NEGATIVE, POSITIVE, SWITCH, TEXT, Constraint
from .ranges import OptionError as OptionError
from .removed import refuse_removed, refuses_removed, removed_value


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 rank`, `2 ranks`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


# A slice, because a set has no order.
ALGORITHM = Constraint(
    "a name, or a list of different names",
    lambda value: TEXT.holds(value) if isinstance(value, str) else 0 < len(value) == len({*value[:]}),
)


@dataclass(frozen=True, kw_only=True)
class Split:
    """One `[[muon.split]]`: how to cut matching parameters into several matrices."""

    match: str
    """Glob on fully qualified names; `*` also crosses dots."""

    dims: str
    """einops notation, `(g f) d -> g | f d`: axes of the matrix count, then rows and columns."""

    lengths: dict[str, int | tuple[int, ...]] = field(default_factory=dict, hash=False)
    """Lengths of axes in `dims` that the shape leaves open. A list cuts an axis before the bar into unequal parts."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine for the plan: a name, or a file of measured rates."""

    may_change = MAY_CHANGE

    name: Literal["auto", "h100x8", "h200x8", "b200x8", "gb200x72", "gb300x72", "cpu"] = "auto"
    """Nodes of 8 GPUs, or racks of 72 in one NVLink domain, with a network of 400 Gb/s for each GPU (`gb300x72`: 800).
    `auto`: `h100x8` on GPUs, `cpu` on CPUs."""

    file: Annotated[str, TEXT] | None = None
    """File of measured rates instead of the named machine's: `machine.json` of `make gpu`, or one in its form."""

    ranks_per_node: Annotated[int, COUNT] | None = None
    """Ranks in one node, or in one NVLink domain."""


Offload = Literal["none", "state", "parameters"]
"""Tensors on the host between steps: none, optimizer states, or also parameters and gradients."""
OnBadGradient = Literal["error", "skip_missing", "skip_step"]
"""See `Expert.on_bad_gradient`."""
Overlap = Literal["none", "forward"]
StateDtype = Literal["parameter", "bfloat16"]

SLOWEST_IN_BFLOAT16 = 0.99
# Largest beta of an average in bfloat16, whose rounding stops an average with 0.99 within 40 % of a constant input.

CoefficientSet = Literal[
    "keller_jordan",
    "you_jiacheng",
    "polar_express",
    "polar_express_cushion",
    "deepseek_v4",
    "cans",
    "pion",
    "pion_promotion",
]
"""Names in `orthogonalize.coefficients.COEFFICIENTS`."""
NS_COEFFICIENTS = Constraint(
    f"{', '.join(get_args(CoefficientSet))}, or a list that is not empty",
    lambda value: isinstance(value, Sequence) and bool(value),
)
GIB = Constraint('"auto" or more than 0', lambda value: value == "auto" or value > 0)
AdjustLrFn = Literal["match_rms_adamw", "original", "spectral_unclamped"]
ADJUST_LR_FN = Constraint(
    f"{', '.join(get_args(AdjustLrFn))}, or a number above 0",
    lambda value: value in (None, *get_args(AdjustLrFn)) or (type(value) in (int, float) and POSITIVE.holds(value)),
)


@refuses_removed
@dataclass(frozen=True, kw_only=True)
class Expert:
    """Options that few runs set: `expert=Expert(...)` of Muon and Hybrid, `[muon.expert]` of a recipe."""

    orthogonalize: Literal["auto", "standard", "gram", "reference"] = "auto"
    """Newton-Schulz algorithm. `auto`: the cheapest safe one by shape. `reference`: the bits of torch.optim.Muon."""

    ns_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of Newton-Schulz. `auto`: float16 on GPUs, bfloat16 on CPUs with instructions for it, else float32."""

    ns_kernel: Literal["auto", "plain", "triton"] = "auto"
    """Kernel of symmetric products on GPUs if 16 divides both sides. `auto`: the fastest measured on this GPU."""

    exchange: Annotated[Literal["all_to_all", "two_hops", "all_gather", "all_gather_reduce_scatter"], MAY_CHANGE] = (
        "all_to_all"
    )
    """Collective to assemble a sharded matrix: `all_to_all` to one rank (hierarchical over replicas, and `two_hops`
    over nodes from 256 ranks on, if faster), `all_gather` to all ranks, which repeat the work, or
    `all_gather_reduce_scatter` (docs/exchange.md)."""

    planner: Annotated[Literal["search", "rule"], MAY_CHANGE] = "search"
    """Owners and rounds: by a `search` for the fastest modelled step on a machine, or by a fixed `rule` without a
    machine."""

    replicas: Annotated[Literal["auto", "split", "redundant"], MAY_CHANGE] = "auto"
    """Replicas of a matrix, as under HSDP and DDP, `split` or repeat the work (`redundant`, for very slow links).
    `auto`: `split`, but `redundant` in a recipe with owners in `each` replica."""

    wire_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of matrices in transit. bfloat16 is lossless, because Newton-Schulz starts and ends in bfloat16; results of
    float16 products travel in float16, in as many bytes."""

    eps: Annotated[float, POSITIVE] = 1e-14
    """Lower bound of the norm that divides a matrix. torch.optim.Muon's 1e-7 gives the same bits for larger norms."""

    soap_freq: Annotated[int, COUNT] = 10
    """Steps between two refreshes of a matrix's eigenbases, with `algorithm` = "soap"."""

    decay_follows_lr: bool = False
    """Multiply weight decay by the learning rate over the highest rate of the schedule (AdamC, arXiv:2506.02285): a
    group's `max_lr`, or the `initial_lr` of its scheduler."""

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Rounding of bfloat16 weights. `nearest` loses small updates; `stochastic` keeps small updates on average."""

    on_bad_gradient: OnBadGradient = "error"
    """A missing gradient raises on all ranks that share matrices. A matrix with a non-finite gradient gets no update,
    and the next step raises. `skip_missing`: a parameter without a gradient on some rank is left out on all ranks, and
    the host waits in every step. `skip_step`: after a missing or non-finite gradient on any rank, the step changes
    nothing on all ranks, and the next step warns."""

    idle: Literal["move", "hold"] = "move"
    """A matrix with a zero gradient, as of an expert without tokens: `move` by the momentum, as torch.optim.Muon, or
    `hold`: only decay, with a warning after 20 steps."""

    release_grads: Annotated[bool, MAY_CHANGE] = False
    """Free each gradient after packing."""

    keep_buffers: Annotated[bool, MAY_CHANGE] = False
    """Keep exchange buffers and workspace allocated between steps. Reallocation in each step fragments the memory of a
    GPU unless PYTORCH_ALLOC_CONF has expandable_segments:True."""

    algorithm_options: dict[str, dict[str, object]] = field(default_factory=dict, hash=False)
    """Options of registered algorithms by name, for the fields of their `Options` (docs/your_own_algorithm.md)."""

    fused: Annotated[bool | Literal["auto"], SWITCH] = "auto"
    """Triton kernels for momentum and update: two launches for a bucket, which read and write each tensor once. `auto`:
    on GPUs with Triton, for algorithms with the element-wise arithmetic of "muon"; the plan names others."""

    cuda_graph: Annotated[bool | Literal["auto"], SWITCH, MAY_CHANGE] = "auto"
    """Launch a step as one CUDA graph, from the fourth step on. Needs `fused`, and keeps buffers as `keep_buffers`.
    `auto`: off, because no GPU has measured it (docs/cuda_graph.md)."""

    buffer_gib: Annotated[float | Literal["auto"], GIB, MAY_CHANGE] = "auto"
    """Largest GiB of exchange buffers of a rank. `auto`: 1 with workspace. Each GiB more must save 3 % of the step
    time, from 2 GiB on 10 %."""

    @property
    def skips_missing(self) -> bool:
        """Whether a step leaves out a parameter without a gradient."""
        return self.on_bad_gradient == "skip_missing"

    @property
    def skips_step(self) -> bool:
        """Whether a missing or non-finite gradient on any rank skips the step."""
        return self.on_bad_gradient == "skip_step"

    @property
    def buffer_bytes(self) -> int | None:
        """Largest bytes of exchange buffers. None: automatic."""
        return None if self.buffer_gib == "auto" else int(self.buffer_gib * 2**30)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Options that may differ between parameter groups, with `Expert.eps`."""

    lr: Annotated[float, NOT_NEGATIVE] = 1e-3
    """Learning rate."""

    momentum: Annotated[float, FRACTION] = 0.95
    """Decay of the average of gradients."""

    nesterov: bool = True
    """Orthogonalize the gradient blended with the average, instead of the average."""

    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled weight decay, scaled by the learning rate."""

    ns_steps: Annotated[int, COUNT] = 5
    """Newton-Schulz iterations."""

    ns_coefficients: Annotated[CoefficientSet | tuple[tuple[float, float, float], ...], NS_COEFFICIENTS] = (
        "keller_jordan"
    )
    """Name of a coefficient set, or a list of [a, b, c] for each step, or of one for all steps."""

    adjust_lr_fn: Annotated[float | AdjustLrFn | None, ADJUST_LR_FN] = "match_rms_adamw"
    """Factor on the learning rate of an m x n matrix: 0.2 sqrt(max(m, n)), sqrt(max(1, m/n)) or sqrt(m/n). A number r,
    as DeepSeek-V4's 0.18: r sqrt(max(m, n)). In Python, None is "original", torch.optim.Muon's default."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of all parameters of a Muon. Only `algorithm` may differ by parameter group."""

    algorithm: Annotated[str | tuple[str, ...], ALGORITHM] = "muon"
    """Function of a matrix: `muon`, `muoneq`, `muoneq_columns`, `muoneq_both`, `normuon`, `adamuon`, `muonh`, `soap`
    (docs/algorithms.md), or a registered one. A list composes algorithms: `["normuon", "muonh"]`. A parameter group, or
    `options` of an `[[optimizer.rule]]`, may have another algorithm."""

    beta2: Annotated[float, FRACTION] = 0.95
    """Decay of the average of squared updates, with `algorithm` = "normuon" or "adamuon"; with "soap", of the squares
    and products of gradients."""

    momentum_warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps in which the decay of the momentum rises linearly from `momentum_start` to `momentum`."""

    momentum_start: Annotated[float, FRACTION] = 0.85
    """Decay of the momentum in the first step, with `momentum_warmup_steps`."""

    cautious: bool = False
    """Decay weights only where the update also moves the weight towards zero (arXiv:2510.12402)."""

    state: Annotated[Literal["replicated", "owner"], MAY_CHANGE] = "replicated"
    """Keepers of the momentum of replicas, as under HSDP and DDP: every holder, or only the owner."""

    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of the momentum. `int8` has a float32 scale for each 64 elements of a row, and rounds stochastically."""

    overlap: Annotated[Overlap, MAY_CHANGE] = "none"
    """`forward`: return and apply the last results of a step during the next forward, before each layer."""

    split: tuple[Split, ...] = ()
    """How to cut parameters into several matrices; the first match counts."""


@dataclass(frozen=True, kw_only=True)
class MuonOptions(StepOptions, Hyperparameters, Expert):
    """All options of Muon, as its step reads them: those of Expert are beside the others. Raises OptionError."""

    machine: Machine = Machine()
    """The machine for the plan."""

    offload: Offload = "none"
    """Tensors on the host, which a step streams to the device by bucket: the momentum (`state`), or also parameters and
    gradients (`parameters`). FSDP's CPUOffloadPolicy implies `parameters`."""

    def __post_init__(self) -> None:
        check(type(self), vars(self))
        check(Machine, vars(self.machine), "machine.")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The names of the algorithms."""
        return (self.algorithm,) if isinstance(self.algorithm, str) else self.algorithm

    @property
    def counts_steps(self) -> bool:
        """Whether a step needs its number, besides for stochastic rounding."""
        return self.momentum_warmup_steps > 0 or self.state_dtype == "int8"

    @property
    def by_matrix(self) -> bool:
        """Whether element-wise work needs each matrix apart, because of its blocks of 8-bit momentum."""
        return self.state_dtype == "int8"

    @property
    def wire_bytes(self) -> int:
        return 4 if self.wire_dtype == "float32" else 2


NO_EXPERT = Expert()
EXPERT = tuple(item.name for item in fields(Expert))
HYPERPARAMETERS = (*(item.name for item in fields(Hyperparameters)), "eps")
SHARED = tuple(item.name for item in fields(MuonOptions) if item.name not in HYPERPARAMETERS)
KEYWORDS = ("expert", *(item.name for item in fields(MuonOptions) if item.name not in EXPERT))
"""Of Muon."""


@cache
def constraints(table: type) -> tuple[tuple[str, Constraint, bool], ...]:
    """Name, constraint, and whether None is accepted, of each option with a constraint."""
    return tuple(
        (name, extra, type(None) in get_args(kind))
        for name, kind in get_type_hints(table, include_extras=True).items()
        for part in (kind, *get_args(kind))
        if get_origin(part) is Annotated
        for extra in get_args(part)[1:]
        if isinstance(extra, Constraint)
    )


@cache
def choices(table: type) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The accepted values of each Literal option."""
    return tuple((name, get_args(kind)) for name, kind in get_type_hints(table).items() if get_origin(kind) is Literal)


def check(table: type, values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise OptionError for the first invalid value of an option of `table`. `prefix`: before the option's name."""
    for name, accepted in choices(table):
        if name in values and values[name] not in accepted:
            problem = f"= {values[name]!r} is not one of {', '.join(accepted)}"
            raise OptionError(prefix + name, removed_value(name, values[name]) or problem)
    for name, constraint, takes_none in constraints(table):
        try:
            holds = name not in values or (takes_none and values[name] is None) or constraint.holds(values[name])
        except (TypeError, AttributeError):
            holds = False
        if not holds:
            raise OptionError(prefix + name, f"= {values[name]!r} is not accepted; it takes {constraint.accepted}")


OTHER_NAMES = MappingProxyType(
    {
        "learning_rate": "lr",
        "lr_scale": "adjust_lr_fn",
        "missing_grad": "on_bad_gradient",
        "nonfinite": "on_bad_gradient",
        "buffer_bytes": "buffer_gib",
        "owners": "exchange",
        "soap_every": "soap_freq",
    }
)
"""Options by names that users try or earlier versions had, and that differ too much for a suggestion by letters."""


def muon_options(unknown: Iterable[str], expert: Expert, **keywords: Any) -> MuonOptions:
    """The options from Muon's keywords. Raises TypeError for an unknown keyword, and OptionError as `MuonOptions`."""
    for name in unknown:
        refuse_removed([name])
        match = OTHER_NAMES.get(name) or next(iter(get_close_matches(name, (*KEYWORDS, *EXPERT), 1)), None)
        hint = f" Did you mean {written_option(match)}?" if match else ""
        raise TypeError(f"Muon has no keyword {name}.{hint} It takes {', '.join(KEYWORDS)}.")
    if not isinstance(expert, Expert):
        raise OptionError("expert", f"= {expert!r} is not accepted; write expert=titan_muon.Expert(...)")
    return MuonOptions(**keywords, **vars(expert))


def written_option(option: str) -> str:
    """An option of Muon as a user writes the keyword."""
    return f"expert=Expert({option}=...)" if option in EXPERT else option
