"""Faults of a rehearsed step: differences from the dry run, and between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from benchmarks.rehearsal.seen import Bytes, Collective, Seen

WITHIN = 0.1
"""Relative tolerance of memory that cannot be known exactly."""

SMALL = 2**24
"""Bytes of unplanned small tensors: counters, scalars, lists of pointers."""

MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@dataclass(frozen=True)
class Expected:
    """The dry run's numbers of the fullest rank.

    Attributes:
        fullest: the rank.
        planned: bytes without activations.
        offloaded: whether states are on the host, and `planned` has the peak of a step.
    """

    fullest: int
    planned: Bytes
    offloaded: bool = False

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Expected:
        """From the JSON of a dry run, of a pipeline's first ranks if there are stages."""
        document = document.get("pipeline_ranks", [document])[0]
        owners, ranks, memory = document["owners"], document.get("ranks", []), document["memory"]
        fullest = max(owners, key=lambda owner: owner["bytes"])["rank"] if owners else 0
        cost = next((item for item in ranks if item["rank"] == fullest), {"buffer_bytes": 0, "work_bytes": 0})
        held = (memory["parameters"], memory["gradients"], memory["optimizer_states"])
        planned = Bytes(*held, cost["buffer_bytes"], cost["work_bytes"], 0)
        return cls(fullest, planned, offloaded=memory["host_states"] > 0)


def faults(seen: Seen, expected: Expected) -> Iterator[str]:
    """Faults of the dry run's rank."""
    planned, step = expected.planned, seen.step_peak
    for what in ("parameters", "gradients", "optimizer_states", "exchange_buffers"):
        found, said = getattr(step, what), getattr(planned, what)
        # With several optimizers, the window at the peak need not be the largest.
        fits = 0 < found <= said if expected.offloaded and what == "optimizer_states" else found == said
        if not fits:
            yield f"{what.replace('_', ' ')} take {found:,} bytes, and the dry run says {said:,}"
    # Without states, because AdamW makes them in the first step. Too little memory is a fault too: missing tensors are
    # on the host.
    used = step.rest - seen.step_start.rest + step.orthogonalization
    if abs(used - planned.orthogonalization) > planned.orthogonalization * WITHIN + SMALL:
        yield f"the step takes {used:,} bytes beside them, and the dry run says {planned.orthogonalization:,}"
    states = 0 if expected.offloaded else planned.optimizer_states
    kept = planned.parameters + states
    if seen.at_rest[1] > kept + seen.constant + SMALL:
        yield f"{seen.at_rest[1]:,} bytes are alive after a step, and {kept + seen.constant:,} should be"
    if seen.orthogonalized and not MATRIX_PRODUCTS & seen.operations.keys():
        yield f"{seen.orthogonalized} matrices are orthogonalized, and no matrix product is on the device"
    if seen.groups_made:
        yield f"{seen.groups_made} process groups were made after construction"


def collective_faults(ranks: Sequence[Seen]) -> Iterator[str]:
    """Differences of two ranks' collectives in common groups."""
    for other in ranks[1:]:
        first = ranks[0]
        for part in ("training", "step"):
            yield from _differences(first.rank, getattr(first, part), other.rank, getattr(other, part), part)


def _differences(
    one: int, ones: Sequence[Collective], two: int, twos: Sequence[Collective], part: str
) -> Iterator[str]:
    shared = {call.ranks for call in (*ones, *twos) if one in call.ranks and two in call.ranks}
    for group in sorted(shared):
        pairs = zip_longest((c for c in ones if c.ranks == group), (c for c in twos if c.ranks == group))
        for number, (left, right) in enumerate(pairs):
            if left != right:
                said = f"{part}: collective {number} of a group of {len(group)} ranks"
                yield f"{said} is {_name(left)} on rank {one} and {_name(right)} on rank {two}"
                break


def _name(call: Collective | None) -> str:
    return "absent" if call is None else f"{call.name} of {call.payload} bytes"
