"""Runs every kind of trainer with three seeds: `python -m tests.audit.prove --out docs/results/audit.json`.

`--cost 4096` compares the CPU time of steps with and without an audit, for a matrix of 4,096 x 4,096 in float32.
"""

import argparse
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.audit.trainers import KINDS, Applied, audited
from tests.dist.harness import World
from tests.reference_muon import newton_schulz
from titan_muon.audit import Audit


def cost(size: int) -> None:
    """Print seconds of CPU time of each step, without an audit and with one; the audit judges before the last step."""
    for audit in (nullcontext(), Audit()):
        model = nn.Linear(size, size, bias=False)
        optimizer = Applied([model.weight], lambda p: newton_schulz(p.grad, dtype=torch.float32), momentum=0.0)
        seconds = list[float]()
        with audit:
            for _ in range(5):
                begin = time.process_time()
                model(torch.randn(64, size)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seconds.append(round(time.process_time() - begin, 1))
        print(type(audit).__name__, seconds, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", type=int, help="numbers of kinds, by default all")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cost", type=int, metavar="SIZE")
    options = parser.parse_args()
    if options.cost:
        cost(options.cost)
        return
    worlds, rows = {size: World(size, quiet=True) for size in (1, 2, 4)}, list[dict[str, Any]]()
    for number, kind in enumerate(KINDS):
        for seed in map(int, options.seeds.split(",")):
            if options.kinds and number not in options.kinds:
                continue
            begin = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                codes, text, report = worlds[kind.ranks].run(audited, number, seed, folder, timeout=300)[0]
            right = codes == ([kind.code] if kind.code else [])
            print(number, kind.name, seed, "as expected" if right else f"not as expected\n{text}", flush=True)
            row = {"kind": kind.name, "source": kind.source, "ranks": kind.ranks, "expected": kind.code, "seed": seed}
            row |= {"set": "thresholds" if number % 2 == 0 else "check", "codes": codes, "right": right}
            seconds = {"audit_seconds": round(report["seconds"], 2), "seconds": round(time.perf_counter() - begin, 2)}
            rows.append(row | seconds | {"table": report["table"], "undecided": report["undecided"]})
    for world in worlds.values():
        world.close()
    if options.out:
        options.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} as expected")


if __name__ == "__main__":
    main()
