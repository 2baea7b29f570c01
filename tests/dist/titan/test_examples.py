"""TorchTitan's own trainer and stages with our optimizer; torch.optim.Muon in a recipe; a policy that learns."""

import importlib
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import models
from examples.rl_loop import train as train_policy
from tests import tiny
from tests.dist.harness import on_ranks, run_ranks
from tests.shared import equal, local
from titan_muon.trainer.data import files
from titan_muon.trainer.recipe.sections import Data
from titan_muon.trainer.torchtitan import compat

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "torchtitan"
SEQUENCES, STEPS, HALF = 4, 4, 2
TOLERANCE = 1e-3
LAYOUTS: Mapping[str, tuple[int, int, tuple[str, ...]]] = {
    "FSDP 2": (2, 2, ()),
    "TP 2": (2, 1, ("--parallelism.tensor_parallel_degree=2",)),
    "EP 2": (2, 2, ("--parallelism.expert_parallel_degree=2",)),
    "HSDP 2": (2, 2, ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")),
    "FSDP 2, TP 2, EP 2": (4, 2, ("--parallelism.tensor_parallel_degree=2", "--parallelism.expert_parallel_degree=2")),
}
"""Ranks, data-parallel ranks and options of the command line."""


def small_config() -> Any:
    """TorchTitan's debug configuration with another model and text, because its text is in TorchTitan's repository."""
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    from models import qwen3
    from titan_muon.trainer.data.loader import dataloader_config
    from titan_muon.trainer.data.tokenizers import tokenizer_config

    config, data = qwen3_moe_debug(), Data(source="python", tokenizer="bytes")
    config.model_spec = qwen3.build("moe_tiny", vocab_size=None)
    config.loss.loss_fn.global_vocab_size = decoder_vocab_size(config.model_spec)
    config.tokenizer, config.dataloader = tokenizer_config(data), dataloader_config(data)
    config.training = replace(config.training, steps=STEPS, seq_len=64)
    config.checkpoint = replace(config.checkpoint, enable=True, interval=HALF)
    return config


def train(rank: int, world_size: int, folder: Path, data_ranks: int, options: tuple[str, ...]) -> list[str]:
    real = files._python_files()
    files._python_files = lambda: {name: real[name] for name in sorted(real)[:20]}
    flavors = models._family("qwen3").FLAVORS
    flavors["moe_tiny"] = replace(flavors["moe_tiny"], layers=2, dim=64, hidden=64, heads=4, kv_heads=2, experts=4)
    sequences = SEQUENCES // data_ranks
    lines: list[str] = []
    # Not a handler, because TorchTitan's start removes them.
    for name in (None, "titan_muon.trainer.assign.container"):
        logging.getLogger(name).addFilter(lambda record: lines.append(record.getMessage()) is None)
    sys.path.insert(0, str(EXAMPLE))
    vars(importlib.import_module("muon_config"))["qwen3_moe_debug"] = small_config
    sys.argv = ["launch.py", "--module", "muon_config", "--config", "qwen3_moe", f"--dump_folder={folder}", *options]
    sys.argv += [f"--training.local_batch_size={sequences}", "--training.mixed_precision_param=float32"]
    sys.argv += ["--metrics.disable_color_printing"]
    runpy.run_path(str(EXAMPLE / "launch.py"), run_name="__main__")
    return lines


def losses(lines: list[str]) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) +loss: +([\d.]+)", "\n".join(lines))}


def trained(layout: str, folder: Path) -> list[str]:
    ranks, data_ranks, options = LAYOUTS[layout]
    return run_ranks(train, ranks, folder, data_ranks, options, timeout=500)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses(run_ranks(train, 1, tmp_path_factory.mktemp("one"), 1, (), timeout=500)[0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchtitans_trainer_trains_saves_and_continues(
    layout: str, expected: dict[int, float], tmp_path: Path
) -> None:
    lines = trained(layout, tmp_path)
    assert expected[STEPS] < expected[1] - 0.05, "a model that does not learn hides differences"
    assert losses(lines) == pytest.approx(expected, abs=TOLERANCE)
    text = "\n".join(lines)
    assert re.search(r"^layers\.\*\.attention\.wo\.weight .* muon ", text, re.MULTILINE), "the table of parameters"
    assert re.search(r"^Muon step: \d+ matrices", text, re.MULTILINE), "the plan"
    shutil.rmtree(tmp_path / "checkpoint" / f"step-{STEPS}")
    continued = trained(layout, tmp_path)
    assert losses(continued) == {step: loss for step, loss in losses(lines).items() if step > HALF}


def losses_of(folder: Path, name: str, config: Path, *words: str) -> dict[int, float]:
    command = [sys.executable, "train.py", f"--config={config}", *words, f"--name={name}", f"--dump_folder={folder}"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}"}
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)
    return tiny.records(next(folder.glob(f"{name}/*/metrics.jsonl")).parent, "loss")


def test_torch_muon_and_muon_have_the_same_losses(tmp_path: Path) -> None:
    """examples/torch_muon: another package's optimizer in a recipe."""
    tiny.write_recipe(tmp_path)
    torch_muon = ROOT / "examples" / "torch_muon"
    # As pip installs the example.
    info = tmp_path / "torch_muon_in_recipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-muon-in-recipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[titan_muon.optimizers]\ntorch_muon = torch_muon:entry\n")
    (tmp_path / "torch_muon.py").write_text((torch_muon / "torch_muon.py").read_text())
    assert 'torch_muon = "torch_muon:entry"' in (torch_muon / "pyproject.toml").read_text()
    files = f'["{tmp_path}/corpus/*.txt"]'
    words = ["--data.source=files", f"--data.files={files}", f"--data.cache={tmp_path}/cache"]
    words += ["--training.steps=3", "--training.seq_len=64", "--training.global_batch_size=4"]
    words += ["--optimizer.clip=none", "--metrics.log_freq=1", "--validator.enable=false"]
    torchs = losses_of(tmp_path, "torchs", torch_muon / "llama.toml", *words)
    reference = ["--muon.lr", "4e-3", "--muon.expert.orthogonalize", "reference"]
    ours = losses_of(tmp_path, "ours", ROOT / "configs" / "llama_muon.toml", *words, *reference)
    assert len(ours) == 3
    assert torchs == ours


@on_ranks(2)
def test_the_policy_learns_and_offload_between_phases_changes_no_bit(rank: int) -> None:
    """examples/rl_loop.py: the optimizer's states move to the host and back."""
    (policy, rewards), (other, kept) = (train_policy(40, offload=offload) for offload in (True, False))
    assert sum(rewards[-5:]) / 5 > 0.5 > 0.1 > sum(rewards[:5]) / 5
    assert rewards == kept
    assert equal(map(local, policy.parameters()), map(local, other.parameters()))


# TorchTitan on ranks: pipeline stages without names of the whole model, and a replaced collective.


@on_ranks(2)
@pytest.mark.parametrize("ends_alone", [False, True])
def test_a_stage_has_the_rules_of_the_whole_model(rank: int, ends_alone: bool) -> None:
    """A rule for one stage is not refused on another stage, also one without a matrix, and has a group on each."""
    from tests.unit.titan.assign.test_optimizers import Model, names
    from titan_muon.assignment.options import Rule
    from titan_muon.trainer.assign.container import HybridOptimizers

    slow = Rule(match="layers.1.wq.*", optimizer="muon", options={"lr": 0.5})
    config = HybridOptimizers.Config(rules=(slow,), tables={"muon": {"lr": 1e-3}, "adamw": {"lr": 1e-3}})
    first = Model(hidden=False) if ends_alone else Model(layers=1)
    part = first if rank == 0 else Model(layers=1, first=1, ends=False)
    fully_shard(part, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "fsdp"))["fsdp"])
    queries, outputs = ({f"layers.{rank}.{name}.weight"} for name in ("wq", "wo"))
    groups = names(HybridOptimizers(config, model_parts=[part]))["muon"]
    if ends_alone:
        assert groups == ([queries, outputs] if rank else [set(), set()])
    else:
        assert groups == ([outputs, queries] if rank else [queries | outputs, set()])


@on_ranks(2)
def test_spmd_types_exchanges_pieces_of_any_size_on_gloo(rank: int) -> None:
    compat.install()
    import spmd_types._dist as spmd_dist

    # Rank r sends 1 + r rows to rank 0 and 3 rows to rank 1, each row with the sender's number.
    rows = [[1, 3], [2, 3]]
    inputs = [torch.full((count, 2), float(rank)) for count in rows[rank]]
    outputs = [torch.empty(rows[sender][rank], 2) for sender in range(2)]
    spmd_dist.dist.all_to_all(outputs, inputs, group=torch.distributed.group.WORLD)
    assert spmd_dist.dist.get_world_size() == 2
    assert all(torch.equal(piece, torch.full_like(piece, float(sender))) for sender, piece in enumerate(outputs))
