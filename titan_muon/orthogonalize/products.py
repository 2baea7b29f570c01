"""Matrix products of the iterations."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Products(Protocol):
    """Symmetric products of an iteration. X is (count, m, n), all further matrices are (count, m, m)."""

    def gram(self, x: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Fill `out` with alpha X Xᵀ."""

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        """Fill `out` with alpha A B + beta C + delta I. A, B and C are symmetric, A and B commute."""


class PlainProducts:
    """Products of the device's matrix library."""

    def gram(self, x: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        if alpha == 1:
            torch.bmm(x, x.mT, out=out)
        else:
            torch.baddbmm(out, x, x.mT, beta=0, alpha=alpha, out=out)

    def symmetric(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, delta: float = 0.0, out: Tensor
    ) -> None:
        # PyTorch copies C to `out` first: up to 2 % of the product on a CPU. C is a factor too, so not in place.
        torch.baddbmm(c, a, b, beta=beta, alpha=alpha, out=out)
        if delta != 0:
            out.diagonal(dim1=1, dim2=2).add_(delta)


PLAIN = PlainProducts()


def smaller_first(x: Tensor) -> Tensor:
    """A transposed view for tall matrices."""
    return x.mT if x.size(1) > x.size(2) else x


def wide_gram(x: Tensor) -> Tensor:
    """X Xᵀ in float32, for X (m, n) of any dtype."""
    if x.device.type == "cpu":
        # CPU products of 16-bit numbers do not accumulate in float32.
        wide = x.float()
        return wide @ wide.mT
    return torch.mm(x, x.mT, out_dtype=torch.float32)


def polynomial(products: Products, r: Tensor, b: float, c: float, *, delta: float = 0.0, out: Tensor) -> None:
    """Fill `out` with delta I + b R + c R R for symmetric R (count, m, m)."""
    if c != 0:
        products.symmetric(r, r, r, alpha=c, beta=b, delta=delta, out=out)
        return
    # PyTorch 2.13 ignores alpha = 0 of a product in float16 on CPUs.
    torch.mul(r, b, out=out)
    if delta != 0:
        out.diagonal(dim1=1, dim2=2).add_(delta)


def multiply(p: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 0.0, out: Tensor) -> None:
    """Fill `out` with alpha P X + beta X for each matrix on the smaller side; P (count, m, m) is symmetric."""
    # From the right for tall matrices, because on CPUs writing to transposed memory is a thousand times slower.
    left, right = (x, p) if x.size(1) > x.size(2) else (p, x)
    if beta == 0 and alpha == 1:
        torch.bmm(left, right, out=out)
    else:
        torch.baddbmm(x, left, right, alpha=alpha, beta=beta, out=out)
