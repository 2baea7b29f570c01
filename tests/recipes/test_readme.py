"""The README's commands run in order in a fresh copy, shortened; its recipe, links and folders are valid."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from titan_muon.trainer.recipe import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.S)
    for line in block.splitlines()
]
RUN = [c for c in COMMANDS if c.split()[0] in ("torchrun", "python")]
"""In a fresh clone `make`, `pip` and `tensorboard` need a network, or never end."""


def run(command: str, extra: list[str], folder: Path) -> str:
    """Output of a README command in a folder, with this environment's programs first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    words = [*shlex.split(command), *extra]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def short(tmp_path: Path) -> list[str]:
    """Overrides for a run of two small steps, with data in a temporary folder."""
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text(f"document {index} " * 200)
    words = (
        "--training.steps 2 --training.seq_len 64 --training.local_batch_size 1 --training.global_batch_size -1 "
        "--lr_scheduler.warmup_steps 1 --validator.steps 1 --metrics.log_freq 1 --data.source files "
        f"--data.files {tmp_path}/*.txt --data.validation_fraction 0.3 --data.cache {tmp_path}/cache"
    )
    return words.split()


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if re.fullmatch(r"make [a-z]+", c)}))
def test_make_has_the_targets_of_the_readme(command: str) -> None:
    assert run(command.replace("make", "make --dry-run"), [], ROOT)


@pytest.mark.slow
def test_the_commands_run_in_order_in_a_fresh_copy(short: list[str], tmp_path: Path) -> None:
    """Each command finds what the commands before it wrote: `compare_runs.py` reads the runs of two of them."""
    clone = tmp_path / "clone"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    assert [command.split()[0] for command in RUN] == ["torchrun", "python", "python", "torchrun", "python"]
    for command in RUN:
        printed = run(command, [] if "compare_runs" in command else short, clone)
        if "--dry-run" in command:
            assert "muon: 208 matrices" in printed
        elif "compare_runs" in command:
            assert "optimizer.rule" in printed, "the difference of the recipes comes first"
        else:
            assert "step 2/2" in printed


def test_the_recipe_is_accepted(tmp_path: Path) -> None:
    (recipe,) = re.findall(r"```toml\n(.*?)```", README, re.S)
    path = tmp_path / "mine.toml"
    path.write_text(recipe.replace("qwen_moe_muon.toml", str(ROOT / "configs/qwen_moe_muon.toml")))
    loaded = load(path)
    assert loaded.parallelism.expert_parallel_degree == 2
    assert loaded.optimizer.rule[0].optimizer == "adamw"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_have_existing_targets(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_library_example_runs() -> None:
    """The README's snippet trains a whole model: an embedding, two layers and a head."""
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.S)
    model = nn.Module()
    model.embedding = nn.Embedding(10, 8)
    model.layers = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    model.head = nn.Linear(8, 10)
    model.head(model.layers(model.embedding(torch.arange(4)))).square().mean().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names: dict[str, object] = {"model": model}
    exec(snippet, names)
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    parts = names["optimizer"].optimizers  # type: ignore[attr-defined]
    assert [p.fqn for p in parts["muon"].plan.parameters] == ["layers.0.weight", "layers.1.weight"]
