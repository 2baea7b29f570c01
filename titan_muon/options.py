"""Every option of Muon, declared once: name, type, default, meaning and range.

Muon's keywords, the recipe's `[muon]`, `[[muon.split]]` and `[machine]` tables, the planner, the choice of algorithms
and the table in docs/options.md are made from these dataclasses. The standard library alone, since a recipe's `--help`
needs no PyTorch, and `plan/` may import nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


class OptionError(ValueError):
    """An option with a value that it does not take.

    Attributes:
        option: its name as a keyword of Muon; a recipe may have another key for it.
        problem: what is wrong with the value, and what to do.
    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option} {problem}")
        self.option, self.problem = option, problem


@dataclass(frozen=True)
class Constraint:
    """A condition on one value, and its wording."""

    accepted: str
    holds: Callable[[Any], bool]


def at_least(low: float, but: int | None = None) -> Constraint:
    """Numbers from `low` on, and the one exception `but`."""
    also = "" if but is None else f"{but}, or "
    return Constraint(f"{also}{low} or more", lambda value: low <= value < math.inf or value == but)


def from_to(low: float, high: float) -> Constraint:
    """The closed interval from `low` to `high`."""
    return Constraint(f"a number from {low} to {high}", lambda value: low <= value <= high)


def below(low: float, high: float) -> Constraint:
    """The interval from `low`, included, to `high`, excluded."""
    return Constraint(f"a number from {low} to less than {high}", lambda value: low <= value < high)


def one_of(*names: str) -> Constraint:
    """Any of these names."""
    return Constraint(f"one of {', '.join(names)}", lambda value: value in names)


def each(inner: Constraint) -> Constraint:
    """A list whose every element satisfies `inner`."""
    return Constraint(f"a list, each element {inner.accepted}", lambda value: all(map(inner.holds, value)))


COUNT = at_least(1)
NOT_NEGATIVE = at_least(0)
POSITIVE = Constraint("more than 0", lambda value: 0 < value < math.inf)
FRACTION = below(0, 1)
TEXT = Constraint("a string that is not empty", lambda value: bool(value.strip()))


@dataclass(frozen=True, kw_only=True)
class Split:
    """One `[[muon.split]]`: parameters whose name matches are cut into several matrices."""

    match: str
    """Glob on the parameter's fully qualified name; `*` also crosses dots."""

    dims: str
    """einops notation, `(g f) d -> g | f d`: before the bar what counts matrices, after it their rows and columns."""

    lengths: dict[str, int | tuple[int, ...]] = field(default_factory=dict, hash=False)
    """Lengths of axes in `dims` that the shape leaves open; a list cuts an axis before the bar into unequal parts."""

    def __new__(cls, **given: Any) -> Split:
        """Raises OptionError for an older notation."""
        if problem := cls.outdated(given):
            raise OptionError("split", problem)
        return super().__new__(cls)

    @staticmethod
    def outdated(given: Mapping[str, Any]) -> str:
        """What to write for the keys of older notations, `rows`, `joined` and `row_dims`; empty without them."""
        old = [name for name in ("rows", "joined", "row_dims") if name in given]
        if not old:
            return ""
        instead = f"remove {' and '.join(old)}, since dims says all of it"
        if not given.get("dims"):
            instead = "write " + _dims_of(given.get("rows"), given.get("joined"), given.get("row_dims"))
        written = ", ".join(f"{name} = {_as_toml(given[name])}" for name in old)
        return f"has {written}, of a notation that is gone; {instead}"


def _as_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else repr(value)


def _dims_of(rows: Any, joined: Any, row_dims: Any) -> str:
    """`dims` and `lengths` that read a parameter as the older keys of a split did."""
    if isinstance(rows, list | tuple) and rows and all(type(one) is int and one > 0 for one in rows):
        stack = 'for a stack of matrices put "e" first on both sides of the arrow'
        if len(rows) == 1 and joined:
            return f'dims = "f d -> | f d"; {stack}'
        size = math.gcd(*rows)
        if set(rows) == {size} and not joined:
            return f'dims = "(h f) d -> h | f d" and lengths = {{ f = {size} }}; {stack}'
        matrices = "p | (r h) d" if joined else "r p | h d"
        parts = len(rows) if set(rows) == {size} else [one // size for one in rows]
        return f'dims = "(r p h) d -> {matrices}" and lengths = {{ p = {parts}, h = {size} }}; {stack}'
    if type(row_dims) is int and row_dims > 0:
        # How many dims there are, a recipe does not say: four are a convolution's.
        names = [f"d{number}" for number in range(max(4, row_dims + 1))]
        dims = f"{' '.join(names)} -> | ({' '.join(names[:row_dims])}) ({' '.join(names[row_dims:])})"
        return f'dims = "{dims}", with as many names as the parameter has dims: {row_dims} in the first brackets'
    return 'dims, as in "(h f) d -> h | f d" with lengths = { f = 128 }; without it a parameter is one matrix'


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One `[[optimizer.rule]]`, or one rule of `Hybrid`: parameters with a matching name go to an optimizer."""

    match: Annotated[str, TEXT]
    """Glob on the parameter's fully qualified name; `*` also crosses dots."""

    optimizer: Annotated[str, TEXT]
    """Name of a registered optimizer."""

    # Any keys here, because they are the optimizer's: a recipe gives their values the types of that optimizer's table.
    options: dict[str, object] = field(default_factory=dict)
    """Hyperparameters that differ from the optimizer's own table, for these parameters only."""


Owner = int | Literal["balanced", "layer"]
"""Who owns parameters: the ranks by FLOPs and bytes, one rank for each layer, or this rank."""
OWNER = Constraint(
    '"balanced", "layer", or 0 or more',
    lambda value: value in ("balanced", "layer") or (isinstance(value, int) and value >= 0),
)


@dataclass(frozen=True, kw_only=True)
class PlacementRule:
    """One `[[placement.rule]]`: where parameters whose name matches are between steps."""

    match: Annotated[str, TEXT]
    """Glob on the parameter's fully qualified name; `*` also crosses dots."""

    placement: Literal["owned", "shard0"]
    """`owned`: whole on one rank, a stack of experts as whole experts on several. `shard0`: left to FSDP2."""

    owner: Annotated[Owner, OWNER] = "balanced"
    """With `owned`: `balanced` over the ranks, one rank for each `layer`, or the index of the rank that owns them."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a step is planned for: a named one, and numbers that differ from its own."""

    name: Literal["auto", "h100x8", "h200x8", "b200x8", "a100x8", "cpu", "cpu_float32"] = "auto"
    """Nodes of 8 GPUs, joined by 400 Gb/s for each GPU. `auto`: `h100x8` on GPUs, `cpu` on CPUs."""

    file: Annotated[str, TEXT] | None = None
    """File of measured numbers, `machine.json` of `make gpu`; they come before the named machine's."""

    ranks_per_node: Annotated[int, COUNT] | None = None
    """Ranks that are joined by the fast links of one node."""

    tflops: Annotated[float, POSITIVE] | None = None
    """TFLOP/s of large products in bfloat16 or float16."""

    tflops_float32: Annotated[float, POSITIVE] | None = None
    """TFLOP/s of large products in float32, without TF32."""

    memory_gb: Annotated[float, POSITIVE] | None = None
    """Gigabytes per second that a rank's memory reads and writes together."""

    node_gb: Annotated[float, POSITIVE] | None = None
    """Gigabytes per second that a rank sends to ranks of its node."""

    node_latency_us: Annotated[float, NOT_NEGATIVE] | None = None
    """Microseconds that a collective within a node takes however little it carries."""

    network_gb: Annotated[float, POSITIVE] | None = None
    """Gigabytes per second that a rank sends to ranks of other nodes."""

    network_latency_us: Annotated[float, NOT_NEGATIVE] | None = None
    """Microseconds that a collective between nodes takes however little it carries."""

    launch_us: Annotated[float, NOT_NEGATIVE] | None = None
    """Microseconds that a launch takes however little it computes."""


Offload = Literal["none", "state", "parameters"]
Overlap = Literal["none", "backward", "forward"]
"""Where optimizer states are between steps: with their parameters, or (`state`) in pinned memory of the host."""

StateDtype = Literal["parameter", "bfloat16"]
"""Dtype of the averages of AdamW: their parameter's, or bfloat16."""

SLOWEST_IN_BFLOAT16 = 0.99
"""Largest beta of an average that bfloat16 can hold."""
# An average moves by (1 - beta) of its distance to what enters, and bfloat16 drops what is below 2^-8 of the value. At
# 0.99 an average stops within 40 % of a constant, its root within 20 %; at 0.999 it would never shrink at all.


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What each parameter group may have for itself."""

    lr: Annotated[float, NOT_NEGATIVE] = 1e-3
    """Learning rate."""

    momentum: Annotated[float, FRACTION] = 0.95
    """Decay of the average of gradients."""

    nesterov: bool = True
    """Orthogonalize the gradient blended with its average, not the average alone."""

    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.1
    """Decoupled weight decay, scaled by the learning rate."""

    ns_steps: Annotated[int, COUNT] = 5
    """Newton-Schulz iterations."""

    ns_coefficients: Annotated[
        str | tuple[tuple[float, float, float], ...],
        Constraint("the name of a set, or a list that is not empty", bool),
    ] = "keller_jordan"
    """Name of a coefficient set, or a list of [a, b, c], one for each step or one for all."""

    eps: Annotated[float, POSITIVE] = 1e-7
    """Smallest norm that a matrix is divided by."""

    lr_scale: Literal["match_rms_adamw", "original", "spectral"] = "match_rms_adamw"
    """Factor on the learning rate from a matrix's shape: 0.2 sqrt(max(m, n)), sqrt(max(1, m/n)) or sqrt(m/n)."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What holds for all parameters of one Muon."""

    rule: Literal["muon", "normuon"] = "muon"
    """Arithmetic of the update. `normuon`: rows of an update, one a neuron, are divided by their running root mean
    square (arXiv:2510.05491)."""

    beta2: Annotated[float, FRACTION] = 0.95
    """Decay of the average of squared updates by rows, with `rule` = "normuon"."""

    cautious: bool = False
    """Weights decay only where the update moves them towards zero too (cautious weight decay, arXiv:2510.12402)."""

    orthogonalize: Literal["auto", "standard", "gram", "reference"] = "auto"
    """`auto`: the cheapest that is safe for each shape. `reference`: torch.optim.Muon's arithmetic, bit for bit."""

    ns_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of Newton-Schulz. `auto`: float16 on GPUs, bfloat16 on CPUs with instructions for it, else float32."""

    ns_kernel: Literal["auto", "plain", "triton", "quack"] = "auto"
    """What makes symmetric products on GPUs if 16 divides both sides. `auto`: what bench_orthogonalize.py measured."""

    exchange: Annotated[str, TEXT] = "all_to_all"
    """Which collective assembles a sharded matrix: `all_to_all` (hierarchical over copies where that is sooner),
    `all_gather`, `all_gather_reduce_scatter`."""

    owners: Literal["balanced", "everyone"] = "balanced"
    """Which rank orthogonalizes which matrix. `balanced` weighs them by FLOPs; `everyone` is for `all_gather`."""

    replicas: Literal["split", "redundant"] = "split"
    """Whether ranks that hold replicas of a matrix, as under HSDP and DDP, `split` the work or repeat it. `redundant`
    pays only where sending results takes longer than repeating Newton-Schulz."""

    split_over: Annotated[
        int | Literal["auto"], Constraint('1, 2, 4, 8 or "auto"', lambda v: v in (1, 2, 4, 8, "auto"))
    ] = 1
    """Most ranks of a node that share a matrix, each a slice, where it ends the step sooner; `auto`: 3 % sooner."""

    tensor_parallel: Literal["owner", "distributed", "duplicated", "blockwise"] = "owner"
    """How what a mesh axis `tp` cuts is orthogonalized: by one `owner` each; `distributed` in slices over a group of
    that axis; `duplicated` by each of its ranks; or `blockwise`, inexactly, each part as a matrix of its own."""

    wire_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of matrices in transit. bfloat16 loses nothing: Newton-Schulz starts and ends in it."""

    state: Literal["replicated", "owner"] = "replicated"
    """Who keeps the momentum where ranks hold copies of a matrix, as under HSDP and DDP: each, or its owner alone."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the momentum."""

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of bfloat16 weights, which lose small updates by `nearest` and keep them on average by `stochastic`."""

    missing_grad: Literal["error", "skip"] = "error"
    """A parameter without a gradient on some rank: an error on all ranks, or left alone by all in that step."""

    nonfinite: Literal["error", "skip"] = "error"
    """Matrices that are not finite get no update, and the next step is an error on all ranks, or warns and goes on."""

    release_grads: bool = False
    """Free each gradient as soon as it is packed."""

    overlap: Overlap = "none"
    """`backward`: matrices gather at their owners while the last backward goes on, as soon as gradients are reduced;
    `forward`: the last results return, and are applied, while the next forward goes on, before each layer's own."""

    split: tuple[Split, ...] = ()
    """Which parameters are cut into several matrices; the first that matches counts."""


@dataclass(frozen=True, kw_only=True)
class MuonOptions(StepOptions, Hyperparameters):
    """All keywords of Muon. A recipe says `[muon] buffer_gib` for `buffer_bytes`, `[machine]` for `machine`, and
    `[optimizer] offload` for all optimizers together.

    Raises OptionError for a value out of range, or not among the choices.
    """

    buffer_bytes: Annotated[int, POSITIVE] | None = None
    """Most bytes of exchange buffers. None: 1 GiB with the workspace; more if each saves 3 % or, from 2, 10."""

    machine: Machine = Machine()
    """The machine that the step is planned for."""

    offload: Offload = "none"
    """What is on the host, from where a step brings it to the device bucket by bucket: the momentum (`state`), or also
    parameters and gradients (`parameters`), which is taken unasked where FSDP's CPUOffloadPolicy keeps them there."""

    def __post_init__(self) -> None:
        check(type(self), vars(self))
        check(Machine, vars(self.machine), "machine.")
        if self.overlap != "none" and self.offload != "none":
            problem = f"= {self.overlap!r} needs momentum and parameters on the device; set 'none', or offload = 'none'"
            raise OptionError("overlap", problem)
        if self.overlap == "backward" and self.state != "replicated":
            problem = "= 'backward' needs the momentum of each copy; set 'none', or state = 'replicated'"
            raise OptionError("overlap", problem)

    @property
    def wire_bytes(self) -> int:
        """Bytes of an element in transit."""
        return 4 if self.wire_dtype == "float32" else 2


HYPERPARAMETERS = tuple(item.name for item in fields(Hyperparameters))
"""Options that a parameter group may have for itself."""
SHARED = tuple(item.name for item in fields(MuonOptions) if item.name not in HYPERPARAMETERS)
"""Options that hold for all parameters of one Muon."""


@cache
def constraints(table: type) -> tuple[tuple[str, Constraint], ...]:
    """The range of each option of a dataclass that has one."""
    return tuple(
        (name, extra)
        for name, kind in get_type_hints(table, include_extras=True).items()
        for part in (kind, *get_args(kind))
        if get_origin(part) is Annotated
        for extra in get_args(part)[1:]
        if isinstance(extra, Constraint)
    )


@cache
def choices(table: type) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """What each option of a dataclass may be that is one of several values."""
    # Hints are strings, which Python evaluates at every look, and options are checked wherever they are made.
    kinds = get_type_hints(table).items()
    return tuple((name, get_args(kind)) for name, kind in kinds if get_origin(kind) is Literal)


def check(table: type, values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise OptionError for the first of `values`, options of `table` by name, that its declaration refuses.

    `prefix` comes before its name.
    """
    for name, taken in choices(table):
        if name in values and values[name] not in taken:
            raise OptionError(prefix + name, f"= {values[name]!r} is not one of {', '.join(taken)}")
    for name, constraint in constraints(table):
        if values.get(name) is not None and not constraint.holds(values[name]):
            raise OptionError(prefix + name, f"= {values[name]!r} is not accepted; it takes {constraint.accepted}")
