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

NEEDED = ("accelerate", "lightning", "peft", "timm", "transformers", "trl")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: make integrations")

CONFIG = json.loads((Path(__file__).parents[2] / "examples" / "fsdp2.json").read_text())["fsdp_config"]
FSDP = {"ACCELERATE_USE_FSDP": "true", **{key.upper(): str(value).lower() for key, value in CONFIG.items()}}
FSDP |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": CONFIG["fsdp_transformer_layer_cls_to_wrap"]}
FSDP |= {key: CONFIG[key.lower()] for key in ("FSDP_AUTO_WRAP_POLICY", "FSDP_STATE_DICT_TYPE")}
"""As `accelerate launch --config_file examples/fsdp2.json` sets them."""

CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, str]]] = {
    "trainer": ("trainer_fsdp2", 1, {}, {}),
    "trainer-ddp": ("trainer_fsdp2", 2, {}, {}),
    "trainer-fsdp2": ("trainer_fsdp2", 2, {}, FSDP),
    "trl": ("trl_sft", 1, {}, {}),
    "trl-ddp": ("trl_sft", 2, {}, {}),
    "trl-fsdp2": ("trl_sft", 2, {}, FSDP),
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
    "fsdp2-owned": ("fsdp2", 2, {}, {}),
    "fsdp2-heads": ("fsdp2", 2, {"owned": False}, {}),
    "schedules": ("schedules", 1, {}, {}),
}
"""By name: example, ranks, arguments of `train`, environment variables."""


def run(case: str, folder: Path, out: Path, *flags: str) -> dict[str, Any]:
    """Output of an example's run."""
    name, ranks, options, variables = CASES[case]
    launcher, grouped = [sys.executable], name in ("ddp", "fsdp2") or case == "peft-ddp"
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
