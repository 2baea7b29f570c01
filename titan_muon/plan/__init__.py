"""Planning, without processes, devices or modules: shapes and meshes in, a Plan and its numbers out."""

from .planner import make_plan
from .summary import Summary, summarize
from .terms.types import Plan

__all__ = ["Plan", "Summary", "make_plan", "summarize"]
