"""What is kept of a rehearsed rank, to be written and compared: memory, operations and collectives."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Collective:
    """A collective as the members of its group must agree on it: `payload` in bytes where theirs are equal, or None."""

    name: str
    ranks: tuple[int, ...]
    payload: int | None


@dataclass(frozen=True)
class Bytes:
    """Device memory by what it holds; `rest` is all else that was alive, activations for one."""

    parameters: int
    gradients: int
    optimizer_states: int
    exchange_buffers: int
    orthogonalization: int
    rest: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Seen:
    """What one rank did in its second training step.

    Attributes:
        rank: global rank.
        matrices: matrices that Muon's plan has, over all ranks.
        orthogonalized: those that this rank orthogonalized.
        operations: operators on the device in the optimizer step, by name.
        growing: those whose number grows with the number of matrices.
        training_peak: memory at the peak of forward and backward.
        step_start: memory when the optimizer step begins.
        step_peak: memory at its peak.
        constant: bytes alive after construction that are none of these, such as rotary embeddings.
        at_rest: bytes alive after each of the two steps, once gradients are gone.
        training: collectives of forward, backward and clipping.
        step: collectives of the optimizer step.
        groups_made: process groups made after construction.
        reads: how often the host read from the device or waited for it outside of the optimizer step.
    """

    rank: int
    matrices: int
    orthogonalized: int
    operations: dict[str, int]
    growing: dict[str, int]
    training_peak: Bytes
    step_start: Bytes
    step_peak: Bytes
    constant: int
    at_rest: tuple[int, int]
    training: tuple[Collective, ...]
    step: tuple[Collective, ...]
    groups_made: int
    reads: int

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Seen:
        """What `write` wrote."""
        found = json.loads(file.read_text(encoding="utf-8"))
        for name in ("training_peak", "step_start", "step_peak"):
            found[name] = Bytes(**found[name])
        for name in ("training", "step"):
            found[name] = tuple(Collective(c["name"], tuple(c["ranks"]), c["payload"]) for c in found[name])
        return cls(**{**found, "at_rest": tuple(found["at_rest"])})


UNEQUAL = frozenset(
    (
        "alltoall_base",
        "all_to_all_single",
        "alltoall",
        "allgather",
        "reduce",
        "gather",
        "send",
        "isend",
        "recv",
        "irecv",
    )
)
"""Collectives in which the members of a group may pass different numbers of bytes."""
