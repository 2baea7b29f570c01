"""Rates of machines: matrix products, memory, links and launches, from data sheets or measurements."""

# Rates are sustained, not peak. A plan with peak rates would expect more time behind Newton-Schulz, or less, than a run
# has to hide communication.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...options import Machine, OptionError
from .work import Work

LARGE_SIDE = 8192
"""Smaller side of a product with the rate `MachineRates.flops`."""
LAUNCHES = 20
"""Launches of a batch of matrices: five steps of three products, and the normalization."""


@dataclass(frozen=True)
class Link:
    """Bytes per second in each direction, and the seconds of an empty collective."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class MachineRates:
    """Rates of a rank; all ranks of a job are equal.

    Attributes:
        name: value of `machine.name`.
        ranks_per_node: `node` joins ranks of a node, `network` joins ranks of different nodes.
        flops: FLOP/s of large products, by dtype.
        half_side: smaller side of products with about half of `flops`.
        memory: bytes per second, read plus written.
        node: links between ranks of a node.
        network: links between ranks of different nodes.
        launch: seconds of an empty launch.
        batch_bytes: bytes of a batch that is large enough to fill the device.
    """

    name: str
    ranks_per_node: int
    flops: Mapping[str, float]
    half_side: int
    memory: float
    node: Link
    network: Link
    launch: float
    batch_bytes: int = 2**28

    def rate(self, dtype: str, side: int) -> float:
        # Partial tiles, start and end of a product weigh less in a larger product.
        share = side / (side + self.half_side) * (LARGE_SIDE + self.half_side) / LARGE_SIDE
        return self.flops[dtype] * min(1.0, share)

    def orthogonalize_seconds(self, work: Work, side: int, count: int) -> float:
        """Seconds to orthogonalize a batch of `count` matrices of equal shape, `side` the smaller side.

        For slices, includes the collectives among the owners, because nothing overlaps them.
        """
        computed = max(count * work.flops / self.rate(work.dtype, side), LAUNCHES * self.launch)
        if work.team is None:
            return computed
        return computed + count * (work.team.sent / self.node.bandwidth + work.team.calls * self.node.latency)

    def pass_seconds(self, moved: float) -> float:
        """Seconds of element-wise launches with `moved` bytes read plus written; 0 for no bytes."""
        return moved / self.memory + self.launch if moved else 0.0


def _flops(large: float, float32: float) -> dict[str, float]:
    return {"bfloat16": large, "float16": large, "float32": float32}


def _cpu(name: str, flops: Mapping[str, float]) -> MachineRates:
    """A machine with one core per rank. Small batches stay in the caches."""
    return MachineRates(name, 8, flops, 64, 1e10, Link(1e9, 2e-4), Link(1e9, 4e-4), 5e-6, 2**24)


# Network: 400 Gb/s per GPU are 50 GB/s; NCCL's all-to-all reaches 45 GB/s and 15 us between nodes (bus bandwidth as
# defined in NVIDIA/nccl-tests, PERFORMANCE.md). NVLink: data sheets give 600, 900, 900 and 1,800 GB/s in both
# directions together; all-to-all reaches about 80 %.
_NETWORK = Link(45e9, 15e-6)

MACHINES: Mapping[str, MachineRates] = {
    machine.name: machine
    for machine in (
        # NVIDIA H100 data sheet: 989 TFLOP/s dense bfloat16, 67 float32, 3.35 TB/s; large products sustain about 700.
        MachineRates("h100x8", 8, _flops(700e12, 50e12), 280, 3.0e12, Link(360e9, 10e-6), _NETWORK, 4e-6),
        # One H200, measured with plain products and copies: 790 TFLOP/s and 4.3 TB/s (data sheet: 989 and 4.8).
        MachineRates("h200x8", 8, _flops(790e12, 50e12), 280, 4.3e12, Link(360e9, 10e-6), _NETWORK, 4e-6),
        # NVIDIA DGX B200 data sheet: 2,250 TFLOP/s dense bfloat16 and 75 float32 for each GPU, 8 TB/s.
        MachineRates("b200x8", 8, _flops(1600e12, 60e12), 400, 7.0e12, Link(720e9, 10e-6), _NETWORK, 4e-6),
        # NVIDIA A100 80GB data sheet: 312 TFLOP/s dense bfloat16, 19.5 float32, 2.0 TB/s.
        MachineRates("a100x8", 8, _flops(250e12, 17e12), 200, 1.7e12, Link(240e9, 10e-6), _NETWORK, 5e-6),
        # One core with bfloat16 instructions, and gloo on one host; the core has no float16 instructions.
        _cpu("cpu", {**_flops(700e9, 150e9), "float16": 150e9}),
        # One core with AVX2, without vector instructions for 16-bit products.
        _cpu("cpu_float32", _flops(1.3e9, 63e9)),
    )
}
"""By `machine.name`, except "auto"."""


def machine_of(options: Machine, device: str = "cuda", measured: str | None = None) -> MachineRates:
    """The rates for ranks on a device type: options override measured rates, measured rates override the named machine.

    `measured` is the text of `options.file`. Raises OptionError if the text does not describe a machine.
    """
    name = options.name if options.name != "auto" else "cpu" if device == "cpu" else "h100x8"
    machine = MACHINES[name]
    if measured is not None:
        machine = _measured(machine, str(options.file), measured)

    def override(value: float | None, unit: float, default: float) -> float:
        return default if value is None else value * unit

    flops, node, network = machine.flops, machine.node, machine.network
    large = {name: override(options.tflops, 1e12, flops[name]) for name in ("bfloat16", "float16")}
    return replace(
        machine,
        ranks_per_node=machine.ranks_per_node if options.ranks_per_node is None else options.ranks_per_node,
        flops={**large, "float32": override(options.tflops_float32, 1e12, flops["float32"])},
        memory=override(options.memory_gb, 1e9, machine.memory),
        node=Link(
            override(options.node_gb, 1e9, node.bandwidth), override(options.node_latency_us, 1e-6, node.latency)
        ),
        network=Link(
            override(options.network_gb, 1e9, network.bandwidth),
            override(options.network_latency_us, 1e-6, network.latency),
        ),
        launch=override(options.launch_us, 1e-6, machine.launch),
    )


def _measured(machine: MachineRates, file: str, text: str) -> MachineRates:
    try:
        rates = json.loads(text)
        # links.py also writes a report with the machine inside.
        rates = rates.get("machine", rates)
        flops = {name: float(rates["flops"][name]) for name in ("bfloat16", "float16", "float32")}
        machine = replace(machine, flops=flops, memory=float(rates["memory_bandwidth"]))
        return _with_links(machine, rates)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"= {file!r} is not a machine as `make gpu` writes it ({error!r}); measure again"
        raise OptionError("machine.file", problem) from error


def _with_links(machine: MachineRates, rates: Mapping[str, Any]) -> MachineRates:
    if rates["bandwidth"] is None:
        return machine
    link, per_node = Link(float(rates["bandwidth"]), float(rates["latency"])), int(rates["ranks_per_node"])
    # A measurement on a single node gives the node's link, a measurement over several nodes gives the network's.
    if int(rates["ranks"]) > per_node:
        return replace(machine, ranks_per_node=per_node, network=link)
    return replace(machine, node=link)
