"""Programs in benchmarks/ run on a small case and refuse wrong arguments; comparisons, sweeps, and a job of SLURM."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from glob import glob
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_orthogonalize, contenders, count_launches, gpu, host_cost, stages
from benchmarks.gpu import Rows, peers, read_rows
from benchmarks.gpu.__main__ import CORPUS, TINY, WAYS, parts_of, recipe_of
from benchmarks.one_gpu import float16, links, newton_schulz, one_rank, worlds
from benchmarks.rehearsal.launches import BLOCKS, CHUNK, Launches, list_launches
from tests import tiny
from tests.dist.harness import run_program
from titan_muon.forecast.fake_world import forget_meshes
from titan_muon.options import Machine
from titan_muon.planner.machine import planning_machine
from titan_muon.trainer.commands import records, start, sweep

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_meshes() -> None:
    """Equal meshes of another world must not be found."""
    forget_meshes()


# fmt: off
PROGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # Arguments of a small run, texts in the output, and names of rows in the file of figures.
    # 4 layers of 4 attention matrices and 3 x 16 experts; each of 16 ranks has the same number.
    "bench_orthogonalize": ("--share qwen_moe:16:0 --repeats 1", ("| share qwen_moe:16:0 | 13 matrices |",),
                            (bench_orthogonalize.TORCH,)),
    "bench_step": ("--nproc 2 --model tiny --repeats 2", ("tiny, 2 ranks, medians of 2 steps", "| 0, bitwise |"),
                   tuple(contenders.contenders("cpu"))),
    "bench_owned": ("--nproc 2 --dim 32 --blocks 2 --repeats 1", ("| placement | stored | peak |", "| ratio |"),
                    ("owned", "sharded")),
}
WRONG = [
    ("benchmarks/bench_orthogonalize.py", "--share qwen3_8b:64:64", "with RANK below WORLD"),
    ("benchmarks/bench_step.py", "--device cuda --nproc 99", "--device cuda --nproc 99: PyTorch finds"),
    ("benchmarks/gpu/__main__.py", "--device cpu", "name a call: --call 1, 2, 3 or 4"),
]
# fmt: on


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_a_table_and_writes_figures(program: str, tmp_path: Path) -> None:
    words, prints, names = PROGRAMS[program]
    file = tmp_path / "json"
    code, shown = run_program(str(ROOT / f"benchmarks/{program}.py"), *words.split(), "--json", str(file), timeout=240)
    assert code == 0, shown
    assert all(text in shown for text in prints), shown
    assert tuple(row["name"] for row in json.loads(file.read_text())["rows"])[: len(names)] == names


@pytest.mark.parametrize(("program", "words", "says"), WRONG)
def test_a_wrong_argument_is_refused_before_the_first_measurement(program: str, words: str, says: str) -> None:
    code, shown = run_program(str(ROOT / program), *words.split(), timeout=240)
    assert code != 0
    assert says in shown
    assert "Traceback" not in shown


@pytest.mark.slow
def test_exchanges_are_measured_through_nodes_of_one_machine() -> None:
    torchrun = "-m torch.distributed.run --nproc_per_node=4 -m benchmarks.exchanges --device cpu --model small"
    words = [sys.executable, *torchrun.split(), "--ranks-per-node", "2", "--repeats", "2"]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "small, 4 ranks, 2 a node" in shown
    assert re.search(r"\| all_to_all \|.*\| 3, \d+ \|", shown), "peers and messages"
    assert re.search(r"\| two_hops \|.*\| 1, \d+ \|", shown)


def test_a_step_without_options_runs_through_few_files_functions_and_classes() -> None:
    """So that a reader can follow it."""
    code, shown = run_program(str(ROOT / "benchmarks/step_counts.py"), "--list")
    assert code == 0, shown
    # Files, functions and classes.
    for title, limits in (("second step", (11, 52, 13)), ("build()", (35,)), ("build() by the rule", (28,))):
        (line,) = re.findall(rf"{re.escape(title)}: (.*)", shown)
        assert all(int(count) <= most for count, most in zip(re.findall(r"\d+", line), limits, strict=False)), shown
    assert "  engine/step/step.py MuonStep.bucket" in shown


# Launches and the host's time, counted without a GPU


def test_momentum_and_update_of_a_bucket_take_a_launch_each_on_a_gpu() -> None:
    """Also in a step that the device may skip."""
    (plain, skippable), buckets = stages.counted("qwen3_8b", "auto"), 3
    assert (plain["advance"], plain["apply"]) == (buckets, buckets)
    assert (plain.total(), skippable) == (90, 94)
    # torch.optim.Muon has 644.
    assert stages.counted("one GPU, reference", "auto")[0].total() == 604


def test_launches_of_a_step_are_counted_by_pytorchs_rules_for_lists() -> None:
    counts = count_launches.counted(count_launches.Row("llama", 4, 1))
    assert counts.collectives > 0
    # With kernels no operator takes the long lists.
    assert 0 < counts.entries < counts.operators <= counts.launches
    lists = [
        [torch.empty(size, device="meta")] * count for count, size in ((110, 8), (111, 8), (1, BLOCKS * CHUNK + 1))
    ]
    assert [list_launches(tensors, 1) for tensors in lists[:2]] == [1, 2]
    assert list_launches(lists[2], 2) == 2
    wide = [torch.empty(8, 6, device="meta")] * 4
    assert Launches().weight("_foreach_add_", (wide, wide)) == 1
    assert Launches().weight("_foreach_add_", (wide, [tensor.half() for tensor in wide])) == 4, "unequal dtypes"


def test_host_cost_measures_both_optimizers() -> None:
    cost = host_cost.measured(host_cost.Case("llama_muon", 1, 4), fused=True, repeats=2, profile=False)
    assert min(cost.muon, cost.adamw) > 0


# One GPU, rehearsed on the CPU

PARTS = {part.name: part for call in (1, 2, 3, 4) for part in parts_of(call, "cpu")}
PROCESSES = {"parity": "row", "torch_muon, 2e-3": "val_loss"}


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    return Rows(tmp_path / "rows.jsonl", {"call": 1, "part": "a", "source": "rehearsed"})


@pytest.mark.parametrize("name", ["launches", "rank qwen3_8b", "peers, 128 experts"])
def test_a_part_writes_its_rows_on_the_cpu(name: str, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    # A compilation takes ten seconds.
    kept = {key: contender for key, contender in peers.CONTENDERS.items() if not contender.late}
    monkeypatch.setattr(peers, "CONTENDERS", kept)
    PARTS[name].run(rows, CPU)
    written = read_rows(rows.file)
    assert len([row for row in written if "error" not in row]) >= 6
    assert all(row["error"] for row in written if "error" in row), "others are there, with the reason"
    assert "| --- |" in gpu.page(written)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_a_part_of_processes_writes_its_rows_on_the_cpu(name: str, rows: Rows) -> None:
    PARTS[name].run(rows, CPU)
    found = [row for row in read_rows(rows.file) if PROCESSES[name] in row]
    assert found
    assert all(row.get("differences", "none") == "none" for row in found)


def test_the_page_is_of_its_data_and_takes_only_measured_rows(rows: Rows, tmp_path: Path) -> None:
    """`python -m benchmarks.gpu --page` writes it."""
    assert (gpu.DOCS / gpu.PAGE).read_text() == gpu.page(read_rows(gpu.DOCS / gpu.DATA))
    rows.write(measured="b", us=1.5)
    Rows(rows.file, {**rows.common, "source": "measured"}).write(measured="b", us=2.5)
    gpu.publish([rows.file], tmp_path)
    text = (tmp_path / gpu.PAGE).read_text()
    assert "| 2.5 |" in text
    assert "| 1.5 |" not in text


def test_every_training_is_a_valid_recipe(tmp_path: Path) -> None:
    import models  # noqa: F401 (registers the families)
    from titan_muon.trainer.recipe import load

    assert glob(CORPUS, recursive=True)
    for way in WAYS:
        recipe = recipe_of(tmp_path, "1e-3", way)
        assert load(recipe, []).training.steps * 65_536 == pytest.approx(2e7, rel=0.01)
        assert load(recipe, TINY).training.steps == 4


def test_a_world_has_the_parameters_and_the_plan_of_its_recipe() -> None:
    source, world = worlds.SOURCES["tiny"], worlds.read("tiny")
    kept = json.loads(worlds.FILE.read_text())["tiny"]
    assert json.loads(json.dumps(worlds.as_json(worlds.described(source)))) == kept, (
        "python -m benchmarks.one_gpu.worlds writes the file anew"
    )
    from titan_muon.trainer.dry_run.meta_model import build_meta_model
    from titan_muon.trainer.recipe import load

    recipe = load(ROOT / f"configs/{source.recipe}_muon.toml", [*source.overrides, "--qk_clip.mode", "off"])
    plan = build_meta_model(recipe, source.world, "cuda").plan
    forget_meshes()
    with one_rank.fake_world(world):
        assert one_rank.plan_of(world).digest() == plan.digest()


@pytest.mark.parametrize(
    ("main", "proof"),
    [
        (float16.main, lambda found: found["is_safe"]),
        (newton_schulz.main, lambda found: found["rows"][0]["method"] == newton_schulz.TORCH),
        (links.main, lambda found: found["machine"]["bandwidth"] is None and found["machine"]["flops"]["float32"] > 0),
    ],
    ids=["float16", "newton_schulz", "links"],
)
def test_a_program_for_one_gpu_runs_on_the_cpu(
    main: Callable[[list[str]], int], proof: Callable[[Any], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    assert main(["--device", "cpu", "--json", str(tmp_path / "json")]) == 0
    assert proof(json.loads((tmp_path / "json").read_text()))


def test_the_measured_machine_is_one_for_the_planner() -> None:
    """Latency comes from the smallest size, and bandwidth leaves it out: links of 40 GB/s and 12 us for 8 ranks."""
    sizes = {2**power: 12e-6 + 2**power * 7 / 8 / 40e9 for power in (28, 26, 10)}
    rows = [links.Row("all_to_all", n, seconds * 1e6, n * 7 / 8 / seconds / 1e9) for n, seconds in sizes.items()]
    assert links.link_of(rows) == (pytest.approx(40e9, rel=1e-6), pytest.approx(12e-6, rel=0.01))
    flops = {"bfloat16": 7e14, "float16": 6.5e14, "float32": 5e13}
    measured = links.MeasuredMachine("GPU X", 16, 8, 41.3e9, 12.34e-6, flops, 3e12)
    machine = planning_machine(Machine(name="h100x8", file="machine.json"), "cuda", json.dumps(asdict(measured)))
    assert (machine.flops, machine.memory, machine.network.bandwidth) == (flops, 3e12, 41.3e9)
    assert machine.node == planning_machine(Machine(name="h100x8")).node, "nothing was measured within a node"


# `titan-muon compare` on synthetic runs, sweeps on small cases, and a job of SLURM

DENSE, MOE = (str(ROOT / f"configs/{name}.toml") for name in ("llama_muon", "qwen_moe_muon"))
RECIPE = """
[muon]
lr = {lr}
[debug]
seed = {seed}
[[optimizer.rule]]
match = "*"
optimizer = "{optimizer}"
"""
Capture = pytest.CaptureFixture[str]


def write_run(
    folder: Path, end: float = 2.0, steps: Iterable[int] = range(1, 101), *, tokens: int = 2048, **keys: Any
) -> Path:
    """A run whose loss falls from 6 to `end` over 100 steps of `tokens` tokens."""
    time = {"forward_backward": 0.02, "clip": 0.004, "optimizer": 0.01, "step": 0.04}
    records = []
    for s in sorted(steps):
        loss = 6 - (6 - end) * s / 100
        measured = {"tokens_per_second": 100 / end, "lr": {"muon": 0.1}, "memory_gib": 1.5, "mfu": 0.4, "time": time}
        records.append({"step": s, "loss": loss, "seconds": s * 0.04, "tokens": s * tokens} | measured)
        if s % 50 == 0:
            bits = {"val_loss": loss + 1, "bits_per_byte": (loss + 1) / math.log(2)}
            records.append({"step": s, "tokens": s * tokens, "seconds": 99.0} | bits)
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE.format(**({"lr": 0.01, "seed": 0, "optimizer": "muon"} | keys)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    fast = write_run(tmp_path / "runs/fast/t1")
    return [fast, write_run(tmp_path / "runs/slow/t1", 2.5, lr=0.02, optimizer="adamw")]


def sections(capsys: Capture, *arguments: object) -> dict[str, Any]:
    """What a comparison prints: by title the text, and by title and first cell the cells of a row."""
    assert start("compare", [str(argument) for argument in arguments]) == 0
    _, *printed = capsys.readouterr().out.split("\n## ")
    found: dict[str, Any] = dict(section.rstrip().split("\n\n", 1) for section in printed)
    for title, text in [*found.items()]:
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
        found |= {f"{title}: {row[0].strip()}": [cell.strip() for cell in row[1:]] for row in reversed(rows)}
    return found


def test_the_report_compares_recipe_losses_and_speed_with_the_first_run(pair: list[Path], capsys: Capture) -> None:
    found = sections(capsys, *pair)
    assert (
        found.items()
        >= {
            "Recipe: muon.lr": ["0.01", "0.02"],
            "Training loss: 100": ["2.0000", "2.5000 (+0.5000)"],
            "Validation loss: 50": ["5.0000", "5.2500 (+0.2500)"],
            "Bits per byte: 100": ["4.3281", "5.0494 (+0.7213)"],
            # The mean of five steps reaches a loss two steps later.
            "Training loss to reach: 2.5700 (last of slow)": ["88", "100 (1.14x)"],
            "Speed: tokens/s": ["50", "40 (0.80x)"],
        }.items()
    )
    assert "debug.seed" not in found["Recipe"], "an equal key"


def test_runs_of_other_batch_sizes_are_warned_about(tmp_path: Path, capsys: Capture) -> None:
    runs = [write_run(tmp_path / "a/t", 4.0), write_run(tmp_path / "b/t", 5.0, tokens=1024)]
    (runs[0] / "run.json").write_text('{"id": "a", "typed": [], "world": 2}')
    found = sections(capsys, *runs)
    assert found["Recipe: tokens a step"] == ["2,048", "1,024"]
    assert found["Recipe: ranks"] == ["2", "-"], "a run of version 0.2 has no record of its ranks"
    assert "Warning: the runs do not train on the same tokens in a step" in found["Recipe"]


def test_runs_with_different_seeds_are_a_mean_curve_with_a_band(tmp_path: Path, capsys: Capture) -> None:
    paths = [write_run(tmp_path / f"x/t{s}_muon.lr=0.01,debug.seed={s}", 2.0 + s, seed=s) for s in (0, 1, 2)]
    paths.append(write_run(tmp_path / "x/t_muon.lr=0.1,debug.seed=0", 5.0, lr=0.1))
    mean, single = records.read_runs(paths, "loss")
    assert (mean.label, mean.seeds, single.label) == ("muon.lr=0.01 (3 seeds)", 3, "muon.lr=0.1")
    assert (mean.of("loss")[100], mean.spread["loss"][100]) == (3.0, 1.0)
    assert sections(capsys, *paths)["Training loss: ± over seeds"] == ["1.0000", "-"]


def test_runs_without_a_step_and_torn_lines_are_passed_over(pair: list[Path], tmp_path: Path, capsys: Capture) -> None:
    with (pair[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "lo\n{"step": 102, "lo')
    (pair[0].parent / "t2").mkdir()
    (pair[0].parent / "latest").write_text("t1")
    picture = tmp_path / "curves.svg"
    words = [*map(str, pair), str(pair[0].parent / "t2"), "--output", str(picture), "--metric", "bits_per_byte"]
    assert start("compare", words) == 0
    shown = capsys.readouterr()
    assert "t2: passed over" in shown.err
    assert "metrics.jsonl: left out the damaged line 103\n" in shown.err
    assert picture.read_text().startswith("<?xml")


REFUSALS = [
    # Command, arguments, and the error. {0} and {1} are runs.
    ("compare", "{0}", "a comparison takes two or more runs, not 1"),
    ("compare", "{0} {root}/absent", "absent: no such folder"),
    ("compare", "{0} {broken}", "recipe.toml: not valid TOML"),
    ("compare", "{0} {odd}", "no step at which each of them recorded `loss`"),
    ("compare", "{0} {1} --output {root}/c.pdf", "the suffix must be .png or .svg"),
    ("sweep", "{dense} muon.lrr=1", "Did you mean muon.lr?"),
    ("sweep", "{dense} muon.lr=1e-3,0.001", "the same run as llama_muon muon.lr=1e-3"),
    ("sweep", "{dense} parallelism.tensor_parallel_degree=1,2 --nproc 1", "takes a multiple of 2 processes, and this"),
]


@pytest.mark.parametrize(("command", "words", "says"), REFUSALS, ids=[says[:30] for *_, says in REFUSALS])
def test_a_wrong_command_is_refused_in_a_line(
    command: str, words: str, says: str, pair: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    named = {"broken": write_run(tmp_path / "broken/t"), "odd": write_run(tmp_path / "odd/t", steps=[201, 203])}
    (named["broken"] / "recipe.toml").write_text("[muon\n")
    assert start(command, words.format(*pair, **named, root=tmp_path, dense=DENSE).split()) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert "Traceback" not in shown.err
    assert command == "sweep" or (shown.err.startswith("compare: ") and shown.err.count("\n") == 1)
    assert "[1/" not in shown.out, "no run has started"


def test_the_script_runs_by_path_without_torch(pair: list[Path], tmp_path: Path) -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); assert 'torch' not in sys.modules"
    scripts = ROOT / "scripts"
    script, environment = str(scripts / "compare_runs.py"), {"PYTHONPATH": str(scripts), "PATH": ""}
    subprocess.run([sys.executable, "-c", code, script], check=True, cwd=tmp_path, env=environment)
    subprocess.run([sys.executable, script, *map(str, pair)], check=True, cwd=scripts, capture_output=True)
    assert (tmp_path / "runs/compare.png").is_file(), "in the folder that has all runs"


def test_a_grid_has_every_recipe_and_value_seed_by_seed(capsys: Capture) -> None:
    assert start("sweep", [DENSE, MOE, "muon.lr+adamw.lr=1e-3,2e-3", "training.seed=0,1", "--dry-run"]) == 0
    *runs, last = capsys.readouterr().out.splitlines()
    assert last.startswith("8 runs")
    assert runs[0] == "llama_muon muon.lr+adamw.lr=1e-3 training.seed=0"
    assert [run[-1] for run in runs] == ["0"] * 4 + ["1"] * 4
    recipe = sweep.plan([DENSE], ["muon.lr+adamw.lr=3e-3", "training.seed=5"], (), 1)[0].recipe
    assert (recipe.muon.lr, recipe.adamw.lr, recipe.debug.seed, recipe.data.seed) == (3e-3, 3e-3, 5, 5)


def test_a_stopped_run_did_not_fail_and_the_sweep_says_how_to_go_on(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.run", lambda command, check: subprocess.CompletedProcess(command, 0))
    assert start("sweep", [DENSE, "muon.lr=1e-3", "--dump_folder", str(tmp_path)]) == 1
    assert "[1/1] llama_muon muon.lr=1e-3: stopped; repeat it to go on" in capsys.readouterr().err


SMALL = "--training.steps 4 --training.global_batch_size 1 --validator.freq 4 --checkpoint.freq 2 --dump_folder"


@pytest.mark.slow
def test_a_sweep_continues_after_a_divergence_and_resumes(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [*SMALL.split(), str(tmp_path / "runs"), *tiny.small_words(tmp_path)]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = [DENSE, "muon.lr=1e30,1e-3,2e-3", "training.seed=1", *small]
    assert start("sweep", arguments) == 1
    shown = capfd.readouterr()
    assert "[1/3] llama_muon muon.lr=1e30 training.seed=1: failed with exit code 1" in shown.err
    assert "## Held-out loss" in shown.out or "## Validation loss" in shown.out, "the table of compare"

    # Cut off after the checkpoint of step 2.
    run, other = sweep.plan([DENSE], arguments[1:3], small, 1)[1:]
    folder = run.finished()
    assert folder is not None
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(metrics[:2]) + "\n")
    shutil.rmtree(folder / "checkpoint/step-4")
    assert run.finished() is None
    assert start("sweep", [DENSE, "muon.lr=1e-3,2e-3", *arguments[2:]]) == 0
    assert f"{other.name}: finished before in" in capfd.readouterr().out
    assert run.finished() == folder
    assert (folder / "metrics.jsonl").read_text().count('"loss"') == 4


def slurm(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/slurm.sh with stand-ins for SLURM's commands; `srun` prints its words."""
    for name, program in (("scontrol", "printf 'node7\\nnode8\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        file = folder / name
        file.write_text(f"#!/bin/bash\n{program}\n")
        file.chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "20003", "SLURM_JOB_NUM_NODES": "2"}
    env = {**os.environ, **variables, **more, "PATH": f"{folder}:{os.environ['PATH']}"}
    script = str(ROOT / "scripts" / "slurm.sh")
    return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, env=env, timeout=300)


def test_slurm_starts_a_torchrun_per_node_and_continues_a_named_run(tmp_path: Path) -> None:
    done = slurm(tmp_path, "recipe.toml", "--training.steps", "5")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert {"torchrun", "--nnodes=2", "--rdzv-endpoint=node7:20003"} <= {*words}
    trained = ["train.py", "--config", "recipe.toml", "--name", "recipe-20003", "--checkpoint.load", "latest"]
    assert words[-9:] == [*trained, "--training.steps", "5"]
    assert "recipe-17" in slurm(tmp_path, "folder/recipe.toml", RUN="17").stdout.split()
    assert slurm(tmp_path).returncode == 2, "without a recipe"
