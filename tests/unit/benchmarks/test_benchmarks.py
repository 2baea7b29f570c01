"""Programs in benchmarks/ run on a small case, print a table with these rows, and refuse wrong arguments at once."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
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
from tests.dist.harness import run_program
from titan_muon.forecast.fake_world import forget_meshes
from titan_muon.options import Machine
from titan_muon.planner.machine import planning_machine

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
