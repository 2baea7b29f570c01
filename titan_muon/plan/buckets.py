"""What travels together, and how long the ranks wait for each other because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .owners import Groups, Task
from .schedule import Act, schedule
from .types import Bucket, Matrix


def rounds(tasks: Sequence[Task], groups: Groups, count: int) -> list[list[Task]]:
    """Tasks in at most `count` rounds of consecutive tasks; in a round each group has one bucket.

    Buckets are of about the same bytes on every rank: the group with most bytes per rank has `count` of them, the
    others fewer, in the first rounds.
    """
    total, seen = [0] * len(groups), [0] * len(groups)
    for task in tasks:
        total[task.group] += task.bytes
    shares = [t / len(group) for t, group in zip(total, groups, strict=True)]
    counts = [max(1, round(count * share / max(shares, default=1))) for share in shares]
    result: list[list[Task]] = [[] for _ in range(count)]
    for task in tasks:
        middle = seen[task.group] + task.bytes / 2
        result[int(counts[task.group] * middle / total[task.group])].append(task)
        seen[task.group] += task.bytes
    return [chosen for chosen in result if chosen]


def longest_path(
    buckets: Sequence[Bucket], matrices: Sequence[Matrix], load: Mapping[int, int], slots: int
) -> tuple[int, dict[int, int]]:
    """FLOPs on the longest path through a step, and FLOPs by rank.

    The step is played turn by turn as the executor runs it, where orthogonalizing takes its FLOPs and all else no time:
    a gather is there when the last rank of its group has launched it, a return when its last rank is done. `load` are
    the FLOPs of the matrices at home.
    """
    by_round: dict[int, list[int]] = {}
    for index, bucket in enumerate(buckets):
        by_round.setdefault(bucket.round, []).append(index)
    work = [_work(bucket, matrices) for bucket in buckets]
    now = dict.fromkeys({*load, *(rank for bucket in buckets for rank in bucket.group)}, 0)
    launched, ends = [0] * len(buckets), [0] * len(buckets)
    for act, number in schedule(len(by_round), slots):
        if act is Act.HOME:
            now = {rank: start + load.get(rank, 0) for rank, start in now.items()}
            continue
        for index in by_round[number]:
            group = buckets[index].group
            if act is Act.GATHER:
                launched[index] = max(now[rank] for rank in group)
            elif act is Act.APPLY:
                now |= {rank: max(now[rank], ends[index]) for rank in group}
            else:
                now |= {rank: max(now[rank], launched[index]) + work[index].get(rank, 0) for rank in group}
                ends[index] = max(now[rank] for rank in group)
    total = {rank: load.get(rank, 0) for rank in now}
    for flops in work:
        for rank, amount in flops.items():
            total[rank] += amount
    return max(now.values(), default=0), total


def _work(bucket: Bucket, matrices: Sequence[Matrix]) -> dict[int, int]:
    """FLOPs by rank. Without owners every rank of the group does every matrix."""
    if not bucket.owners:
        flops = sum(matrices[index].flops for index in bucket.matrices)
        return dict.fromkeys(bucket.group, flops)
    work: dict[int, int] = {}
    for index, owner in zip(bucket.matrices, bucket.owners, strict=True):
        work[owner] = work.get(owner, 0) + matrices[index].flops
    return work
