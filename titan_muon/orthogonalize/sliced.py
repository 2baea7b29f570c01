"""The Newton-Schulz iteration on a matrix of which several ranks have a slice each: none of them ever has all of it."""

# The longer side is cut, so that a slice X_i has all m of the smaller side, and the Gram matrix is the sum of all
# X_i X_iᵀ. Of every m x m matrix each rank then computes m / k rows, by products of its rows with the whole of another,
# which the ranks gather from each other. So it has exactly 1/k of all FLOPs: were the m x m products made by each rank
# instead, eight ranks on a matrix with sides 1 : 3 would be less than twice as fast as one.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from .coefficients import Coefficients
from .products import wide_gram
from .standard import delivered, normalized, start_norm


class Team(Protocol):
    """The ranks that have the slices of a matrix, in the order of the slices. All of them call the same, in one order.

    Attributes:
        place: this rank's place among them.
    """

    place: int

    def summed(self, whole: Tensor) -> Tensor:
        """This rank's rows of the sum of `whole` (rows, cols) over the team; a k-th of them, in order."""

    def gathered(self, part: Tensor) -> Tensor:
        """The tensors of all ranks, in order, joined along the first dim."""


@dataclass(frozen=True)
class Slice:
    """One slice of a matrix: rows of it (`cuts_rows`), or columns; `team` has the others."""

    team: Team
    cuts_rows: bool


def sliced_norms(stack: Tensor, team: Team) -> Tensor:
    """The Frobenius norm of the matrix that `stack` (1, rows, cols) is a slice of, (1,) float32; equal on all ranks."""
    # By itself, and not with the first Gram matrix, whose trace is its square: a matrix that is not finite has to be
    # zero on all ranks before it is multiplied, and 4 bytes within a node are soon there.
    norms = torch.linalg.vector_norm(stack.flatten(1), dim=1, dtype=torch.float32)
    return torch.linalg.vector_norm(team.gathered(norms), dim=0, keepdim=True)


def sliced(
    stack: Tensor,
    steps: Coefficients,
    eps: float,
    dtype: torch.dtype,
    runs: Sequence[int],
    of: Slice,
    *,
    norms: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The slice of U Vᵀ that `stack` (1, rows, cols) is of a matrix U S Vᵀ, in its shape and dtype.

    As `gram` does, but from X Xᵀ anew after each of `runs` steps; a run of one step is a step of `standard`. `norms`
    are `sliced_norms`; the result is new memory or `out`, which may be `stack`.
    """
    x = normalized(stack, eps, dtype, norms)[0]
    following = torch.empty_like(x)
    count = sum(runs)
    for first, last in pairwise(accumulate(runs, initial=0)):
        beta, part = _accumulated(_gram(x, of), steps[first:last], of.team)
        q = of.team.gathered(part)
        # From the right where rows are cut, as in `multiply`.
        left, right = (x, q) if of.cuts_rows else (q, x)
        scale = 1 / start_norm(dtype) if last == count else 1.0
        if beta == 0 and scale == 1:
            torch.mm(left, right, out=following)
        else:
            torch.addmm(x, left, right, alpha=scale, beta=beta * scale, out=following)
        x, following = following, x
    return delivered(x[None], stack.dtype, out)


def _gram(x: Tensor, of: Slice) -> Tensor:
    """This rank's rows of X Xᵀ, the sum over all slices."""
    # Rounded once, as that of a whole matrix: in 16 bits the parts would add a quarter to the error of the result.
    wide = of.team.summed(wide_gram(x.mT if of.cuts_rows else x))
    return wide.mul_(start_norm(x.dtype) ** -2).to(x.dtype)


def _accumulated(r: Tensor, steps: Coefficients, team: Team) -> tuple[float, Tensor]:
    """(beta, rows of Q) of steps X <- Q X + beta X, from this rank's rows of R = X Xᵀ; see `gram._accumulated`."""
    a, b, c = steps[0]
    whole = team.gathered(r)
    if len(steps) == 1:
        return a, _polynomial(r, whole, b, c)
    q = r
    for index, (a, b, c) in enumerate(steps):
        z = _polynomial(r, whole, b, c)
        whole_z = team.gathered(z)
        if index == 0:
            q = z
            q.diagonal(offset=team.place * q.size(0)).add_(a)
        else:
            q = torch.addmm(q, q, whole_z, beta=a)
        if index + 1 < len(steps):
            # R (Z + a I)² is the next X Xᵀ, since all of them commute.
            r = torch.addmm(r, r, whole_z, beta=a)
            r = torch.addmm(r, r, whole_z, beta=a)
            whole = team.gathered(r)
    return 0.0, q


def _polynomial(r: Tensor, whole: Tensor, b: float, c: float) -> Tensor:
    """This rank's rows of b R + c R R."""
    return r * b if c == 0 else torch.addmm(r, r, whole, beta=b, alpha=c)
