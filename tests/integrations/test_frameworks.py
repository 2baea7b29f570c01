"""Hybrid in user frameworks: every trained parameter moves, and a resumed run has the same bits."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

NEEDED = ("accelerate", "lightning", "peft", "timm", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: make integrations")

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
"""Written by `accelerate config` for FSDP2."""

CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, str]]] = {
    "trainer": ("transformers_trainer", 1, {}, {}),
    "trainer-ddp": ("transformers_trainer", 2, {}, {}),
    "trainer-fsdp2": ("transformers_trainer", 2, {}, FSDP),
    "accelerate": ("accelerate_loop", 1, {}, {}),
    "accelerate-ddp": ("accelerate_loop", 2, {}, {}),
    "accelerate-fsdp2": ("accelerate_loop", 2, {}, FSDP),
    "lightning": ("lightning_module", 1, {}, {}),
    "lightning-ddp": ("lightning_module", 2, {"strategy": "ddp", "devices": 2}, {}),
    "lightning-fsdp2": ("lightning_module", 2, {"fsdp": True, "devices": 2}, {}),
    "peft": ("peft_lora", 1, {}, {}),
    "peft-ddp": ("peft_lora", 2, {}, {}),
    "ddp-1": ("ddp", 1, {}, {}),
    "ddp": ("ddp", 2, {}, {}),
    "fsdp2": ("ddp", 2, {"fsdp": True}, {}),
    "schedules": ("schedules", 1, {}, {}),
}
"""By name: example, ranks, arguments of `train`, environment variables."""


def run(case: str, folder: Path, out: Path, *flags: str) -> dict[str, Any]:
    """Output of an example's run."""
    name, ranks, options, variables = CASES[case]
    launcher, grouped = [sys.executable], name == "ddp" or case == "peft-ddp"
    if ranks > 1 or grouped:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", "tests.integrations.run_example", name, str(folder), str(out)]
    command += [f"--options={json.dumps(options)}", *flags, *(["--group"] if grouped else [])]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    written: dict[str, Any] = torch.load(out)
    return written


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_moves_and_a_resumed_run_has_the_same_bits(case: str, tmp_path: Path) -> None:
    whole = run(case, tmp_path / "whole", tmp_path / "whole.pt")
    assert whole["trained"] == (8 if "peft" in case else 21)
    assert not whole["still"], "parameters that did not move"
    resumed = run(case, tmp_path / "whole", tmp_path / "resumed.pt", "--resume")["weights"]
    weights = whole["weights"]
    parted = [name for name in weights if not torch.equal(weights[name], resumed[name])]
    assert not parted, f"{parted} have other bits after a resume"
