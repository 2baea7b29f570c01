"""Conclusions of `make gpu` from measurements: the link from times, a verdict from losses."""

import json
import math
from dataclasses import asdict

import pytest

from benchmarks.gpu import links, training
from benchmarks.gpu.links import MeasuredMachine, Row
from benchmarks.gpu.training import Run
from titan_muon.options import Machine, check
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
