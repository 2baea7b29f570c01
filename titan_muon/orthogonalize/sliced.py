"""The Newton-Schulz iteration on a matrix in slices, without a rank that assembles the matrix."""

# The longer side is cut, so that each slice X_i has the whole smaller side m, and the Gram matrix is the sum of all
# X_i X_iᵀ. Each of k ranks computes m / k rows of every m x m matrix, so exactly 1/k of all FLOPs.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from .coefficients import Coefficients
from .newton_schulz import delivered, normalized, start_norm, wide_gram


class Team(Protocol):
    """The ranks of a matrix's slices; `place`: index of this rank. Methods are collective."""

    place: int

    def summed(self, whole: Tensor) -> Tensor:
        """This rank's rows of the sum of `whole` (rows, cols) over the team: block number `place` of k."""

    def gathered(self, part: Tensor) -> Tensor:
        """The tensors of all ranks, in order, concatenated along dim 0."""


@dataclass(frozen=True)
class TeamSlice:
    """A slice of a matrix, of rows if `cuts_rows`, else of columns."""

    team: Team
    cuts_rows: bool


def sliced_norms(stack: Tensor, team: Team) -> Tensor:
    """The Frobenius norm of the matrix with slice `stack` (1, rows, cols), (1,) float32; equal on all ranks."""
    norms = torch.linalg.vector_norm(stack.flatten(1), dim=1, dtype=torch.float32)
    return torch.linalg.vector_norm(team.gathered(norms), dim=0, keepdim=True)


def sliced(
    stack: Tensor,
    steps: Coefficients,
    eps: float,
    dtype: torch.dtype,
    runs: Sequence[int],
    of: TeamSlice,
    *,
    norms: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The slice of U Vᵀ for slice `stack` (1, rows, cols) of a matrix U S Vᵀ, in the stack's shape and dtype.

    Like `gram`, with X Xᵀ recomputed after each of `runs` steps; a run of a single step is a step of `standard`.
    `norms` are `sliced_norms`. `out` as in `standard`.
    """
    x = normalized(stack, eps, dtype, norms)[0]
    spare, count = torch.empty_like(x), sum(runs)
    for first, last in pairwise(accumulate(runs, initial=0)):
        beta, part = _accumulated(_gram(x, of), steps[first:last], of.team)
        q = of.team.gathered(part)
        # From the right for row slices, as in `multiply`.
        left, right = (x, q) if of.cuts_rows else (q, x)
        scale = 1 / start_norm(dtype) if last == count else 1.0
        if beta == 0 and scale == 1:
            torch.mm(left, right, out=spare)
        else:
            torch.addmm(x, left, right, alpha=scale, beta=beta * scale, out=spare)
        x, spare = spare, x
    return delivered(x[None], stack.dtype, out)


def _gram(x: Tensor, of: TeamSlice) -> Tensor:
    # 16-bit partial sums would add a quarter to the error of the result.
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
            r = torch.addmm(r, r, whole_z, beta=a)
            r = torch.addmm(r, r, whole_z, beta=a)
            whole = team.gathered(r)
    return 0.0, q


def _polynomial(r: Tensor, whole: Tensor, b: float, c: float) -> Tensor:
    return r * b if c == 0 else torch.addmm(r, r, whole, beta=b, alpha=c)
