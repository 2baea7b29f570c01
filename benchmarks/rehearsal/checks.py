"""What is wrong with a rehearsed step: held against the dry run, and one rank against another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from benchmarks.rehearsal.seen import Bytes, Collective, Seen

WITHIN = 0.1
"""How far what cannot be known to the byte may be from what the dry run says."""

SMALL = 2**24
"""Bytes that may be alive beside what is planned: counters, scalars, lists of pointers."""

MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@dataclass(frozen=True)
class Expected:
    """What the dry run says of the rank that holds most.

    Attributes:
        fullest: that rank.
        planned: bytes of it, without activations.
        offloaded: whether states are on the host, and `planned` has most of what a step has of them at one time.
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
        cost = next((each for each in ranks if each["rank"] == fullest), {"buffer_bytes": 0, "work_bytes": 0})
        held = (memory["parameters"], memory["gradients"], memory["optimizer_states"])
        planned = Bytes(*held, cost["buffer_bytes"], cost["work_bytes"], 0)
        return cls(fullest, planned, offloaded=memory["host_states"] > 0)


def faults(seen: Seen, expected: Expected) -> Iterator[str]:
    """What is wrong with the rank that the dry run speaks of."""
    planned, step = expected.planned, seen.step_peak
    for what in ("parameters", "gradients", "optimizer_states", "exchange_buffers"):
        found, said = getattr(step, what), getattr(planned, what)
        # Of several optimizers' windows the one at the peak need not be the largest.
        fits = 0 < found <= said if expected.offloaded and what == "optimizer_states" else found == said
        if not fits:
            yield f"{what.replace('_', ' ')} take {found:,} bytes, and the dry run says {said:,}"
    # Not the states: AdamW makes them in its first step. Too little is wrong as well: what is not on the device is on
    # the host.
    taken = step.rest - seen.step_start.rest + step.orthogonalization
    if abs(taken - planned.orthogonalization) > planned.orthogonalization * WITHIN + SMALL:
        yield f"the step takes {taken:,} bytes beside them, and the dry run says {planned.orthogonalization:,}"
    states = 0 if expected.offloaded else planned.optimizer_states
    kept = planned.parameters + states
    if seen.at_rest[1] > kept + seen.constant + SMALL:
        yield f"{seen.at_rest[1]:,} bytes are alive after a step, and {kept + seen.constant:,} should be"
    if seen.orthogonalized and not MATRIX_PRODUCTS & seen.operations.keys():
        yield f"{seen.orthogonalized} matrices are orthogonalized, and no matrix product is on the device"
    if seen.groups_made:
        yield f"{seen.groups_made} process groups were made after construction"


def collective_faults(ranks: Sequence[Seen]) -> Iterator[str]:
    """Where two ranks see other collectives in a group that both are in."""
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
