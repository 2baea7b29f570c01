"""Optional features of a step. To delete a feature, delete its file and its line in FEATURES."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from ..engine.step.algorithm import Algorithm
from ..engine.step.feature import Feature
from ..options import MuonOptions


class Entry(NamedTuple):
    """A feature: file, class, and whether options and an algorithm ask for it."""

    file: str
    name: str
    is_on: Callable[[MuonOptions, Algorithm], bool]


FEATURES: Sequence[Entry] = (
    Entry(".owner_state", "OwnerStateFeature", lambda options, algorithm: options.state == "owner"),
    Entry(".offload", "OffloadFeature", lambda options, algorithm: options.offload != "none"),
    Entry("..kernels.fused", "FusedFeature", lambda options, algorithm: options.fused is True),
    Entry("..kernels.graph", "GraphFeature", lambda options, algorithm: options.cuda_graph is True),
    Entry(".weight_norms", "WeightNormsFeature", lambda options, algorithm: algorithm.sums_norms),
    Entry(".mask", "IdleFeature", lambda options, algorithm: options.idle == "hold"),
    # The outermost decorator, because restored numbers would not fit restored scales.
    Entry(".eight_bit", "EightBitFeature", lambda options, algorithm: options.state_dtype == "int8"),
    Entry(".forward", "ForwardFeature", lambda options, algorithm: options.overlap == "forward"),
)
"""Every feature, in the order in which the engine calls them."""


def features_of(options: MuonOptions, algorithm: Algorithm) -> tuple[Feature, ...]:
    """The features that are on. Imports their files and no others."""
    on = (entry for entry in FEATURES if entry.is_on(options, algorithm))
    return tuple(getattr(import_module(entry.file, __package__), entry.name)() for entry in on)
