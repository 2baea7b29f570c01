"""`whole_freq`: MuonBP (Khaled et al., 2025, arXiv:2510.16981), steps on blocks between steps on whole matrices."""

# [Note: steps on blocks]
# - A block is a rank's part of a matrix. Replicas repeat the work, so a step on blocks sends nothing.
# - Both plans have the same parameters, momentum, gradients and report. Each plan has its own views, program and
#   workspace. Only one workspace is allocated at a time, except with `keep_buffers`.
# - A parameter in whole matrices on every rank has the same steps in both plans, at the same rate.

from __future__ import annotations

from dataclasses import replace

from ..comm.buffers import Buffers, wire_dtypes
from ..comm.exchange import Exchange
from ..options import MuonOptions, OptionError
from ..plan.planner import make_plan
from ..plan.program import make_program
from ..plan.search.tensor_parallel import Part, in_blocks
from ..plan.terms.layout import Geometries, Geometry, flattened, region
from ..plan.terms.machine import MachineRates, WorkOf
from ..plan.terms.types import Plan
from ..step.algorithm import Algorithm, Decorated, PlanContext, Tensors
from ..step.foreach import UpdateCall
from ..step.rank import Rank, dispatch_of, methods_of
from ..tensors.storage import STEP

PLAIN: tuple[tuple[str, object], ...] = (
    ("overlap", "none"),
    ("offload", "none"),
    ("state", "replicated"),
    ("on_bad_gradient", "error"),
    ("idle", "move"),
    ("tp_mode", "owner"),
    ("split_over", 1),
    ("fused", False),
    ("decay_follows_lr", False),
)
"""Options with a single value beside steps on blocks."""


def check(context: PlanContext) -> None:
    """Raise OptionError for options without steps on blocks."""
    options = context.options
    for name, value in PLAIN:
        if getattr(options, name) != value:
            raise OptionError(
                name, f"= {getattr(options, name)!r} excludes whole_freq; set {value!r}, or whole_freq = 1"
            )
    if options.state_dtype == "int8":
        raise OptionError("state_dtype", "= 'int8' excludes whole_freq; set 'bfloat16', or whole_freq = 1")
    if options.algorithms != ("muon",):
        problem = f"= {options.whole_freq} is of the algorithm 'muon', and there is {options.algorithm!r}"
        raise OptionError("whole_freq", f"{problem}; set whole_freq = 1, or algorithm = 'muon'")


def with_blocks(plan: Plan, costs: WorkOf, options: MuonOptions, machine: MachineRates | None) -> Plan:
    """The plan of whole matrices, with that of steps on blocks, if a rank stores a part of a matrix."""
    geometries = Geometries(plan.parameters)
    parameters = in_blocks(plan.parameters, geometries, _stored_parts)
    blocks, note = None, f"whole_freq = {options.whole_freq} has no effect, because no rank stores part of a matrix"
    if tuple(parameters) != plan.parameters:
        # `check` refuses other modes by name.
        of_blocks = replace(options, replicas="redundant", tp_mode="owner")
        blocks = make_plan(parameters, costs, of_blocks, machine, plan.passes)
        note = f"every {options.whole_freq} steps; in the others, each rank orthogonalizes what it stores"
    return replace(plan, blocks=blocks, reason="; ".join(filter(None, (plan.reason, note))))


def is_whole(rank: Rank) -> bool:
    """Whether the next step is of whole matrices."""
    return max((param.group[STEP] for param in rank.params), default=0) % rank.options.whole_freq == 0


def _stored_parts(geometry: Geometry) -> list[Part]:
    """The part of a parameter on each rank. Replicas have one part together."""
    layout, split = geometry.layout, geometry.stack.row_dims
    sizes = layout.shape
    stored = dict.fromkeys(region(layout, coordinate) for coordinate in layout.mesh.coordinates.values())
    return [(flattened(dims[:split], sizes[:split]), flattened(dims[split:], sizes[split:])) for dims in stored]


def block_rank(rank: Rank, blocks: Plan, before: Rank | None) -> Rank:
    """What the rank has of the plan of blocks. `before`: of the same plan for earlier storage."""
    if before is not None:
        return replace(before, params=rank.params, storage=rank.storage, options=rank.options)
    program = make_program(blocks, rank.agreement.rank, Geometries(blocks.parameters))
    buffers = Buffers(program, rank.device, wire_dtypes(blocks, program), kept=rank.options.keep_buffers)
    return replace(
        rank,
        plan=blocks,
        program=program,
        methods=tuple(methods_of(blocks, rank.iterations, dispatch_of(rank.device, rank.options))),
        buffers=buffers,
        exchange=Exchange(program, buffers, rank.exchange.collectives, rank.agreement),
    )


class BlockRate(Decorated):
    """An algorithm with the learning rate of steps on blocks, for parameters that ranks store in parts."""

    def __init__(self, inner: Algorithm, plan: Plan, blocks: Plan) -> None:
        super().__init__(inner)
        pairs = enumerate(zip(plan.parameters, blocks.parameters, strict=True))
        self._cut = frozenset(number for number, (old, new) in pairs if old.stack != new.stack)

    def after_return(self, call: UpdateCall, params: Tensors) -> None:
        parameters = {part.parameter for part in call.parts}
        for own, scale in ((parameters - self._cut, 1.0), (parameters & self._cut, self.options.block_lr_scale)):
            if own:
                group = {**call.group, "lr": call.group["lr"] * scale}
                mine = [param for part, param in zip(call.parts, params, strict=True) if part.parameter in own]
                super().after_return(replace(call.without(parameters - own), group=group), mine)
