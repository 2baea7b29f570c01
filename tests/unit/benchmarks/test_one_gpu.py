"""The programs for one GPU run on the CPU: a rank of a large world, float16, Newton-Schulz, rates."""

import json
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import stages
from benchmarks.one_gpu import float16, links, newton_schulz, one_rank, worlds
from titan_muon.engine.tensors.process_groups import forget_meshes
from titan_muon.options import Machine, OptionError
from titan_muon.planner.machine import machine_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_meshes() -> None:
    """Equal meshes of another world must not be found."""
    forget_meshes()


def rows(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"]


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
    assert plan is not None
    forget_meshes()
    with one_rank.fake_world(world):
        assert one_rank.plan_of(world).digest() == plan.digest()


def test_a_narrow_world_has_as_many_pieces_and_less_work() -> None:
    """Its host time by launch is a step's, without a wait for the device."""
    found = []
    with one_rank.fake_world(worlds.read("tiny")):
        for narrow in (False, True):
            muon = one_rank.Rank(worlds.read("tiny"), torch.device("cpu"), narrow=narrow).muon(fused=False)
            sizes = [param.numel() for group in muon.param_groups for param in group["params"]]
            found.append((len(sizes), sum(sizes)))
    assert found[0][0] == found[1][0]
    assert found[0][1] > 4 * found[1][1]


def test_float16_is_probed_on_dominating_rows_and_an_overflow_is_unsafe(tmp_path: Path) -> None:
    assert float16.main(["--device", "cpu", "--json", str(tmp_path / "json")]) == 0
    assert json.loads((tmp_path / "json").read_text())["is_safe"] is True
    overflowed = {**rows(tmp_path / "json")[0], "standard float16": float("inf")}
    assert float16.faults_of([overflowed]) == ["1x32x256, gaussian: standard float16: inf"]


def test_newton_schulz_is_timed_by_shape_and_method(tmp_path: Path) -> None:
    assert newton_schulz.main(["--device", "cpu", "--json", str(tmp_path / "json")]) == 0
    found = rows(tmp_path / "json")
    assert [row["method"] for row in found][:3] == [newton_schulz.TORCH, "standard float32", "gram float32 restart 2"]
    assert all(row["ms"] > 0 for row in found)


def test_a_single_rank_measures_rates_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    assert links.main(["--device", "cpu", "--json", str(tmp_path / "json")]) == 0
    machine = json.loads((tmp_path / "json").read_text())["machine"]
    assert machine["bandwidth"] is None
    assert machine["flops"]["float32"] > 0


def test_the_measured_machine_is_one_for_the_planner() -> None:
    """Latency comes from the smallest size, and bandwidth leaves it out: links of 40 GB/s and 12 us for 8 ranks."""
    sizes = {2**power: 12e-6 + 2**power * 7 / 8 / 40e9 for power in (28, 26, 10)}
    rows = [links.Row("all_to_all", n, seconds * 1e6, n * 7 / 8 / seconds / 1e9) for n, seconds in sizes.items()]
    assert links.link_of(rows) == (pytest.approx(40e9, rel=1e-6), pytest.approx(12e-6, rel=0.01))
    flops = {"bfloat16": 7e14, "float16": 6.5e14, "float32": 5e13}
    measured = links.MeasuredMachine("GPU X", 16, 8, 41.3e9, 12.34e-6, flops, 3e12)
    machine = machine_of(Machine(name="h100x8", file="machine.json"), "cuda", json.dumps(asdict(measured)))
    assert (machine.flops, machine.memory, machine.network.bandwidth) == (flops, 3e12, 41.3e9)
    assert machine.node == machine_of(Machine(name="h100x8")).node, "nothing was measured within a node"
    with pytest.raises(OptionError, match=r"machine.file = 'machine.json' .*it was rehearsed without a GPU"):
        machine_of(Machine(file="machine.json"), "cuda", json.dumps({"source": "rehearsed", "flops": {}}))


def test_momentum_and_update_of_a_bucket_take_a_launch_each_on_a_gpu() -> None:
    """Also in a step that the device may skip."""
    (plain, skippable), buckets = stages.counted("qwen3_8b", "auto"), 3
    assert (plain["advance"], plain["apply"]) == (buckets, buckets)
    assert (plain.total(), skippable) == (90, 94)
    # torch.optim.Muon has 644.
    assert stages.counted("one GPU, reference", "auto")[0].total() == 604
