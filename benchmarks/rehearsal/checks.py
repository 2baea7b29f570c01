"""Faults of a rehearsed step: differences from the dry run, and between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
        others: by rank, bytes of the exchange buffers and of orthogonalization.
    """

    fullest: int
    planned: Bytes
    offloaded: bool = False
    others: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Expected:
        """From the JSON of a dry run, of a pipeline's first ranks if there are stages."""
        document = document.get("pipeline_ranks", [document])[0]
        owners, ranks, memory = document["owners"], document.get("ranks", []), document["memory"]
        fullest = max(owners, key=lambda owner: owner["bytes"])["rank"] if owners else 0
        cost = next((item for item in ranks if item["rank"] == fullest), {"buffer_bytes": 0, "work_bytes": 0})
        held = (memory["parameters"], memory["gradients"], memory["optimizer_states"])
        planned = Bytes(*held, cost["buffer_bytes"], cost["work_bytes"], 0)
        others = {item["rank"]: (item["buffer_bytes"], item["work_bytes"]) for item in ranks}
        return cls(fullest, planned, offloaded=memory["host_states"] > 0, others=others)


def faults(seen: Seen, expected: Expected) -> Iterator[str]:
    """Faults of a rehearsed rank. Only the fullest rank has all of its memory in the dry run."""
    planned, step = expected.planned, seen.step_peak
    buffers, workspace = planned.exchange_buffers, planned.orthogonalization
    if seen.rank != expected.fullest:
        buffers, workspace = expected.others.get(seen.rank, (0, 0))
    else:
        for purpose in ("parameters", "gradients", "optimizer_states"):
            size, planned_size = getattr(step, purpose), getattr(planned, purpose)
            # With several optimizers, the window at the peak need not be the largest.
            offloaded = expected.offloaded and purpose == "optimizer_states"
            if not (0 < size <= planned_size if offloaded else size == planned_size):
                yield f"{purpose.replace('_', ' ')} take {size:,} bytes, and the dry run says {planned_size:,}"
        # Without states, because AdamW makes them in the first step.
        states = 0 if expected.offloaded else planned.optimizer_states
        kept = planned.parameters + states
        if seen.at_rest[1] > kept + seen.constant + SMALL:
            yield f"{seen.at_rest[1]:,} bytes are alive after a step, and {kept + seen.constant:,} should be"
    if step.exchange_buffers != buffers:
        yield f"exchange buffers take {step.exchange_buffers:,} bytes, and the dry run says {buffers:,}"
    # Too little memory is a fault too: missing tensors are on the host.
    used = step.rest - seen.step_start.rest + step.orthogonalization
    if abs(used - workspace) > workspace * WITHIN + SMALL:
        yield f"the step takes {used:,} bytes beside them, and the dry run says {workspace:,}"
    if seen.at_rest[1] > seen.at_rest[0]:
        yield f"{seen.at_rest[1] - seen.at_rest[0]:,} bytes more are alive after the second step than after the first"
    if seen.orthogonalized and not MATRIX_PRODUCTS & seen.operations.keys():
        yield f"{seen.orthogonalized} matrices are orthogonalized, and no matrix product is on the device"
    if seen.groups_made:
        yield f"{seen.groups_made} process groups were made after construction"


def collective_faults(ranks: Sequence[Seen]) -> Iterator[str]:
    """Differences between the collectives of two ranks, in the groups with both."""
    first = ranks[0]
    for other in ranks[1:]:
        for part in ("training", "step"):
            yield from _differences(first.rank, getattr(first, part), other.rank, getattr(other, part), part)
        if first.reads != other.reads:
            yield f"the host reads {first.reads} numbers on rank {first.rank} and {other.reads} on rank {other.rank}"


def _differences(
    rank: int, calls: Sequence[Collective], peer: int, peer_calls: Sequence[Collective], part: str
) -> Iterator[str]:
    # One sequence over all groups: NCCL hangs if two ranks enter two common groups in different orders.
    pairs = zip_longest(*([call for call in trace if {rank, peer} <= {*call.ranks}] for trace in (calls, peer_calls)))
    for index, (left, right) in enumerate(pairs):
        if left is None or right is None or _key(left) != _key(right):
            yield f"{part}: shared collective {index} is {_name(left)} on rank {rank} and {_name(right)} on rank {peer}"
            return
        for source, target, sender, receiver in ((rank, peer, left, right), (peer, rank, right, left)):
            sent, expected = _part(sender.sends, left, target), _part(receiver.receives, left, source)
            if sent != expected:
                parts = f"rank {source} sends {sent} bytes to rank {target}, which expects {expected}"
                yield f"{part}: shared collective {index}, {left.name} of {len(left.ranks)} ranks: {parts}"
                return


def _key(call: Collective) -> tuple[object, ...]:
    return call.name, call.ranks, call.payload, call.root


def _part(parts: Sequence[int], call: Collective, rank: int) -> int | None:
    return parts[call.ranks.index(rank)] if parts else None


def _name(call: Collective | None) -> str:
    if call is None:
        return "absent"
    root = "" if call.root is None else f" with root {call.root}"
    return f"{call.name} of {call.payload} bytes among {len(call.ranks)} ranks{root}"
