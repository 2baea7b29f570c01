"""Conclusions of `make gpu` from measurements: the link from times, a verdict from losses."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gpu import links, report, results, training
from benchmarks.gpu.environment import Environment
from benchmarks.gpu.links import MeasuredMachine, Row
from benchmarks.gpu.results import Outcome, Result
from benchmarks.gpu.training import Run
from titan_muon.options import Machine, OptionError, check
from titan_muon.plan.terms.machine import Link, machine_of


def row(size: int, bandwidth: float = 40e9, latency: float = 12e-6, ranks: int = 8) -> Row:
    """An all-to-all on links of this bandwidth and latency."""
    sent = size * (ranks - 1) / ranks
    seconds = latency + sent / bandwidth
    return Row("all_to_all", size, seconds * 1e6, sent / seconds / 1e9)


def test_latency_comes_from_the_smallest_size_and_bandwidth_excludes_latency() -> None:
    slower = Row("all_gather", 2**28, 1e9, 0.1)
    bandwidth, latency = links.link_of([slower, *(row(2**power) for power in (28, 26, 10))])
    assert bandwidth == pytest.approx(40e9, rel=1e-6)
    assert latency == pytest.approx(12e-6, rel=0.01)


def test_a_faster_larger_message_sets_the_bandwidth() -> None:
    noisy = Row("all_to_all", 2**12, 1.0, 3.0)
    assert links.link_of([row(2**10), noisy])[0] == 3e9
    assert links.link_of([noisy])[0] == 3e9


def test_the_recipe_table_has_valid_machine_keys_and_values() -> None:
    flops = {"bfloat16": 7e14, "float16": 6.5e14, "float32": 5e13}
    alone = links.recipe_table(MeasuredMachine("GPU X", 1, 1, None, None, flops, 3e12))
    assert alone == {"tflops": 650.0, "tflops_float32": 50.0, "memory_gb": 3000.0}
    table = links.recipe_table(MeasuredMachine("GPU X", 8, 8, 41.3e9, 12.34e-6, flops, 3e12))
    assert table == {**alone, "node_gb": 41.3, "node_latency_us": 12.3}
    check(Machine, table)
    between = links.recipe_table(MeasuredMachine("GPU X", 16, 8, 41.3e9, 12.34e-6, flops, 3e12))
    assert between == {**alone, "network_gb": 41.3, "network_latency_us": 12.3}


def test_a_planner_reads_the_machine_file() -> None:
    flops = {"bfloat16": 7e14, "float16": 6.5e14, "float32": 5e13}
    text = json.dumps(asdict(MeasuredMachine("GPU X", 16, 4, 41.3e9, 12e-6, flops, 3e12)))
    machine = machine_of(Machine(name="a100x8", file="machine.json"), "cuda", text)
    assert (machine.flops, machine.memory, machine.ranks_per_node) == (flops, 3e12, 4)
    named = machine_of(Machine(name="a100x8"))
    assert machine.network == Link(41.3e9, 12e-6, named.network.per_peer), "messages were not measured"
    assert machine.node == named.node, "nothing was measured within a node"


def test_a_rehearsed_machine_file_is_refused() -> None:
    text = json.dumps({"source": "rehearsed", "flops": {}})
    with pytest.raises(OptionError, match=r"machine.file = 'machine.json' .*it was rehearsed without a GPU"):
        machine_of(Machine(file="machine.json"), "cuda", text)


FIGURES = {
    "links": {"machine": {"gpu": "GPU X", "memory_bandwidth": 3e12}},
    "newton_schulz": {"kernels": [{"dtype": "float16", "rows": 256, "products": "triton"}], "rows": []},
    "float16": {"is_safe": False, "rows": []},
    "rank_qwen3_8b": {"fused_is_faster": True, "rows": [{"source": "model", "step": "h100x8", "device ms": 1.5}]},
    "rank_kimi_k2": {"fused_is_faster": True, "rows": [{"source": "measured", "step": "plain", "device ms": 2.5}]},
}


def parts_on(*gpus: str, **figures: object) -> dict[str, Result]:
    environment = Environment(gpus, "2.11.0", "13.0", "580", "3.12.3", "abc", ())
    return {
        name: Result(name, Outcome.PASSED, "", 1.0, (), environment, found)
        for name, found in {**FIGURES, **figures}.items()
    }


def test_choices_of_a_gpu_come_from_its_parts() -> None:
    kernels = FIGURES["newton_schulz"]["kernels"]
    found = {"source": "measured", "torch": "2.11.0", "kernels": kernels, "fused": True, "float16": False}
    assert report.choices(parts_on("GPU X")) == {"GPU X": found}
    slower = report.choices(parts_on("GPU X", rank_qwen3_30b_a3b={"fused_is_faster": False}, float16=None))
    assert (slower["GPU X"]["fused"], "float16" in slower["GPU X"]) == (False, False)
    assert report.choices(parts_on())["cpu"]["source"] == "rehearsed"
    assert report.choices({}) == {}


def test_measured_results_are_published_and_rehearsed_ones_leave_the_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "measured.json"
    shipped.write_text('{"GPU Y": {"source": "measured"}}')
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "SHIPPED", shipped)
    results.write(parts_on().values(), tmp_path)
    (tmp_path / results.FILE).rename(tmp_path / "rehearsal.json")
    assert report.main([str(tmp_path / "rehearsal.json")]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "| model | h100x8 | 1.5 |" in page
    assert "No GPU has run the parts" in page
    assert "2.5" not in page
    assert list(json.loads(shipped.read_text())) == ["GPU Y"]
    results.write(parts_on("GPU X").values(), tmp_path)
    (tmp_path / results.FILE).rename(tmp_path / "measured-results.json")
    assert report.main([str(tmp_path / "measured-results.json")]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "| measured | plain | 2.5 |" in page
    assert "- GPU X; torch 2.11.0;" in page
    assert list(json.loads(shipped.read_text())) == ["GPU X", "GPU Y"]


def test_the_page_of_results_is_of_its_data() -> None:
    """`python -m benchmarks.gpu.report` writes both."""
    kept = results.read(report.DOCS / "gpu.json")
    assert {"rank_qwen3_8b", "rank_qwen3_30b_a3b", "rank_kimi_k2"} <= kept.keys()
    assert (report.DOCS / "gpu.md").read_text() == report.page(kept, link="../gpu.md")


def run(*losses: float, **values: str) -> Run:
    return Run(dict(enumerate(losses, 1)), 1.0, 1.0, **values)


def test_learning_runs_close_to_the_first_run_have_no_fault() -> None:
    runs = {"a": run(5.0, 4.5, 4.0), "b": run(5.01, 4.52, 4.03), "c": Run({}, 0.0, 0.0, skipped="needs 4 ranks")}
    assert training.faults_of(runs, 3, 0.5) == []


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (run(5.0, 4.8, 4.0), "b: step 2: loss 4.800, and a's is 4.500"),
        (run(5.0, math.nan, 4.0), "b: step 2: loss nan"),
        (run(5.0, 4.5, math.nan), "b: the loss went from 5.000 to nan"),
        (run(5.0, 4.5, 4.6), "b: the loss went from 5.000 to 4.600, and had to fall by 0.5"),
        (run(5.0, 4.5), "b: logged the losses of steps [1, 2], not of 1 to 3"),
        (Run({}, 0.0, 0.0, fault="train.py ended with 1"), "b: train.py ended with 1"),
    ],
)
def test_a_run_without_learning_or_far_from_the_first_is_named(other: Run, says: str) -> None:
    faults = training.faults_of({"a": run(5.0, 4.5, 4.0), "b": other}, 3, 0.5)
    assert any(says in fault for fault in faults), faults


def test_faults_of_the_first_run_are_reported() -> None:
    first = Run({}, 0.0, 0.0, fault="train.py ended with 1")
    assert training.faults_of({"a": first, "b": run(5.0, 4.0)}, 2, 0.5) == ["a: train.py ended with 1"]


@pytest.mark.parametrize("name", training.WAYS)
def test_every_training_case_is_a_valid_recipe(name: str) -> None:
    import models  # noqa: F401 (registers the families)
    from titan_muon.titan.recipe import load

    words = training.command(training.WAYS[name], 2, 2, training.ROOT / "runs/x", tiny=True)
    arguments = words[words.index("--config") + 2 :]
    assert load(training.ROOT / training.RECIPE, arguments).training.steps == 2
