"""Changes of Newton-Schulz coefficients between steps without another plan, as in DynMuon (arXiv:2605.17109)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..orthogonalize import Dispatch, Iteration, largest_value, prepared
from ..state.groups import iteration_of
from .gradients import compared
from .rank import Rank, methods_of
from .views import FINITE, BucketViews

Compared = list[tuple[Any, ...]]


def followed(
    rank: Rank, planned: Compared, views: Sequence[BucketViews], dispatch: Dispatch
) -> tuple[Rank, Compared] | None:
    """The rank with the present coefficients, and the present groups as `compared`. Changes `views` in place.

    None if the groups need another plan: for another number of steps, `eps`, algorithm or method, for coefficients with
    a scaling, or for different coefficients in a batch. Ranks with equal groups decide equally.
    """
    present = compared(rank.params)
    try:
        new = tuple(iteration_of(trained.group) for trained in rank.params)
        methods = tuple(methods_of(rank.plan, new, dispatch))
    except ValueError:
        return None
    old, of_work = rank.iterations, dict[int, Iteration]()
    # All but the coefficients.
    alike = [of[1:] for of in present] == [of[1:] for of in planned]
    alike = alike and all(a.prescaled == b.prescaled for a, b in zip(old, new, strict=True))
    in_batches = all(of_work.setdefault(m.work, new[m.parameter]) == new[m.parameter] for m in rank.plan.matrices)
    if not (alike and in_batches) or methods != rank.methods:
        return None
    grown = [largest_value(b.steps) / largest_value(a.steps) for a, b in zip(old, new, strict=True)]
    for of_bucket in views:
        for _, batch, _ in of_bucket.batches:
            batch.iteration = new[batch.parameters[0]]
            batch.iterate = prepared(batch.iteration, batch.method)
        bounds = of_bucket.bounds
        if bounds.parameters:
            factors = rank.on_device(torch.tensor([grown[number] for number in bounds.parameters], device="cpu"))
            bounds.largest.mul_(factors.where(bounds.largest < FINITE, 1.0)).clamp_(max=FINITE)
    return replace(rank, iterations=new), present
