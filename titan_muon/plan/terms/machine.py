"""The table of machines: rates of products, memory, links and launches, by public numbers or by measured ones."""

# Rates are what runs reach, not what data sheets promise: a plan that counts on more would hide communication behind
# Newton-Schulz that is over sooner than it says, or the other way round.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...options import Machine, OptionError
from .work import Work

LARGE_SIDE = 8192
"""Smaller side of the products whose rate a machine is described by."""
LAUNCHES = 20
"""Of a batch of matrices: five steps of three products, and the passes that normalize it."""
COLLECTIVE_LAUNCHES = 10
"""Operators that take the host as long as a collective: its checks, events and streams are about 50 us."""
ERROR = (0.8, 1.5)
"""Modelled times are within these factors of a clock: an assumption, since no GPU was measured. On gloo, modelled is 0.90 of
measured (docs/results/timeline.md)."""


@dataclass(frozen=True)
class Link:
    """Links of a rank.

    Attributes:
        bandwidth: bytes that a rank sends in a second, and receives, in large messages.
        latency: seconds that a collective takes however little it carries.
        per_peer: seconds that each message takes besides its bytes. So a message of `per_peer * bandwidth` bytes has
            half of the bandwidth.
    """

    bandwidth: float
    latency: float
    per_peer: float = 0.0

    def seconds(self, sent: float, peers: int) -> float:
        """Seconds that the rank's links are at work for so many bytes in messages to so many peers."""
        return sent / self.bandwidth + peers * self.per_peer


@dataclass(frozen=True)
class CommunicatorBytes:
    """Bytes of a GPU that NCCL and CUDA take.

    Attributes:
        context: CUDA's context and the first communicator.
        group: a further communicator.
        near_peer: a peer of an all-to-all on the same node.
    """

    context: int = 0
    group: int = 0
    near_peer: int = 0


@dataclass(frozen=True)
class MachineRates:
    """What the ranks of a job can do, all alike.

    Attributes:
        name: what a recipe calls it.
        ranks_per_node: ranks that `node` joins; ranks of different nodes are joined by `network`.
        flops: FLOP/s of large products, by dtype.
        half_side: smaller side of products that reach about half of that rate.
        memory: bytes that a rank's memory reads and writes in a second, together.
        node: links between ranks of one node.
        network: links between ranks of different nodes.
        launch: seconds that a launch takes however little it computes.
        batch_bytes: bytes that a batch of matrices may take to fill the device.
        host: seconds of the host for each operator that it launches.
        host_piece: seconds of the host for each piece that a rank stores.
        capacity: bytes of a rank's memory; 0 if it is not known.
        communicators: bytes that the collectives library takes of it.
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
    host: float = 0.0
    host_piece: float = 0.0
    capacity: int = 0
    communicators: CommunicatorBytes = CommunicatorBytes()

    def rate(self, dtype: str, side: int) -> float:
        """FLOP/s of products whose smaller side is `side`."""
        # Tiles at the borders, and the products' start and end, weigh less the larger a product is.
        share = side / (side + self.half_side) * (LARGE_SIDE + self.half_side) / LARGE_SIDE
        return self.flops[dtype] * min(1.0, share)

    def host_seconds(self, pieces: int, batches: int, collectives: int) -> float:
        """Time in which the host launches a step: a lower bound of the step, unless the host is ahead of the device."""
        return pieces * self.host_piece + (LAUNCHES * batches + COLLECTIVE_LAUNCHES * collectives) * self.host

    def orthogonalize_seconds(self, work: Work, side: int, count: int) -> float:
        """Time to orthogonalize `count` matrices of one shape together, `side` the smaller of their sides.

        Of slices of matrices too, with the collectives among their owners, for which nothing else is done.
        """
        computed = max(count * work.flops / self.rate(work.dtype, side), LAUNCHES * self.launch)
        if work.team is None:
            return computed
        return computed + count * (work.team.sent / self.node.bandwidth + work.team.calls * self.node.latency)

    def pass_seconds(self, moved: float, launches: int = 1) -> float:
        """Time of element-wise launches that read and write so many bytes in all; without any there is no launch."""
        return moved / self.memory + launches * self.launch if moved else 0.0


def _flops(large: float, float32: float) -> dict[str, float]:
    return {"bfloat16": large, "float16": large, "float32": float32}


def _cpu(name: str, flops: Mapping[str, float]) -> MachineRates:
    """A machine whose ranks have one core each. Its batches stay near the caches."""
    return MachineRates(name, 8, flops, 64, 1e10, Link(1e9, 2e-4), Link(1e9, 4e-4), 5e-6, 2**24)


# Bandwidth and latency: 400 Gb/s for each GPU are 50 GB/s, of which an all-to-all reaches 46 to 48 (NVIDIA/nccl-tests#267
# and #290) and here 45; 15 us between nodes. NVLink: data sheets of the GPUs, 600, 900, 900 and 1,800 GB/s both ways
# together, of which all-to-all reaches about 75 % of each way (335 GB/s on 4 H100: NVIDIA/nccl#2169) to 80 %.
# Messages: estimated. NCCL cuts a message into chunks of 128 KiB ("P2P Chunksize set to 131072", NVIDIA/nccl#1953), and a
# proxy thread posts each. 2 us are the time of 90 KB at 45 GB/s. `make gpu` measures links with large messages alone.
_NETWORK = Link(45e9, 15e-6, 2e-6)

# The host launches an operator of PyTorch in about 5 us. It takes 18 to 20 us for each piece (benchmarks/host_cost.py:
# 9.8 ms for 480 pieces, 25.7 ms for 1,446, without Newton-Schulz), on one core of a server's CPU.
_HOST, _HOST_PIECE = 5e-6, 18e-6

# On each of 8 H100s the first all_to_all_single took 3.28 GB, 32 channels to each of 7 peers, after 1.06 GB for CUDA and
# other collectives (NVIDIA/nccl#1685). A group of 4 A100s took 0.69 GB with an all-reduce (NVIDIA/nccl#964).
_NCCL = CommunicatorBytes(1_060_000_000, 690_000_000, 470_000_000)


def _gpus(name: str, flops: Mapping[str, float], half_side: int, memory: float, node: Link, gib: int) -> MachineRates:
    """Nodes of 8 GPUs, each with so many GiB that PyTorch can use."""
    launch = 5e-6 if name.startswith("a100") else 4e-6
    capacity = gib * 2**30
    return MachineRates(
        name,
        8,
        flops,
        half_side,
        memory,
        node,
        _NETWORK,
        launch,
        host=_HOST,
        host_piece=_HOST_PIECE,
        capacity=capacity,
        communicators=_NCCL,
    )


MACHINES: Mapping[str, MachineRates] = {
    machine.name: machine
    for machine in (
        # NVIDIA H100 data sheet: 989 TFLOP/s dense bfloat16, 67 float32, 3.35 TB/s, 80 GB;
        # large products sustain about 700.
        _gpus("h100x8", _flops(700e12, 50e12), 280, 3.0e12, Link(360e9, 10e-6, 1e-6), 79),
        # One H200, measured with plain products and copies: 790 TFLOP/s and 4.3 TB/s (data sheet: 989, 4.8 and 141 GB).
        _gpus("h200x8", _flops(790e12, 50e12), 280, 4.3e12, Link(360e9, 10e-6, 1e-6), 139),
        # NVIDIA DGX B200 data sheet: 2,250 TFLOP/s dense bfloat16 and 75 float32 for each GPU, 8 TB/s, 180 GB.
        _gpus("b200x8", _flops(1600e12, 60e12), 400, 7.0e12, Link(720e9, 10e-6, 1e-6), 178),
        # NVIDIA A100 80GB data sheet: 312 TFLOP/s dense bfloat16, 19.5 float32, 2.0 TB/s.
        _gpus("a100x8", _flops(250e12, 17e12), 200, 1.7e12, Link(240e9, 10e-6, 1e-6), 79),
        # One core with bfloat16 instructions, and gloo on one host; float16 has no instructions there.
        _cpu("cpu", {**_flops(700e9, 150e9), "float16": 150e9}),
        # One core with AVX2, which multiplies 16-bit numbers one by one.
        _cpu("cpu_float32", _flops(1.3e9, 63e9)),
    )
}
"""By the names that `machine.name` takes, `auto` aside."""


def machine_of(options: Machine, device: str = "cuda", measured: str | None = None) -> MachineRates:
    """The machine that options describe, for ranks on a type of device.

    `measured` is the text of the file that the options name. What an option says comes before what was measured, and
    that before the named machine. Raises OptionError for a file that is no machine.
    """
    name = options.name if options.name != "auto" else "cpu" if device == "cpu" else "h100x8"
    machine = MACHINES[name]
    if measured is not None:
        machine = _measured(machine, str(options.file), measured)
    return _said(machine, options)


def _said(machine: MachineRates, options: Machine) -> MachineRates:
    def said(value: float | None, unit: float, otherwise: float) -> float:
        return otherwise if value is None else value * unit

    flops, node, network = machine.flops, machine.node, machine.network
    large = {name: said(options.tflops, 1e12, flops[name]) for name in ("bfloat16", "float16")}
    return replace(
        machine,
        ranks_per_node=machine.ranks_per_node if options.ranks_per_node is None else options.ranks_per_node,
        flops={**large, "float32": said(options.tflops_float32, 1e12, flops["float32"])},
        memory=said(options.memory_gb, 1e9, machine.memory),
        node=replace(
            node,
            bandwidth=said(options.node_gb, 1e9, node.bandwidth),
            latency=said(options.node_latency_us, 1e-6, node.latency),
        ),
        network=replace(
            network,
            bandwidth=said(options.network_gb, 1e9, network.bandwidth),
            latency=said(options.network_latency_us, 1e-6, network.latency),
        ),
        launch=said(options.launch_us, 1e-6, machine.launch),
    )


def _measured(machine: MachineRates, file: str, text: str) -> MachineRates:
    """The machine with the numbers of a file that benchmarks/gpu/links.py wrote."""
    try:
        found = json.loads(text)
        # links.py also writes a report that has the machine in it, beside the times that it was read off.
        found = found.get("machine", found)
        flops = {name: float(found["flops"][name]) for name in ("bfloat16", "float16", "float32")}
        machine = replace(machine, flops=flops, memory=float(found["memory_bandwidth"]))
        return _with_links(machine, found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"= {file!r} is not a machine as `make gpu` writes it ({error!r}); measure again"
        raise OptionError("machine.file", problem) from error


def _with_links(machine: MachineRates, found: Mapping[str, Any]) -> MachineRates:
    if found["bandwidth"] is None:
        return machine
    measured, here = {name: float(found[name]) for name in ("bandwidth", "latency")}, int(found["ranks_per_node"])
    # Ranks of one node say nothing of the network; ranks of several were slowed down by it.
    if int(found["ranks"]) > here:
        return replace(machine, ranks_per_node=here, network=replace(machine.network, **measured))
    return replace(machine, node=replace(machine.node, **measured))
