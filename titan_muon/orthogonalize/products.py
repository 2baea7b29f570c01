"""Batched products of matrices that are known to be symmetric, by plain PyTorch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Products(Protocol):
    """How the symmetric products of an iteration are made. X is (count, m, n), all others are (count, m, m)."""

    def gram(self, x: Tensor, out: Tensor) -> None:
        """Fill `out` with X Xᵀ."""

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        """Fill `out` with alpha A B + beta C + delta I. A, B and C are symmetric, A and B commute."""


class PlainProducts:
    """Products that compute all of a symmetric matrix, at the rate of the device's matrix library."""

    def gram(self, x: Tensor, out: Tensor) -> None:
        """Fill `out` with X Xᵀ."""
        torch.bmm(x, x.mT, out=out)

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        """Fill `out` with alpha A B + beta C + delta I."""
        torch.baddbmm(c, a, b, beta=beta, alpha=alpha, out=out)
        if delta != 0:
            out.diagonal(dim1=1, dim2=2).add_(delta)


PLAIN = PlainProducts()
