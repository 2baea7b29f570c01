"""The rates of machines, from data sheets or measurements."""

# Rates are sustained, not peak, so that Newton-Schulz hides as much communication as in a run.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.layout.work import CPU, MethodRates, Work
from ..options import Machine, OptionError

LARGE_SIDE = 8192
"""Smaller side of a product with the rate `MachineRates.flops`."""
LAUNCHES = 20
"""Launches of a batch of matrices that take longer than small products."""
COLLECTIVE_OPERATORS = 10
"""Operators that take the host as long as a collective: checks, events and streams take about 50 us."""
BATCH_OPERATORS = 7
"""Operators of a batch beside Newton-Schulz: copies of pieces to and fro, and zeros for what is not finite."""
FUSED_BATCH_OPERATORS = -2
"""With kernels: three in the place of the norms and the normalization, which are five operators of Newton-Schulz."""
STEP_OPERATORS = 10
"""Operators of the report of a step."""
ERROR = (0.9, 2.8)
"""Bounds of measured over modelled time, from docs/results/gpu.json: 0.99 to 2.71 in twelve steps of one H200, to which
`h200x8` was fitted. The plain steps took 1.15 to 1.42, and a skippable step of Qwen3-30B-A3B 2.71, because the host
took longer than the device. gloo took 1 / 0.88 (docs/results/timeline.md). No link was measured."""


@dataclass(frozen=True)
class Link:
    """Links of a rank, in each direction.

    Bytes per second in large messages, seconds of an empty collective, and seconds of each message besides the bytes.
    """

    bandwidth: float
    latency: float
    per_peer: float = 0.0

    def seconds(self, sent: float, peers: int) -> float:
        return sent / self.bandwidth + peers * self.per_peer


@dataclass(frozen=True)
class CommunicatorBytes:
    """Bytes of CUDA's context with the first communicator, of another group, and of a near peer of an all-to-all."""

    context: int = 0
    group: int = 0
    near_peer: int = 0


@dataclass(frozen=True, kw_only=True)
class MachineRates(MethodRates):
    """Rates of a rank; all ranks of a job are equal.

    Attributes:
        half_side: smaller side of products with about half of `flops`.
        node, network: links between ranks of a node, and of different nodes.
        launch: seconds of an empty launch.
        host, host_entry: seconds of the host for each launch, and for each tensor in lists of tensors.
        capacity: bytes of a rank's memory; 0 if unknown.
    """

    ranks_per_node: int
    half_side: int
    node: Link
    network: Link
    launch: float
    host: float = 0.0
    host_entry: float = 0.0
    capacity: int = 0
    communicators: CommunicatorBytes = CommunicatorBytes()

    def rate(self, dtype: str, side: int) -> float:
        # Partial tiles, start and end weigh less in a larger product.
        share = side / (side + self.half_side) * (LARGE_SIDE + self.half_side) / LARGE_SIDE
        return self.flops[dtype] * min(1.0, share)

    def host_seconds(self, operators: int, entries: int, collectives: int) -> float:
        """Time to launch a step: a lower bound of the step, unless the host is ahead of the device.

        `entries`: tensors in lists. An operator is a launch.
        """
        return entries * self.host_entry + (operators + COLLECTIVE_OPERATORS * collectives) * self.host

    def orthogonalize_seconds(self, work: Work, side: int, count: int) -> float:
        """Seconds for `count` matrices with smaller side `side`."""
        return max(count * work.flops / self.rate(work.dtype, side), LAUNCHES * self.launch)

    def pass_seconds(self, moved: float, launches: int = 1) -> float:
        """Seconds of launches with `moved` bytes read plus written; 0 for no bytes."""
        return moved / self.memory + launches * self.launch if moved else 0.0


# Network: 400 Gb/s per GPU are 50 GB/s, of which NCCL reaches 46 to 48 (NVIDIA/nccl-tests#290). NVLink: data sheets
# give 900, 900 and 1,800 GB/s in both directions together; an all-to-all reaches 75 % of a direction (335 GB/s on
# 4 H100s, NVIDIA/nccl#2169) to 80 %. Messages: an estimate of the time to post a chunk of 128 KiB (NVIDIA/nccl#1953);
# `make gpu` measures only large messages.
_NETWORK = Link(45e9, 15e-6, 2e-6)

# One host beside an H200, whose plain steps of Qwen3-8B and Qwen3-30B-A3B took 9.8 and 25.9 ms for 364 and 1,532
# launches and 252 and 480 pieces (docs/results/gpu.json): 8.6 us a launch, and 26.4 a piece, which was in 13 lists.
_HOST, _HOST_ENTRY = 8.6e-6, 26.4e-6 / 13

# On 8 H100s the first all_to_all_single took 3.28 GB, after 1.06 GB for CUDA and other collectives
# (NVIDIA/nccl#1685). A group of 4 A100s took 0.69 GB (NVIDIA/nccl#964). Memory for 71 peers is unknown, and assumed to
# be in total that for 7.
_CONTEXT, _GROUP, _PEERS = 1_060_000_000, 690_000_000, 7 * 470_000_000

# One H200 (docs/results/gpu.json): large products reached 770 TFLOP/s, in float32 50, and a copy 4.0 TB/s. Products and
# passes of a step reached 650 TFLOP/s and 3.0 TB/s, by a fit to steps of three models. The other GPUs have the same
# shares of their data sheets: 66 % of dense bfloat16, 75 % of float32, 62.5 % of the memory bandwidth.
_SHARE, _SHARE_FLOAT32, _SHARE_MEMORY = 650 / 989, 50 / 67, 3.0 / 4.8


def _gpus(
    name: str, tflops: float, float32: float, memory_tb: float, node: Link, gib: int, ranks: int = 8, links: int = 1
) -> MachineRates:
    """Nodes of `ranks` GPUs with these rates on the data sheet, `gib` GiB for PyTorch, and `links` of _NETWORK each."""
    large = round(_SHARE * tflops) * 1e12
    return MachineRates(
        name,
        {"bfloat16": large, "float16": large, "float32": round(_SHARE_FLOAT32 * float32) * 1e12},
        memory=round(_SHARE_MEMORY * memory_tb, 2) * 1e12,
        ranks_per_node=ranks,
        half_side=400,
        node=node,
        network=replace(_NETWORK, bandwidth=links * _NETWORK.bandwidth),
        launch=4e-6,
        host=_HOST,
        host_entry=_HOST_ENTRY,
        capacity=gib * 2**30,
        communicators=CommunicatorBytes(_CONTEXT, _GROUP, _PEERS // (ranks - 1)),
    )


# 72 GPUs reduced 4 to 8 GB at 835 GB/s of bus bandwidth (coreweave/nccl-tests#43); an all-to-all is assumed at the 80 %
# of 8 GPUs.
_RACK_LINK = Link(720e9, 15e-6, 1e-6)

MACHINES: Mapping[str, MachineRates] = {
    machine.name: machine
    for machine in (
        # NVIDIA data sheets: TFLOP/s in dense bfloat16 and in float32, and TB/s. Only the H200 was measured.
        _gpus("h100x8", 989, 67, 3.35, Link(360e9, 10e-6, 1e-6), 79),
        _gpus("h200x8", 989, 67, 4.8, Link(360e9, 10e-6, 1e-6), 139),
        _gpus("b200x8", 2250, 75, 8.0, Link(720e9, 10e-6, 1e-6), 178),
        # NVIDIA data sheets of GB200 NVL72 and GB300 NVL72, for each of 72 GPUs: 186 and 279 GB; NVLink with 900 GB/s
        # in each direction to all 72; a ConnectX-7 with 400 Gb/s and a ConnectX-8 with 800.
        _gpus("gb200x72", 2500, 80, 8.0, _RACK_LINK, 184, ranks=72),
        _gpus("gb300x72", 2500, 80, 8.0, _RACK_LINK, 276, ranks=72, links=2),
        # Links of gloo on one host.
        MachineRates(
            **vars(CPU), ranks_per_node=8, half_side=64, node=Link(1e9, 2e-4), network=Link(1e9, 4e-4), launch=5e-6
        ),
    )
}
"""Machines by `machine.name`, except "auto"."""


def planning_machine(options: Machine, device: str = "cuda", measured: str | None = None) -> MachineRates:
    """The rates for ranks on a device type: measured rates override the named machine's.

    `measured`: by default the text of `options.file`. Raises OptionError for an unreadable or invalid file.
    """
    name = options.name if options.name != "auto" else "cpu" if device == "cpu" else "h100x8"
    machine = MACHINES[name]
    if options.file is not None:
        try:
            text = Path(options.file).read_text(encoding="utf-8") if measured is None else measured
            machine = _with_measured(machine, json.loads(text))
        except (OSError, UnicodeDecodeError) as error:
            problem = f"= {options.file!r} cannot be read ({error}); name the machine.json that `make gpu` wrote"
            raise OptionError("machine.file", problem) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"= {options.file!r} is not a machine as `make gpu` writes it ({error!r}); measure again"
            raise OptionError("machine.file", problem) from error
    return machine if options.ranks_per_node is None else replace(machine, ranks_per_node=options.ranks_per_node)


def _with_measured(machine: MachineRates, report: Mapping[str, Any]) -> MachineRates:
    """Both links by name, or the link that `make gpu` measured: of a single node the node's, else the network's."""
    # links.py writes a report with the machine inside.
    rates = report.get("machine", report)
    if rates.get("source") == "rehearsed":
        raise ValueError("it was rehearsed without a GPU")
    flops = {name: float(rates["flops"][name]) for name in ("bfloat16", "float16", "float32")}
    memory, launch = float(rates["memory_bandwidth"]), float(rates.get("launch", machine.launch))
    machine = replace(machine, flops=flops, memory=memory, launch=launch)
    links = {where: rates[where] for where in ("node", "network") if where in rates}
    if rates.get("bandwidth") is not None:
        per_node = int(rates["ranks_per_node"])
        is_network = int(rates["ranks"]) > per_node
        machine = replace(machine, ranks_per_node=per_node) if is_network else machine
        links["network" if is_network else "node"] = rates
    for where, link in links.items():
        measured = {name: float(link[name]) for name in ("bandwidth", "latency")}
        machine = replace(machine, **{where: replace(getattr(machine, where), **measured)})
    return machine
