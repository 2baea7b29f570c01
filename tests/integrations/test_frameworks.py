"""Hybrid in user frameworks: every trained parameter moves, and a resumed run has the same bits.

Models of Megatron-FSDP train as one process does, and continue under FSDP2 and back.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: make integrations")


def output_of(*words: str, ranks: int = 0, **variables: str) -> str:
    """What `python -m WORDS` prints, on ranks of torchrun if any."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, "-m", *words]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


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
    name, ranks, options, variables = CASES[case]
    grouped = name in ("ddp", "fsdp2") or case == "peft-ddp"
    words = ["tests.integrations.run_example", name, str(folder), str(out), f"--options={json.dumps(options)}", *flags]
    output_of(*words, *(["--group"] if grouped else []), ranks=ranks if ranks > 1 or grouped else 0, **variables)
    return torch.load(out)


@needs("accelerate", "lightning", "peft", "timm", "transformers", "trl")
@pytest.mark.parametrize("case", CASES)
def test_every_parameter_moves_and_a_resumed_run_has_the_same_bits(case: str, tmp_path: Path) -> None:
    whole = run(case, tmp_path / "whole", tmp_path / "whole.pt")
    assert whole["trained"] == (8 if "peft" in case else 21)
    assert not whole["still"], "parameters that did not move"
    resumed = run(case, tmp_path / "whole", tmp_path / "resumed.pt", "--resume")["weights"]
    weights = whole["weights"]
    parted = [name for name in weights if not torch.equal(weights[name], resumed[name])]
    assert not parted, f"{parted} have other bits after a resume"


# --- Megatron-FSDP ---


ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params", "experimental")
KINDS = [
    *((2, kind) for kind in ZERO),
    *((4, kind) for kind in (*ZERO, "hsdp", "hfsdp", "experimental hsdp", "tp", "ep")),
]
CLOSE = 1e-6


def run_megatron(ranks: int, kind: str, folder: Path) -> dict[str, str]:
    shown = output_of("tests.integrations.run_megatron", kind, str(folder), ranks=ranks)
    return dict(line.split(": ", 1) for line in shown.splitlines() if ": " in line)


@needs("megatron_fsdp")
@pytest.mark.parametrize(("ranks", "kind"), KINDS, ids=[f"{kind}, {ranks} ranks" for ranks, kind in KINDS])
def test_weights_are_those_of_one_process_before_and_after_fsdp2(ranks: int, kind: str, tmp_path: Path) -> None:
    found = run_megatron(ranks, kind, tmp_path)
    for stage in (kind,) if kind == "ep" else (kind, "fsdp2", f"{kind} again"):
        assert float(found[stage]) < CLOSE, f"{stage}: {found}"
    if kind == "ep":
        return
    # Tensor parallelism replicates embedding, norms and head.
    copies = {"no_shard": ranks, "hsdp": 2, "experimental hsdp": 2, "tp": 95 / 61}.get(kind, 1)
    assert float(found[f"{kind}, copies"]) == copies
    assert float(found["fsdp2, copies"]) == 1


@needs("megatron_fsdp")
def test_calls_that_would_be_wrong_are_refused_by_name(tmp_path: Path) -> None:
    found = run_megatron(4, "refusals", tmp_path)
    assert "overlap = 'forward' has no hooks in a model of Megatron-FSDP; set 'none'" in found["overlap"]
    assert "follow_megatron_fsdp(optimizer, model) before the first step" in found["zeros"]
    assert "all gradients of the first step are zero, as fully_shard_optimizer" in found["zeros after"]
    assert found["weights"] == "unchanged"
    assert "build a new Hybrid for more of them" in found["names"]
    assert "is not a sharded parameter of Megatron-FSDP" in found["plain"]
    assert "its second backward pass fails; use fully_shard_model" in found["experimental hfsdp"]
