"""Files, functions and classes of this package that a step and `build()` run through, on 2 gloo ranks without options.

`build()` is counted also with planner = "rule". `python -m benchmarks.step_counts` prints the counts, `--list` also
what they count. The step is the second, because the first also builds. A class counts if one of its methods runs.
Generator expressions, comprehensions and lambdas belong to their function.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import titan_muon

PACKAGE = Path(titan_muon.__file__).parent
SHAPE, MATRICES, RANKS = (24, 40), 6, 2


@dataclass(frozen=True)
class Counted:
    """What a call runs through: (file, qualified name) of each function."""

    functions: frozenset[tuple[str, str]]

    @property
    def files(self) -> int:
        return len({file for file, _ in self.functions})

    @property
    def classes(self) -> int:
        return len({(file, name.split(".")[0]) for file, name in self.functions if name[:1].isupper() and "." in name})

    def line(self, title: str) -> str:
        return f"{title}: {self.files} files, {len(self.functions)} functions, {self.classes} classes"


def counted(act: Callable[[], object]) -> Counted:
    """Runs `act` with a hook on every call of a function."""
    seen: set[tuple[str, str]] = set()

    def hook(frame, event, _):  # type: ignore[no-untyped-def]
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            name = code.co_qualname.replace("<locals>.", "")
            if not any(part in name for part in ("comp>", "<genexpr>", "<lambda>", "<module>")):
                seen.add((os.path.relpath(code.co_filename, PACKAGE), name))

    sys.setprofile(hook)
    try:
        act()
    finally:
        sys.setprofile(None)
    return Counted(frozenset(seen))


def run(rank: int, store: str, listed: bool) -> None:
    """One of the two ranks. Rank 0 prints."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    params = [
        (f"layers.{i}.weight", torch.nn.Parameter(distribute_tensor(torch.randn(SHAPE), mesh, [Shard(0)])))
        for i in range(MATRICES)
    ]
    by_rule = titan_muon.Muon(params, expert=titan_muon.Expert(planner="rule"))
    ruled = counted(by_rule.build)
    by_rule.close()
    optimizer = titan_muon.Muon(params)
    built, step = counted(optimizer.build), Counted(frozenset())
    for number in range(2):
        for _, param in params:
            param.grad = distribute_tensor(torch.randn(SHAPE), mesh, [Shard(0)])
        step = counted(optimizer.step) if number else (optimizer.step(), step)[1]
    if rank == 0:
        print(step.line("second step"))
        print(built.line("build()"))
        print(ruled.line("build() by the rule"))
        for file, name in sorted(step.functions) if listed else ():
            print(f"  {file} {name}")
        for file in sorted({file for file, _ in built.functions}) if listed else ():
            print(f"  build() {file} {sum(where == file for where, _ in built.functions)}")
    optimizer.check_last_step()
    optimizer.close()
    dist.destroy_process_group()


def main() -> None:
    """Print the counts of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="also print what is counted")
    listed = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (f"{folder}/store", listed), RANKS)


if __name__ == "__main__":
    main()
