"""Machines with some rates of a test's choice."""

import hashlib
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titan_muon.options import Machine
from titan_muon.planner.machine import MACHINES, Link, MachineRates


def rates(name: str = "h100x8", ranks_per_node: int | None = None, **numbers: float) -> MachineRates:
    """A named machine with other numbers: `tflops`, `tflops_float32`, `memory_gb`, `launch_us`, and for each link
    (`node`, `network`) a bandwidth in GB/s and a latency, as `node_gb` and `node_latency_us`.
    """
    machine = MACHINES[name]
    flops = dict(machine.flops)
    if "tflops" in numbers:
        flops |= dict.fromkeys(("bfloat16", "float16"), numbers.pop("tflops") * 1e12)
    if "tflops_float32" in numbers:
        flops["float32"] = numbers.pop("tflops_float32") * 1e12

    def link(where: str) -> Link:
        old: Link = getattr(machine, where)
        bandwidth = numbers.pop(f"{where}_gb", old.bandwidth / 1e9) * 1e9
        return replace(old, bandwidth=bandwidth, latency=numbers.pop(f"{where}_latency_us", old.latency * 1e6) / 1e6)

    other: dict[str, Any] = {"flops": flops, "node": link("node"), "network": link("network")}
    other["memory"] = numbers.pop("memory_gb", machine.memory / 1e9) * 1e9
    other["launch"] = numbers.pop("launch_us", machine.launch * 1e6) / 1e6
    assert not numbers, f"unknown numbers: {numbers}"
    return replace(machine, **other, ranks_per_node=ranks_per_node or machine.ranks_per_node)


def machine_file(name: str = "cpu", ranks_per_node: int | None = None, **numbers: float) -> Machine:
    """The option `machine` with a file of these rates, which all processes of the machine find again."""
    machine = rates(name, ranks_per_node, **numbers)
    links = {where: asdict(getattr(machine, where)) for where in ("node", "network")}
    document = {"flops": machine.flops, "memory_bandwidth": machine.memory, "launch": machine.launch, **links}
    text = json.dumps(document)
    file = Path(tempfile.gettempdir()) / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    # Whole, because ranks read it at the same time.
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as part:
        part.write(text)
    Path(part.name).replace(file)
    return Machine(name=name, file=str(file), ranks_per_node=ranks_per_node)  # type: ignore[arg-type]
