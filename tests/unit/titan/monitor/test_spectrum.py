"""Singular values by power iteration and by Gram matrices equal the values of a decomposition."""

import pytest
import torch

from titan_muon.trainer.monitor.monitor import largest_singular_value, orthogonality_error


@pytest.mark.parametrize("shape", [(64, 32), (32, 64), (1, 16)])
def test_the_estimated_largest_singular_value_is_a_close_lower_bound(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert 0.97 * exact <= float(largest_singular_value(matrix)) <= exact * (1 + 1e-5)
    assert float(largest_singular_value(torch.zeros(shape))) == 0


def test_only_equal_singular_values_have_zero_orthogonality_error() -> None:
    matrix = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    orthogonal = torch.linalg.qr(matrix).Q
    assert float(orthogonality_error(7 * orthogonal)) < 1e-5
    assert float(orthogonality_error(orthogonal.mT)) < 1e-5
    squares = torch.linalg.svdvals(matrix).square()
    expected = float((squares / squares.mean() - 1).norm() / len(squares) ** 0.5)
    assert float(orthogonality_error(matrix)) == pytest.approx(expected, rel=1e-4)
