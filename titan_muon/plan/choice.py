"""Which exchange is the fastest for a bucket, by what communication and computing cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .cost import Link
from .layout import Geometries
from .types import Bucket, Matrix


def fastest(bucket: Bucket, matrices: Sequence[Matrix], geometries: Geometries, link: Link, wire_bytes: int) -> Bucket:
    """The bucket with the exchange that takes least time on `link`, and the reason; ties go to the all-to-all.

    Communication and computing are added up: within a bucket one waits for the other. An all-gather, after which every
    rank orthogonalizes everything, is considered only where no rank holds a copy of what another one holds.
    """
    seconds = _seconds(bucket, matrices, geometries, link, wire_bytes)
    exchange = min(seconds, key=lambda name: (seconds[name], name != "all_to_all"))
    times = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in seconds.items())
    owners = () if exchange == "all_gather" else bucket.owners
    return replace(bucket, exchange=exchange, owners=owners, reason=f"{exchange} is the fastest: {times}")


def _seconds(
    bucket: Bucket, matrices: Sequence[Matrix], geometries: Geometries, link: Link, wire_bytes: int
) -> dict[str, float]:
    chosen = [matrices[index] for index in bucket.matrices]
    ranks = len(bucket.group)
    whole = sum(matrix.numel for matrix in chosen)
    stored = sum(sum(geometries[matrix.parameter].elements(matrix.block).values()) for matrix in chosen)
    load: dict[int, int] = {}
    for matrix, owner in zip(chosen, bucket.owners, strict=True):
        load[owner] = load.get(owner, 0) + matrix.flops
    compute = link.compute_seconds(max(load.values()))
    away = (ranks - 1) / ranks
    to_owners = (whole + stored) * wire_bytes * away / ranks
    to_all = stored * wire_bytes * away
    seconds = {
        "all_to_all": 2 * link.latency + to_owners / link.bandwidth + compute,
        "all_gather_reduce_scatter": 2 * (link.latency + to_all / link.bandwidth) + compute,
    }
    if stored == whole:
        everything = link.compute_seconds(sum(matrix.flops for matrix in chosen))
        seconds["all_gather"] = link.transfer_seconds(int(to_all)) + everything
    return seconds
