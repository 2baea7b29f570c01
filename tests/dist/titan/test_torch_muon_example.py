"""examples/torch_muon: torch.optim.Muon as another package's optimizer in a recipe has the losses of Muon."""

import os
import subprocess
import sys
from pathlib import Path

from tests import tiny

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "torch_muon"


def losses(folder: Path, name: str, config: Path, *words: str) -> dict[int, float]:
    """The loss of each step of a run of 3 steps."""
    command = [sys.executable, "train.py", f"--config={config}", *words, f"--name={name}", f"--dump_folder={folder}"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}"}
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)
    return tiny.records(next(folder.glob(f"{name}/*/metrics.jsonl")).parent, "loss")


def test_torch_muon_and_muon_have_the_same_losses(tmp_path: Path) -> None:
    tiny.write_recipe(tmp_path)
    # As pip installs the example.
    info = tmp_path / "torch_muon_in_recipes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-muon-in-recipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[titan_muon.optimizers]\ntorch_muon = torch_muon:entry\n")
    (tmp_path / "torch_muon.py").write_text((EXAMPLE / "torch_muon.py").read_text())
    assert 'torch_muon = "torch_muon:entry"' in (EXAMPLE / "pyproject.toml").read_text()
    files = f'["{tmp_path}/corpus/*.txt"]'
    words = ["--data.source=files", f"--data.files={files}", f"--data.cache={tmp_path}/cache"]
    words += ["--training.steps=3", "--training.seq_len=64", "--training.global_batch_size=4"]
    words += ["--optimizer.clip=none", "--metrics.log_freq=1", "--validator.enable=false"]
    torchs = losses(tmp_path, "torchs", EXAMPLE / "llama.toml", *words)
    reference = ["--muon.lr", "4e-3", "--muon.expert.orthogonalize", "reference"]
    ours = losses(tmp_path, "ours", ROOT / "configs" / "llama_muon.toml", *words, *reference)
    assert len(ours) == 3
    assert torchs == ours
