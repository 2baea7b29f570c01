"""Temporary memory and traffic of the element-wise stages."""

from __future__ import annotations

from ..engine.layout.work import (
    FLOAT32_COST,
    ROUNDING_BYTES,
    WIDE_BYTES,
    Elements,
    ElementwiseCost,
    Traffic,
    chunk_bytes,
    traffic,
)
from ..options import MuonOptions


def passes_of(elements: Elements, options: MuonOptions) -> ElementwiseCost:
    """Temporary memory and traffic of the element-wise stages. Gradients have the dtypes of the weights."""
    state_bytes, traffics, on_cpu = (
        2 if options.state_dtype == "bfloat16" else 4,
        list[Traffic](),
        elements.device == "cpu",
    )
    advance, apply, drawn = [0], [0], False
    for kind in elements.kinds:
        size, wide = kind.weight_bytes, max(state_bytes, kind.weight_bytes)
        stochastic = options.rounding == "stochastic" and kind.is_bfloat16
        drawn = drawn or stochastic
        kept, temporary = 0, 0
        if not options.fused:
            # The nesterov blend (or the wide gradient that becomes the blend), and the wide momentum. A GradScaler, as
            # accelerators may have, takes a scaled copy of the gradients.
            kept += wide * (1 + (state_bytes < wide)) + size * (not on_cpu)
            temporary = ROUNDING_BYTES if stochastic else size if size > kind.wire_bytes else 0
            if on_cpu and size == kind.wire_bytes == 2 and not stochastic:
                # `add_scaled` converts updates of 16 bits.
                temporary += WIDE_BYTES
            temporary += max(WIDE_BYTES, size) if options.cautious else 0
        advance.append(kept)
        apply.append(temporary)
        flags = {"stochastic": stochastic, "cautious": options.cautious, "fused": options.fused is True}
        traffics.append(traffic(size, state_bytes, kind.wire_bytes, device=elements.device, **flags))
    limit = chunk_bytes(elements.device)
    return ElementwiseCost(
        advance_elements=limit // WIDE_BYTES,
        advance_bytes=max(advance),
        apply_elements=limit // (ROUNDING_BYTES if drawn else WIDE_BYTES),
        apply_bytes=max(apply),
        finish_bytes=elements.rescale_bytes,
        # With the fields as a second key, because two kinds of parameters may have equal sums.
        traffic=max(traffics, key=lambda moved: (moved.advance + moved.apply, moved), default=FLOAT32_COST.traffic),
    )
