"""Owners as other systems choose them: the same plan with `round_robin` or `per_layer`."""

from collections.abc import Callable
from dataclasses import replace

from titan_muon.engine.layout.types import Bucket, Plan

Choose = Callable[[Plan, Bucket, int], int]
"""Index in a bucket's group of the owner of a matrix."""


def round_robin(plan: Plan, bucket: Bucket, matrix: int) -> int:
    """Matrix i of a group of n ranks belongs to rank i modulo n, in the order of the parameters."""
    numbers = sorted(number for other in plan.buckets if other.group == bucket.group for number in other.matrices)
    return numbers.index(matrix) % len(bucket.group)


def per_layer(plan: Plan, bucket: Bucket, matrix: int) -> int:
    """All matrices of a layer belong to one rank, and layers take the ranks of a group in turn."""
    numbers = sorted(number for other in plan.buckets if other.group == bucket.group for number in other.matrices)
    layers = list(dict.fromkeys(_layer(plan, number) for number in numbers))
    return layers.index(_layer(plan, matrix)) % len(bucket.group)


def owned_by(plan: Plan, choose: Choose) -> Plan:
    """The plan with other owners of whole matrices, and unchanged buckets and rounds.

    Raises ValueError for a plan without owners.
    """
    if any(not bucket.owners for bucket in plan.buckets):
        raise ValueError("only whole matrices with owners can be given to other ranks; plan with exchange='all_to_all'")
    buckets = (
        replace(bucket, owners=tuple(bucket.group[choose(plan, bucket, matrix)] for matrix in bucket.matrices))
        for bucket in plan.buckets
    )
    return replace(plan, buckets=tuple(buckets))


def _layer(plan: Plan, matrix: int) -> str:
    return plan.parameters[plan.matrices[matrix].parameter].layer
