"""Seconds and bytes of a rank's matrices on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..exchange.pattern import KindCounts
from ..terms.machine import MachineRates
from ..terms.pieces import Pieces, Ranks
from ..terms.types import Matrix, Plan
from ..terms.work import FLOAT32_COST, NORMALIZING_BYTES, ElementwiseCost, Work
from .batches import counted_batches


class OwnedCost(NamedTuple):
    """Cost of the matrices that a rank orthogonalizes in a bucket, or of its local matrices.

    `assembled`, `iteration`: most bytes of a batch, assembled and in the iteration. `team_*`: traffic with owners of
    other slices.
    """

    elements: int = 0
    seconds: float = 0.0
    assembled: int = 0
    iteration: int = 0
    matrices: int = 0
    flops: int = 0
    batches: int = 0
    team_sent: int = 0
    team_calls: int = 0


class Costs:
    """Seconds from a plan's counts, on a machine."""

    def __init__(
        self,
        pieces: Pieces,
        works: Sequence[Work],
        wire_bytes: int,
        machine: MachineRates,
        elementwise: ElementwiseCost = FLOAT32_COST,
    ) -> None:
        self.pieces, self.works, self.wire_bytes, self.machine = pieces, works, wire_bytes, machine
        self.elementwise = elementwise
        self.longest_row = max((pieces.matrices[example].cols for example in pieces.examples), default=0)
        self._owned: dict[KindCounts, OwnedCost] = {}

    @classmethod
    def from_plan(cls, plan: Plan, machine: MachineRates) -> Costs:
        pieces = Pieces.from_plan(plan, machine.ranks_per_node)
        return cls(pieces, plan.works, plan.wire_bytes, machine, plan.passes)

    def owned(self, counts: KindCounts) -> OwnedCost:
        # Cached, because most ranks have equal counts.
        if counts not in self._owned:
            self._owned[counts] = self._sum(counts)
        return self._owned[counts]

    def local(self, local: Sequence[Ranks]) -> list[OwnedCost]:
        """The cost of each rank's local matrices."""
        by_kind: dict[int, dict[int, int]] = {rank: {} for rank in self.pieces.ranks()}
        for kind, ranks in zip(self.pieces.kinds, local, strict=True):
            for rank in ranks:
                by_kind[rank][kind] = by_kind[rank].get(kind, 0) + 1
        return [self.owned(tuple(sorted(kinds.items()))) for kinds in by_kind.values()]

    def pack_seconds(self, elements: int, calls: int = 1) -> float:
        moved = self.elementwise.traffic
        return self.machine.pass_seconds(elements * moved.advance, calls * moved.advance_launches)

    def apply_seconds(self, elements: int, calls: int = 1) -> float:
        moved = self.elementwise.traffic
        return self.machine.pass_seconds(elements * moved.apply, calls * moved.apply_launches)

    def normalize_seconds(self, elements: int) -> float:
        return self.machine.pass_seconds(elements * NORMALIZING_BYTES)

    def copy_seconds(self, elements: int) -> float:
        return self.machine.pass_seconds(self.copied_bytes(elements))

    def copied_bytes(self, elements: int) -> int:
        """Bytes moved to assemble matrices, to normalize them and to fill the return buffer."""
        return elements * (2 * 2 * self.wire_bytes + NORMALIZING_BYTES)

    def alone(self, matrix: Matrix) -> float:
        """Seconds of a matrix in a large batch."""
        work = self.works[matrix.work]
        return work.flops / self.machine.rate(work.dtype, min(matrix.rows, matrix.cols))

    def _sum(self, counts: KindCounts) -> OwnedCost:
        total = OwnedCost()
        for matrix, size in counted_batches(counts, self.pieces, self.works):
            work = self.works[matrix.work]
            total = OwnedCost(
                elements=total.elements + size * matrix.numel,
                seconds=total.seconds + self.machine.orthogonalize_seconds(work, min(matrix.rows, matrix.cols), size),
                assembled=max(total.assembled, size * matrix.numel * self.wire_bytes),
                iteration=max(total.iteration, size * max(work.bytes, matrix.numel * self.elementwise.finish_bytes)),
                matrices=total.matrices + size,
                flops=total.flops + size * matrix.flops,
                batches=total.batches + 1,
                team_sent=total.team_sent + (size * work.team.sent if work.team else 0),
                team_calls=total.team_calls + (size * work.team.calls if work.team else 0),
            )
        return total
