"""Models of Megatron-FSDP train as one process does, and continue under FSDP2 and back."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

MISSING = importlib.util.find_spec("megatron_fsdp") is None
pytestmark = pytest.mark.skipif(MISSING, reason="needs megatron_fsdp: make integrations")

ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params", "experimental")
CASES = [
    *((2, kind) for kind in ZERO),
    *((4, kind) for kind in (*ZERO, "hsdp", "hfsdp", "experimental hsdp", "tp", "ep")),
]
CLOSE = 1e-6


def run(ranks: int, kind: str, folder: Path) -> dict[str, str]:
    """The printed results by name."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", "tests.integrations.run_megatron", kind, str(folder)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


@pytest.mark.parametrize(("ranks", "kind"), CASES, ids=[f"{kind}, {ranks} ranks" for ranks, kind in CASES])
def test_weights_are_those_of_one_process_before_and_after_fsdp2(ranks: int, kind: str, tmp_path: Path) -> None:
    found = run(ranks, kind, tmp_path)
    for stage in (kind,) if kind == "ep" else (kind, "fsdp2", f"{kind} again"):
        assert float(found[stage]) < CLOSE, f"{stage}: {found}"
    if kind == "ep":
        return
    # Tensor parallelism replicates embedding, norms and head.
    copies = {"no_shard": ranks, "hsdp": 2, "experimental hsdp": 2, "tp": 95 / 61}.get(kind, 1)
    assert float(found[f"{kind}, copies"]) == copies
    assert float(found["fsdp2, copies"]) == 1


def test_calls_that_would_be_wrong_are_refused_by_name(tmp_path: Path) -> None:
    found = run(4, "refusals", tmp_path)
    assert "overlap = 'forward' has no hooks in a model of Megatron-FSDP; set 'none'" in found["overlap"]
    assert "follow_megatron_fsdp(optimizer, model) before the first step" in found["zeros"]
    assert "all gradients of the first step are zero, as fully_shard_optimizer" in found["zeros after"]
    assert found["weights"] == "unchanged"
    assert "build a new Hybrid for more of them" in found["names"]
    assert "is not a sharded parameter of Megatron-FSDP" in found["plain"]
    assert "its second backward pass fails; use fully_shard_model" in found["experimental hfsdp"]
