"""The docs: generated tables, examples, commands and recipes, and quoted messages agree with the code."""

import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from contextlib import nullcontext
from itertools import dropwhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import titan_muon
from docs import make_api, make_compatibility
from tests import tiny
from tests.shared import message, muon_keywords
from titan_muon import Muon, registry, removed
from titan_muon.engine.faults.faults import REMEDIES
from titan_muon.engine.tensors.storage import missing_streams
from titan_muon.kernels import fused
from titan_muon.options import Machine, MuonOptions
from titan_muon.planner.machine import ERROR, MACHINES, planning_machine
from titan_muon.selection import algorithm_of
from titan_muon.trainer import device
from titan_muon.trainer.commands import start, sweep
from titan_muon.trainer.recipe import constraints, load
from titan_muon.trainer.recipe.command_line import parse
from titan_muon.trainer.recipe.degrees import TORCH_NEEDS
from titan_muon.trainer.torchtitan import compat

DOCS = Path(make_api.__file__).parent
ROOT = DOCS.parent
README = ROOT / "README.md"


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_the_page_of_the_api_is_what_its_script_writes() -> None:
    assert read(make_api.PAGE) == make_api.page()


def test_the_migration_page_has_every_removed_option() -> None:
    page = read(DOCS / "migration.md").partition("## From 0.2.0")[2]
    names = [key.rpartition(".")[2] for key in removed.OPTIONS]
    names += [str(value) for _, value in removed.VALUES]
    assert [name for name in (*names, *(f"--{flag}" for flag in removed.FLAGS)) if name not in page] == []


README_FIGURES = (  # the words, and the page with the figures and their command
    ("commit e06cfd46", "h200.md", "make gpu"),
    ("20.6, 37.8 and 492 ms", "h200.md", "make gpu"),
    ("42 M parameters", "h200.md", "make gpu"),
    ("40 M tokens was 2.249 with Muon and 2.913 with AdamW", "h200.md", "make gpu"),
    ("models of 1.5 and 3.6 million parameters", "study.md", "titan-muon sweep"),
)


@pytest.mark.parametrize(("words", "page", "command"), README_FIGURES)
def test_a_page_of_results_has_the_readmes_figures_and_their_command(words: str, page: str, command: str) -> None:
    text = " ".join(read(DOCS / "results" / page).split())
    assert words in " ".join(read(README).split())
    assert command in text
    assert [figure for figure in re.findall(r"\b[\d.]+\b|\be\w{7}\b", words) if figure not in text] == []


SLOW = {"options": pytest.mark.slow}


@pytest.mark.parametrize("table", [pytest.param(t, marks=SLOW.get(t, ())) for t in make_compatibility.TABLES])
def test_the_page_of_compatibility_has_the_refusals_of_the_code(table: str) -> None:
    begin, end = make_compatibility.BEGIN.format(table), make_compatibility.END.format(table)
    page = read(make_compatibility.PAGE)
    assert page.partition(begin)[2].partition(end)[0] == make_compatibility.TABLES[table]()


def test_the_tables_of_compatibility_try_every_option_relation_and_need() -> None:
    tried = {name for name, _ in make_compatibility.settings()}
    assert {item.name for item in make_compatibility.fields(make_compatibility.MuonOptions)} - tried == {
        "algorithm_options",
        "machine",
    }
    source = inspect.getsource(constraints)
    # A loop has one check for each key.
    looped = [key for keys in re.findall(r"for key in \((.*)\):", source) for key in keys.split(",")]
    checks = source.count("\n        yield ") + len(looped)
    rows = make_compatibility.recipe_pairs().splitlines()[2:]
    assert sum(row.split("|")[1].count("`") // 2 for row in rows) == checks
    rows = [line for line in read(make_compatibility.PAGE).splitlines() if "torch before" in line]
    for need in TORCH_NEEDS:
        assert any(row.startswith(f"| `{need.key}") and row.endswith(f"| {need.cause} |") for row in rows), need.key


def test_every_public_and_every_imported_name_is_documented() -> None:
    text = make_api.page()
    for name in titan_muon.__all__:
        assert getattr(titan_muon, name).__doc__, f"{name} has no docstring"
        assert f"| [{name}](" in text
    known = {"titan_muon": (*titan_muon.__all__, "registry"), **make_api.MODULES}
    pages = (*DOCS.glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.py"))
    imports = [match for page in pages for match in re.findall(r"from (titan_muon[\w.]*) import ([\w, ]+)", read(page))]
    assert len(imports) > 10
    unknown = {(module, name) for module, names in imports for name in names.split(", ")}
    unknown -= {(module, name) for module, names in known.items() for name in names}
    assert not unknown, "add them to MODULES of docs/make_api.py"


def test_every_message_of_a_fault_has_a_row() -> None:
    section = read(DOCS / "faults.md").split("## Faults of a step\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", section, re.M)
    for remedy in REMEDIES.values():
        assert any(row in remedy for row in rows), remedy


def blocks(page: Path, language: str = "python") -> list[str]:
    """Blocks of code. Blocks marked ```python cluster need ranks; tests/dist/features run the calls."""
    return re.findall(rf"```{language}\n(.*?)```", read(page), re.S)


def namespace() -> dict[str, Any]:
    """A model of one attention layer with 32 heads, the Muon after a backward, and logits."""
    block = nn.ModuleDict({"wq": nn.Linear(16, 32 * 128, bias=False), "wk": nn.Linear(16, 8 * 128, bias=False)})
    block.wq, block.wk = block["wq"], block["wk"]
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    optimizer = Muon([(name, param) for name, param in block.named_parameters()])
    for param in block.parameters():
        param.grad = torch.zeros_like(param)
    return {"model": model, "optimizer": optimizer, "logits_max": torch.ones(32)}


# placements.md needs ranks: tests/dist/owned runs its example.
PAGES = [page for page in sorted(DOCS.glob("*.md")) if blocks(page) and page.name != "placements.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: Any) -> None:
    compat.install()
    monkeypatch.chdir(tmp_path)
    # An example registers an algorithm.
    monkeypatch.setattr(registry.algorithms, "_values", dict(registry.algorithms._values))
    names = {} if page.name == "frameworks.md" else namespace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks(page):
            exec(block, names)
    if page.name == "frameworks.md":
        assert {a.fqn: a.optimizer for a in names["optimizer"].assignments}["2.weight"] == "adamw"


@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "original"}])
def test_the_readme_names_the_adjust_lr_fn_of_an_equal_torch_optim_muon(options: dict[str, Any]) -> None:
    claim = " ".join(read(README).split())
    (default,) = re.findall(r'The update is that of `torch\.optim\.Muon\(adjust_lr_fn="(\w+)"\)`', claim)
    assert """PyTorch's default, `"original"`, makes smaller updates""" in claim
    ours, theirs = (nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    ours.grad = theirs.grad = torch.ones(64, 128) + torch.eye(64, 128)
    Muon([("w", ours)], **muon_keywords(orthogonalize="reference", **options)).step()
    torch.optim.Muon([theirs], adjust_lr_fn=None if options else default).step()
    assert torch.equal(ours, theirs)


KINDS = {"NVIDIA": "cuda", "AMD": "cuda", "Intel": "xpu", "Ascend": "npu", "Apple": "mps"}
"""Device type by the name's start, if it is not the CPU."""


def rows() -> list[list[str]]:
    lines = read(DOCS / "hardware.md").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return table[2:]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_table_of_hardware_says_what_the_code_decides(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, library, recipes, kernels, words = row
    kind, windows = KINDS.get(name.split()[0], "cpu"), name == "Windows"
    compat.install()
    where = SimpleNamespace(type=kind)
    accelerator = None if kind == "cpu" else where
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
    monkeypatch.setattr(torch, "mps", SimpleNamespace())
    found = importlib.util.find_spec
    with monkeypatch.context() as system:
        missing = ("fcntl", "triton") if windows else ()
        system.setattr(importlib.util, "find_spec", lambda module: None if module in missing else found("torch"))
        system.setattr(fused, "find_spec", importlib.util.find_spec)
        system.delenv("TRITON_INTERPRET", raising=False)
        recipe_errors = message(lambda: runpy.run_path(str(ROOT / "titan_muon/trainer/__init__.py")))
        options = MuonOptions(fused=True)
        context: Any = SimpleNamespace(options=options, algorithm=algorithm_of(options), device=kind, named=())
        fused_errors = message(lambda: fused.FusedFeature().check(context))
    works = {"CPU": "works", "NVIDIA 9.0 (Hopper)": "one GPU"}.get(name, "untested")
    trains = works if device.this_device() == kind else "on the CPU"
    assert library == ("refused" if missing_streams(kind) else works)
    assert recipes == ("refused" if recipe_errors else trains)
    assert kernels == ("refused" if fused_errors else works)
    said = " ".join([missing_streams(kind), recipe_errors, fused_errors])
    for quoted in re.findall(r'"([^"]+)"', words):
        assert quoted in said
    assert bool(words) == ("refused" in row)


# Rates of machines and the error of the clock are those of gpu.json, and plan.md shows its data

RESULTS = DOCS / "results"
GPU: dict[str, Any] = {
    part: result["figures"] for part, result in json.loads((RESULTS / "gpu.json").read_text()).items()
}
RANKS = ("qwen3_8b", "qwen3_30b_a3b", "kimi_k2")


def steps(world: str) -> dict[str, dict[str, Any]]:
    return {row["step"]: row for row in GPU[f"rank_{world}"]["rows"]}


def test_the_host_of_the_planner_is_the_one_that_two_steps_gave() -> None:
    """364 a + 252 b and 1,532 a + 480 b; the third step waits for its kernels."""
    plain = [steps(world)["plain"] for world in RANKS[:2]]
    counts = torch.tensor([[row["launches"], pieces] for row, pieces in zip(plain, (252, 480), strict=True)]).double()
    host = torch.linalg.solve(counts, torch.tensor([1e3 * row["host ms"] for row in plain]).double())
    assert host.tolist() == pytest.approx([8.6, 26.4], abs=0.05)
    for machine in MACHINES.values():
        assert machine.name == "cpu" or (machine.host, 13 * machine.host_entry) == (8.6e-6, 26.4e-6)


def test_the_error_of_the_clock_has_every_measured_step() -> None:
    errors = [row["of model"] for world in RANKS for row in steps(world).values() if "of model" in row]
    assert ERROR[0] <= min(errors) < ERROR[0] + 0.1
    assert ERROR[1] - 0.1 < max(errors) <= ERROR[1]
    assert max(errors) == steps("qwen3_30b_a3b")["recipe"]["of model"]


def test_unmeasured_gpus_have_the_shares_of_the_data_sheet_that_the_h200_reached() -> None:
    sheets = {"h100x8": (989, 3.35), "h200x8": (989, 4.8), "b200x8": (2250, 8.0), "gb200x72": (2500, 8.0)}
    for name, (tflops, memory) in sheets.items():
        reached, machine = MACHINES["h200x8"], MACHINES[name]
        assert machine.flops["bfloat16"] / tflops == pytest.approx(reached.flops["bfloat16"] / 989, rel=0.01)
        assert machine.memory / memory == pytest.approx(reached.memory / 4.8, rel=0.01)


def test_plans_are_those_of_the_data() -> None:
    lines = (RESULTS / "plan.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    rows, columns = list[dict[str, str]](), list[str]()
    for row in cells:
        if row[0] == "model":
            columns = [column.partition(" =")[0] for column in row]
        elif "calls" in columns and row[1].isdigit():
            rows.append(dict(zip(columns, row, strict=True)))
    planned = [row for file in sorted(RESULTS.glob("plan_*.json")) for row in json.loads(file.read_text())["rows"]]
    shown = ("step", "host", "calls")
    assert [[row["model"], row["ranks"], *(row[name].split()[0] for name in shown)] for row in rows] == [
        [r["model"], str(r["ranks"]), f"{r['step_ms']:,.1f}", f"{r['host_ms']:,.1f}", str(r["collectives"])]
        for r in planned
    ]


# Each command line is accepted by its program, and each recipe loads

MARKDOWN = sorted(DOCS.glob("*.md"))
OTHER_PROGRAMS = {"cp", "grep", "lm_eval", "mkdir", "pip", "podman", "source", "tee", "tensorboard", "export"}
"""Not this project's. `make lm-eval` runs `lm_eval`; the container needs a GPU."""
ELSEWHERE = ("titan-muon audit", "titan_muon.audit", "titan-muon plan", "torchtitan.train", "$PYTHONPATH/launch.py")
"""Run by tests/audit, tests/recipes/test_published_models.py and tests/dist/titan/test_examples.py."""


def commands(page: Path) -> list[str]:
    """Command lines of fenced shell blocks, and of indented blocks."""
    text = read(page)
    found = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S)
    found += re.findall(r"((?:^    (?:python|make|torchrun|podman) .*\n)(?:^     .*\n)*)", text, re.M)
    lines = "\n".join(found).replace("\\\n", " ").splitlines()
    parts = [part.strip() for line in lines for part in re.split(r" && | \| ", line.split("  #")[0])]
    return [part for part in parts if part and not part.startswith("#")]


COMMANDS = [pytest.param(c, id=f"{page.stem}: {c[:60]}") for page in MARKDOWN for c in dict.fromkeys(commands(page))]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_accepted_by_its_program(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(name in command for name in ELSEWHERE):
        return
    words = shlex.split(command.replace("2>&1", ""))
    program = words[0]
    if program in ("torchrun", "python"):
        # The launcher's own flags come first.
        words = list(dropwhile(lambda word: word.startswith("--") or word == program, words))
    if program == "sbatch":
        words = ["train.py", "--config", *words[words.index("scripts/slurm.sh") + 1 :]]
    script = Path(words[0])
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{re.escape(words[1])}:", makefile, re.M)
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
    elif script.name == "train.py":
        monkeypatch.chdir(ROOT)
        with pytest.raises(SystemExit, match="0") if "--help" in words else nullcontext():
            assert parse(words[1:]).config is not None
    elif script.parent.name == "scripts" or words[0] == "titan-muon":
        name, arguments = (script.stem, words[1:]) if script.suffix else (words[1], words[2:])
        # Without runs of a developer.
        monkeypatch.chdir(ROOT if name == "sweep" else tmp_path)
        accepts(name.removesuffix("_runs"), arguments, capsys)
    elif script.suffix == ".py":
        assert (ROOT / script).is_file()
    else:
        assert program in OTHER_PROGRAMS, "a program that no test knows"


def accepts(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The other commands read runs, which are not here: the error names the run, and not a flag."""
    if name == "sweep":
        recipe, *grid = [word for word in arguments if "=" in word or word.endswith(".toml")]
        assert len(sweep.plan([recipe], grid, (), 2)) == 12
        return
    assert start(name, arguments) == 2
    assert "runs/" in capsys.readouterr().err


DRY_RUNS = [c for page in MARKDOWN for c in commands(page) if "--dry-run" in c and not c.startswith("#")]


@pytest.mark.slow
@pytest.mark.parametrize("command", list(dict.fromkeys(DRY_RUNS)))
def test_a_dry_run_of_the_docs_plans_or_shows_its_error(command: str, tmp_path: Path) -> None:
    words = [sys.executable, *shlex.split(command)[1:], "--dump_folder", str(tmp_path)]
    words = [str(tmp_path / word) if word == "plan.json" else word for word in words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    errors = re.findall(r"# (error: .*)", read(DOCS / "compatibility.md"))
    assert done.returncode == 0 or done.stderr.strip() in errors, done.stderr


RECIPES = [
    pytest.param(block, id=f"{page.stem}-{index}")
    for page in MARKDOWN
    for index, block in enumerate(re.findall(r"```toml\n(.*?)```", read(page), re.S))
]


@pytest.mark.parametrize("block", RECIPES)
def test_a_recipe_loads_on_top_of_a_shipped_one(block: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    if block.startswith("[project"):
        assert tomllib.loads(block), "a pyproject.toml"
        return
    path.write_text(f'base = "{ROOT / "configs/qwen_moe_muon.toml"}"\n{block}')
    load(path)


def test_the_rates_of_a_machine_are_read() -> None:
    (rates,) = re.findall(r"```json\n(.*?)```", read(DOCS / "recipes.md"), re.S)
    machine = planning_machine(Machine(file="machine.json"), measured=rates)
    assert (machine.network.bandwidth, machine.flops["float32"]) == (22e9, 5e13)


# The README's commands run in order in a fresh copy, shortened; its recipe, links and folders are valid

README_COMMANDS = commands(README)
README_RUN = [c for c in README_COMMANDS if c.split()[0] in ("torchrun", "python")]
"""In a fresh clone `make`, `pip` and `tensorboard` need a network, or never end."""


def run(command: str, extra: list[str], folder: Path) -> str:
    """Output of a README command in a folder, with this environment's programs first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    words = [*shlex.split(command), *extra]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("command", sorted({c for c in README_COMMANDS if re.fullmatch(r"make [a-z]+", c)}))
def test_make_has_the_targets_of_the_readme(command: str) -> None:
    assert run(command.replace("make", "make --dry-run"), [], ROOT)


@pytest.mark.slow
def test_the_commands_run_in_order_in_a_fresh_copy(tmp_path: Path) -> None:
    """Each command finds what the commands before it wrote: `compare_runs.py` reads the runs of two of them."""
    small = "--training.steps 2 --training.local_batch_size 1 --training.global_batch_size -1"
    small_words = [*small.split(), "--lr_scheduler.warmup_steps", "1", *tiny.small_words(tmp_path)]
    clone = tmp_path / "clone"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    assert [command.split()[0] for command in README_RUN] == ["torchrun", "python", "python", "torchrun", "python"]
    for command in README_RUN:
        printed = run(command, [] if "compare_runs" in command else small_words, clone)
        if "--dry-run" in command:
            assert "muon: 208 matrices" in printed
        elif "compare_runs" in command:
            assert "optimizer.rule" in printed, "the difference of the recipes comes first"
        else:
            assert "step 2/2" in printed


def test_the_recipe_is_accepted(tmp_path: Path) -> None:
    (recipe,) = blocks(README, "toml")
    path = tmp_path / "mine.toml"
    path.write_text(recipe.replace("qwen_moe_muon.toml", str(ROOT / "configs/qwen_moe_muon.toml")))
    loaded = load(path)
    assert loaded.parallelism.expert_parallel_degree == 2
    assert loaded.optimizer.rule[0].optimizer == "adamw"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_have_existing_targets(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", read(ROOT / page)):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_library_example_runs() -> None:
    """The README's snippet trains a whole model: an embedding, two layers and a head."""
    (snippet,) = blocks(README)
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
