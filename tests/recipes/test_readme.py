"""The README's commands run, shortened; its recipe, links and folders are valid."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.harness import run_program
from titan_muon.titan.recipe import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.S)
    for line in block.splitlines()
]
TRAINING = [c for c in COMMANDS if "train.py" in c and "--dry-run" not in c]


def run(command: str, extra: list[str], folder: Path) -> str:
    """Output of a README command in the repository, with this environment's programs first."""
    words = [*shlex.split(command), *extra]
    if words[0] == "python":
        code, shown = run_program(*words[1:], timeout=300)
        assert code == 0, shown
        return shown
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a run of two small steps in temporary folders."""
    folder = tmp_path_factory.mktemp("readme")
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"document {index} " * 200)
    keys = {
        "training.steps": "2",
        "training.seq_len": "64",
        "training.local_batch_size": "1",
        "training.global_batch_size": "-1",
        "lr_scheduler.warmup_steps": "1",
        "validator.steps": "1",
        "metrics.log_freq": "1",
        "data.source": "files",
        "data.files": str(folder / "*.txt"),
        "data.validation_fraction": "0.3",
        "data.cache": str(folder / "cache"),
        "dump_folder": str(folder / "runs"),
    }
    return [word for key, value in keys.items() for word in (f"--{key}", value)]


def test_an_installation_has_the_named_extras_and_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installs = [command for command in COMMANDS if command.startswith("pip install")]
    extras = {extra for command in installs for extra in re.findall(r"\[(\w+)\]", command)}
    assert "pip install ." in installs
    assert extras == {"titan"} <= project["optional-dependencies"].keys()
    (needed,) = (need.removeprefix("torch>=") for need in project["dependencies"] if need.startswith("torch>="))
    assert f"PyTorch {needed} or newer" in README


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if re.fullmatch(r"make [a-z]+", c)}))
def test_make_has_the_targets_of_the_readme(command: str) -> None:
    assert run(command.replace("make", "make --dry-run"), [], ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINING)
def test_the_training_commands_run(command: str, short: list[str], tmp_path: Path) -> None:
    assert "step 2/2" in run(command, short, tmp_path)


def test_the_dry_run_runs_in_a_single_process(tmp_path: Path) -> None:
    (command,) = (c for c in COMMANDS if "--dry-run" in c)
    assert "muon: 208 matrices" in run(command, ["--data.cache", str(tmp_path)], tmp_path)


@pytest.mark.slow
def test_the_compare_command_runs(short: list[str], tmp_path: Path) -> None:
    (command,) = (c for c in COMMANDS if "compare_runs" in c)
    folder = Path(short[short.index("--dump_folder") + 1])
    for recipe in ("qwen_moe_muon", "qwen_moe_adamw"):
        run(f"python train.py --config configs/{recipe}.toml", short, tmp_path)
    picture = tmp_path / "curves.png"
    printed = run(command.replace("runs/", f"{folder}/"), ["--output", str(picture)], tmp_path)
    assert "optimizer.rule" in printed, "the difference of the recipes comes first"
    assert picture.stat().st_size > 10_000


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
