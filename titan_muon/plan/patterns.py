"""What an exchange pattern is, and what a bucket that is exchanged by it costs each rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from .legs import BucketProgram
from .machine import Machine
from .pieces import Pieces
from .types import Bucket

KindCounts = tuple[tuple[int, int], ...]
"""(kind, how many matrices of it), in ascending order."""


class Flow(NamedTuple):
    """Elements that one rank exchanges in a collective, with ranks of its own node (near) and of others (far)."""

    sent_near: int
    sent_far: int
    received_near: int
    received_far: int

    def seconds(self, element_bytes: int, machine: Machine) -> float:
        """Time that the rank's busiest link needs for it."""
        # Each way has its own wires, and so have the node and the network: all four are at work at once.
        near = max(self.sent_near, self.received_near) / machine.node.bandwidth
        far = max(self.sent_far, self.received_far) / machine.network.bandwidth
        return max(near, far) * element_bytes


class BucketTotals(NamedTuple):
    """What a bucket costs one rank: how many matrices of which kind it orthogonalizes, elements that it stores, sends
    to and receives from other ranks, elements of its home buffer, inbox and outbox, what it exchanges on each leg, and
    how many of the legs are collectives: one on which nothing travels is left out by all ranks of the bucket."""

    owned: KindCounts
    stored: int
    sent: int
    received: int
    buffers: tuple[int, int, int]
    legs: tuple[Flow, ...]
    collectives: int


class Pattern(ABC):
    """How the matrices of a bucket are exchanged.

    Attributes:
        name: what a user and `Bucket.exchange` call it.
        has_owners: whether one rank orthogonalizes each matrix, so that owners have to be chosen.
        settles: whether it is a choice among the others, made for each bucket.
        one_copy: whether an owner is sent the pieces of one copy alone, the one that it is part of.
        duplicates: whether an owner's tensor-parallel peers do the same as it; `tensor_parallel` chooses that.
    """

    name: str
    has_owners = True
    settles = False
    one_copy = False
    duplicates = False

    @abstractmethod
    def program(self, bucket: Bucket, rank: int, pieces: Pieces) -> BucketProgram:
        """The bucket as one rank of its group runs it."""

    @abstractmethod
    def totals(self, bucket: Bucket, pieces: Pieces) -> dict[int, BucketTotals]:
        """What the bucket costs each rank of its group."""
        # Counted from shapes and not from programs: the planner wants this of every rank of several drafts, and
        # programs of 1,024 ranks would take minutes. tests/unit/test_plan_summary.py holds both against each other.
