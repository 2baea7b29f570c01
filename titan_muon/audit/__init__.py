"""Audit of somebody's training script: what the optimizer steps did to each parameter."""

from .report import Finding, Report
from .watch import Audit, watch

__all__ = ["Audit", "Finding", "Report", "watch"]
