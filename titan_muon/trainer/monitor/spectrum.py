"""Singular values of a matrix, without a decomposition."""

import torch
from torch import Tensor

ITERATIONS = 20


def largest_singular_value(matrix: Tensor) -> Tensor:
    """(): lower bound of the largest singular value of a (rows, cols) matrix, by power iteration, within a few %."""
    # The same start in every step, so that values can be compared.
    generator = torch.Generator(device="cpu").manual_seed(0)
    vector = torch.randn(matrix.shape[1], generator=generator).to(matrix.device)
    for _ in range(ITERATIONS):
        vector = matrix.mT @ (matrix @ vector)
        vector = vector / vector.norm().clamp(min=torch.finfo(vector.dtype).tiny)
    return (matrix @ vector).norm()


def orthogonality_error(matrix: Tensor) -> Tensor:
    """(): relative distance of a (rows, cols) matrix from a multiple of a matrix with orthonormal rows or columns.

    ||G / s - I||_F / sqrt(r), where G is the smaller Gram matrix, r its size and s the mean of its diagonal. 0: all
    singular values are equal.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    gram = wide @ wide.mT
    scale = gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return (gram / scale - identity).norm() / len(gram) ** 0.5
