"""What a step costs: Newton-Schulz FLOPs of the algorithm that will run, and time on a named link."""

from __future__ import annotations

from dataclasses import dataclass


def standard_flops(rows: int, cols: int, steps: int) -> int:
    """FLOPs of the standard quintic iteration on a rows x cols matrix.

    With m <= n the two sides, each step multiplies X Xᵀ (2 m² n), A A (2 m³) and B X (2 m² n).
    """
    m, n = min(rows, cols), max(rows, cols)
    return steps * (4 * m * m * n + 2 * m**3)


def standard_elements(rows: int, cols: int) -> int:
    """Elements that the standard iteration holds at once: X, the next X, X Xᵀ and the polynomial in it."""
    m, n = min(rows, cols), max(rows, cols)
    return 2 * m * n + 2 * m * m


@dataclass(frozen=True)
class Link:
    """What communication costs: `bandwidth` in bytes per second and rank, `latency` in seconds per collective.

    `flops` is the rate in FLOP/s at which a rank orthogonalizes; it weighs computing again against communicating.
    """

    bandwidth: float = 45e9
    latency: float = 15e-6
    flops: float = 700e12

    def transfer_seconds(self, sent: int) -> float:
        """Time for one rank to send `sent` bytes in one collective."""
        return self.latency + sent / self.bandwidth

    def compute_seconds(self, flops: int) -> float:
        """Time for one rank to orthogonalize `flops` FLOPs."""
        return flops / self.flops
