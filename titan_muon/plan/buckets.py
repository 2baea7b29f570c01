"""What travels together, and how long the ranks wait for each other because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .owners import Groups, Task
from .schedule import prefetch
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

    The path is what the executor really waits for. Before it orthogonalizes its i-th bucket, a rank has finished its
    (i + prefetch - slots)-th, so all of that bucket's owners are done; and a bucket is gathered only when each rank of
    its group is done with the bucket `prefetch` + 1 before it. `load` are the FLOPs of the matrices at home, which
    are orthogonalized while the first buckets are in flight.
    """
    runs: dict[int, list[int]] = {}
    for index, bucket in enumerate(buckets):
        for rank in bucket.group:
            runs.setdefault(rank, []).append(index)
    position = dict.fromkeys(runs, 0)
    done = {rank: [load.get(rank, 0)] for rank in runs}
    ends: list[int] = []
    for bucket in buckets:
        work = _work(bucket, matrices)
        ready = 0
        for rank in bucket.group:
            ready = max(ready, _launched(runs[rank], position[rank], done[rank], ends, slots))
        for rank in bucket.group:
            freed = _freed(len(runs[rank]), position[rank], slots)
            start = max(done[rank][-1], ready, 0 if freed is None else ends[runs[rank][freed]])
            done[rank].append(start + work.get(rank, 0))
            position[rank] += 1
        ends.append(max(done[rank][-1] for rank in bucket.group))
    total = {rank: load.get(rank, 0) for rank in {*load, *runs}}
    for bucket in buckets:
        for rank, flops in _work(bucket, matrices).items():
            total[rank] += flops
    return max([*ends, *load.values()], default=0), total


def _freed(count: int, i: int, slots: int) -> int | None:
    """The bucket that a rank finishes before it orthogonalizes its i-th, to gather another into its slot."""
    gathered = i + prefetch(slots, count)
    return gathered - slots if slots <= gathered < count else None


def _launched(run: Sequence[int], i: int, done: Sequence[int], ends: Sequence[int], slots: int) -> int:
    """When a rank launches the gather of its i-th bucket."""
    ahead = prefetch(slots, len(run))
    own = done[i - ahead] if i > ahead else 0
    return max(own, ends[run[i - slots]] if i >= slots else 0)


def _work(bucket: Bucket, matrices: Sequence[Matrix]) -> dict[int, int]:
    """FLOPs by rank. Without owners every rank of the group does every matrix."""
    if not bucket.owners:
        flops = sum(matrices[index].flops for index in bucket.matrices)
        return dict.fromkeys(bucket.group, flops)
    work: dict[int, int] = {}
    for index, owner in zip(bucket.matrices, bucket.owners, strict=True):
        work[owner] = work.get(owner, 0) + matrices[index].flops
    return work
