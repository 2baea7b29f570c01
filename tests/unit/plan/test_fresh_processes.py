"""Fresh processes make equal plans, whatever their hash seed, addresses and order of imports.

More plans: `make test-long`.
"""

import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LONG = int(os.environ.get("TITAN_MUON_LONG", "1"))
PLANS, PROCESSES = 75, 3
ROOT = Path(__file__).parents[3]
SHAPES = ((24, 40), (40, 24), (13, 18), (5, 12, 20), (4, 9, 9), (64, 16), (3, 8, 48))
ALGORITHMS: tuple[str | tuple[str, ...], ...] = ("muon", "soap", "normuon", "adamuon", "muoneq", ("muoneq", "normuon"))


# fmt: off
OPTIONS: dict[str, tuple[Any, ...]] = {
    # Values to draw from, the likely ones several times.
    "cautious": (True, False), "nesterov": (True, True, False), "state": (*["replicated"] * 4, "owner"),
    "state_dtype": (*["float32"] * 4, "bfloat16", "int8"), "offload": (*["none"] * 4, "state"),
    "exchange": ("all_to_all", "all_to_all", "all_gather", "all_gather_reduce_scatter"),
    "replicas": ("auto", "split", "redundant"), "wire_dtype": ("bfloat16", "float32"),
    "rounding": ("stochastic", "nearest"), "on_bad_gradient": ("error", "skip_missing"),
    "buffer_gib": ("auto", "auto", 20_000 / 2**30),
}
# fmt: on


def text_of(seed: int) -> str:
    """The plan of a random step on 8 ranks with its digest, or the error."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tests.shared import muon_keywords
    from titan_muon import Muon
    from titan_muon.engine.engine import checked_plan
    from titan_muon.engine.exchange.agreement import report_of
    from titan_muon.engine.tensors.storage import trained_params
    from titan_muon.selection import select

    draw = random.Random(seed)
    meshes = [init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (2, 4)), init_device_mesh("cpu", (4, 2))]
    groups: list[dict[str, Any]] = []
    for number in range(draw.randint(1, 3)):
        group: dict[str, Any] = {"params": [], "param_names": [], "algorithm": draw.choice(ALGORITHMS)}
        for index in range(draw.randint(1, 4)):
            tensor = torch.zeros(draw.choice(SHAPES), dtype=draw.choice((torch.float32, torch.float32, torch.bfloat16)))
            if draw.random() < 0.8:
                mesh = draw.choice(meshes)
                placements = [draw.choice((Replicate(), Shard(0), Shard(1))) for _ in range(mesh.ndim)]
                tensor = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
            group["params"].append(torch.nn.Parameter(tensor))
            # Each plan has other names, and so another order of a set.
            group["param_names"].append(f"layers.{number}.weight{index}_{draw.randrange(1000)}")
        groups.append(group)
    try:
        muon = Muon(groups, **muon_keywords(**{name: draw.choice(values) for name, values in OPTIONS.items()}))
        params = list(trained_params(muon.param_groups, muon.state, 0, muon.options))
        groups, tensors = [trained.group for trained in params], [trained.param for trained in params]
        selected = select(muon.options, groups, tensors, torch.device("cpu"))
        plan, geometries = checked_plan(params, selected, {}, 0)
        report = report_of(plan, geometries, params, muon.options, muon.param_groups, {}, tuple(range(8)))
        return f"{plan} {report}"
    except ValueError as error:
        return f"refused: {error}"


def main(number: int, plans: int) -> None:
    """Print a digest for each plan. `number`: of the process, and of the module that it imports first."""
    draw, names = random.Random(number), ("algorithms.soap", "planner.planner", "hybrid")
    modules = [f"titan_muon.{name}" for name in (*names[number:], *names[:number])]
    modules.insert(draw.randint(0, len(names)), "torch.distributed.tensor")
    for module in modules:
        # Objects between the modules move addresses.
        kept = [bytearray(draw.randint(16, 4096)) for _ in range(draw.randint(0, 2000))]
        importlib.import_module(module)
        del kept[::2]
    import warnings

    from titan_muon.forecast.fake_world import fake_world

    warnings.simplefilter("ignore")
    with fake_world(8):
        texts = [text_of(seed) for seed in range(plans)]
    refused = sum(text.startswith("refused") for text in texts)
    print(json.dumps([refused, *(hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts)]))


def digests(number: int) -> list[Any]:
    environment = {**os.environ, "PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": "1"}
    words = f"from tests.unit.plan.test_fresh_processes import main; main({number}, {PLANS * LONG})"
    done = subprocess.run(
        [sys.executable, "-c", words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


def test_fresh_processes_plan_the_same_steps() -> None:
    with ThreadPoolExecutor(PROCESSES) as pool:
        first, *others = pool.map(digests, range(PROCESSES))
    refused, *plans = first
    assert refused < len(plans) / 2
    for number, other in enumerate(others, 1):
        different = [seed for seed, pair in enumerate(zip(first, other, strict=True), -1) if pair[0] != pair[1]]
        assert not different, f"process {number} plans the steps of seeds {different} otherwise than process 0"
