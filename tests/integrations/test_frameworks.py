"""Hybrid in the frameworks that people use: every trained parameter moves, and a resumed run has the same bits."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

MISSING = [
    name for name in ("accelerate", "lightning", "peft", "transformers") if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: make integrations")

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
"""What `accelerate config` writes for FSDP2."""

CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, str]]] = {
    "trainer": ("transformers_trainer", 1, {}, {}),
    "trainer-ddp": ("transformers_trainer", 2, {}, {}),
    "trainer-fsdp2": ("transformers_trainer", 2, {}, FSDP),
    "accelerate": ("accelerate_loop", 1, {}, {}),
    "accelerate-ddp": ("accelerate_loop", 2, {}, {}),
    "accelerate-fsdp2": ("accelerate_loop", 2, {}, FSDP),
    "lightning": ("lightning_module", 1, {}, {}),
    "lightning-ddp": ("lightning_module", 2, {"strategy": "ddp", "devices": 2}, {}),
    "peft": ("peft_lora", 1, {}, {}),
    "ddp": ("ddp", 2, {}, {}),
    "fsdp2": ("ddp", 2, {"fsdp": True}, {}),
}


def run(case: str, folder: Path, out: Path, steps: int, *flags: str) -> dict[str, torch.Tensor]:
    """The weights after a run of an example."""
    name, ranks, options, variables = CASES[case]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", "tests.integrations.run_example", name, str(folder), str(out), f"--steps={steps}"]
    command += [f"--options={json.dumps(options)}", *flags, *(["--group"] if name == "ddp" else [])]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    weights: dict[str, torch.Tensor] = torch.load(out)
    return weights


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_moves_and_a_resumed_run_has_the_same_bits(case: str, tmp_path: Path) -> None:
    whole = run(case, tmp_path / "whole", tmp_path / "whole.pt", 8)
    none = run(case, tmp_path / "none", tmp_path / "none.pt", 0 if "trainer" not in case else 1)
    trained = {name for name in whole if case != "peft" or "lora_" in name}
    still = [name for name in trained if torch.equal(whole[name], none[name])]
    assert not still, f"{still} did not move"
    resumed = run(case, tmp_path / "whole", tmp_path / "resumed.pt", 8, "--resume")
    parted = [name for name in whole if not torch.equal(whole[name], resumed[name])]
    assert not parted, f"{parted} have other bits after a resume"
