"""Records of a rehearsed rank: memory, operations and collectives."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Collective:
    """Collective that the group's members must agree on.

    Attributes:
        payload: bytes of the input if all members must pass as many, otherwise None.
        root: global rank of the root, if any.
        sends, receives: bytes to and from each rank of `ranks`, for collectives whose parts may be unequal.
    """

    name: str
    ranks: tuple[int, ...]
    payload: int | None
    root: int | None = None
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bytes:
    """Device memory by purpose; `rest` has all other live memory, for example activations."""

    parameters: int
    gradients: int
    optimizer_states: int
    exchange_buffers: int
    orthogonalization: int
    rest: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Seen:
    """Records of a rank in the second training step.

    Attributes:
        rank: global rank.
        matrices: matrices of Muon's plan, over all ranks.
        orthogonalized: matrices orthogonalized by this rank.
        operations: operators on the device in the optimizer step, by name.
        training_peak: memory at the peak of forward and backward.
        step_start: memory at the begin of the optimizer step.
        step_peak: memory at the peak of the optimizer step.
        constant: other live bytes after construction, for example rotary embeddings.
        at_rest: live bytes after each of the two steps, without gradients.
        training: collectives of forward, backward and clipping.
        step: collectives of the optimizer step.
        groups_made: process groups made after construction.
        reads: reads and waits of the host outside of clipping and the optimizer step.
    """

    rank: int
    matrices: int
    orthogonalized: int
    operations: dict[str, int]
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
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Seen:
        record = json.loads(file.read_text(encoding="utf-8"))
        for name in ("training_peak", "step_start", "step_peak"):
            record[name] = Bytes(**record[name])
        for name in ("training", "step"):
            record[name] = tuple(map(_collective, record[name]))
        return cls(**{**record, "at_rest": tuple(record["at_rest"])})


def _collective(call: dict[str, Any]) -> Collective:
    lists = {key: tuple(value) for key, value in call.items() if isinstance(value, list)}
    return Collective(**{**call, **lists})


UNEQUAL = frozenset(
    (
        "alltoall_base",
        "all_to_all_single",
        "alltoall",
        "allgather",
        "gather",
        "scatter",
        "send",
        "isend",
        "recv",
        "irecv",
    )
)
"""Collectives in which the members of a group may pass different numbers of bytes."""
