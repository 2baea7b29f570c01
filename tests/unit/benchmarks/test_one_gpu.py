"""The programs for one GPU run on the CPU: a rank of a large world, a language model, float16, Newton-Schulz, rates."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import links, newton_schulz
from benchmarks.one_gpu import corpus, float16, language_model, one_rank, worlds
from titan_muon.tensors.process_groups import forget_meshes

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
    from titan_muon.titan.dry_run.meta_model import build_meta_model
    from titan_muon.titan.recipe import load

    recipe = load(ROOT / f"configs/{source.recipe}_muon.toml", [*source.overrides, "--qk_clip.mode", "off"])
    plan = build_meta_model(recipe, source.world, "cuda").plan
    assert plan is not None
    forget_meshes()
    with one_rank.fake_world(world):
        assert one_rank.plan_of(world).digest() == plan.digest()


def test_one_rank_steps_beside_the_model(tmp_path: Path) -> None:
    words = ["--world", "tiny", "--device", "cpu", "--repeats", "2", "--json", str(tmp_path / "json")]
    assert one_rank.main(words) == 0
    model, *stepped = rows(tmp_path / "json")
    assert (model["source"], model["step"]) == ("model", "h100x8")
    assert [row["step"] for row in stepped] == ["plain", "recipe", "AdamW of the rest"]
    assert all(row["launches"] > 0 and row["newton_schulz ms"] > 0 for row in stepped[:2])


def test_runs_train_on_equal_batches_and_late_ones_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "folders", lambda: [ROOT / "docs", ROOT / "benchmarks"])
    common = ["--device", "cpu", "--tiny", "--cache", str(tmp_path / "corpus"), "--json", str(tmp_path / "json")]
    names = ["adamw:1e-3", "muon:1e-3", "torch_muon:1e-3", "normuon:2e-3", "adamw:1e-3", "nothing:1e-3"]
    assert language_model.main(["--runs", *names, *common]) == 1
    *trained, unknown = rows(tmp_path / "json")
    losses = [row["loss"] for row in trained]
    assert losses[0] == losses[4], "equal weights and batches"
    assert len(set(losses[:4])) == 4
    # Equal up to the Newton-Schulz arithmetic.
    assert losses[1] == pytest.approx(losses[2], abs=1e-3)
    assert unknown["fault"].startswith("KeyError")
    assert language_model.main(["--runs", "muon:1e-3", "--seconds", "0", *common]) == 0
    assert rows(tmp_path / "json")[0]["fault"] == "no time left"


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
