"""A recipe trains equally under `owned` and `shard0`, and continues under the other placement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import tiny
from tests.dist.harness import run_ranks

SHARED = {"validator__enable": "false", "metrics__enable_tensorboard": "false"}
DENSE = {"model__name": "llama3", "model__flavor": "tiny"}
STEPS = 4
LAYOUTS = {
    "dense": (2, DENSE, 1e-4),
    "experts": (2, {"parallelism__expert_parallel_degree": 2}, 1e-3),
    "more ranks than experts": (4, {"parallelism__expert_parallel_degree": 2, "model__flavor": "two_experts"}, 1e-3),
    "replicas": (4, {**DENSE, "parallelism__data_parallel_replicate_degree": 2}, 1e-4),
    "tensor parallel": (4, {**DENSE, "parallelism__tensor_parallel_degree": 2}, 1e-4),
    "recomputed selectively": (2, {"activation_checkpoint__mode": "selective"}, 1e-3),
    "compiled": (2, {**DENSE, "compile__enable": "true", "compile__backend": "aot_eager"}, 1e-4),
}


def train(recipe: object) -> str:
    from titan_muon.trainer.torchtitan import compat

    compat.install()
    from titan_muon.trainer.run import job

    return job.train(recipe)


def under_all(
    rank: int, world_size: int, folder: Path, options: dict[str, object], placements: list[dict[str, str]]
) -> list[str]:
    """Folders of a run under `shard0`, and of a run under `owned` with each of the placements."""
    from models import qwen3

    qwen3.FLAVORS["two_experts"] = replace(qwen3.FLAVORS["moe_tiny"], layers=2, experts=2)
    batch = {"training__local_batch_size": 1, "training__global_batch_size": 4, "training__steps": STEPS}
    shared = {**SHARED, **batch, "checkpoint__enable": "false", **options}
    runs = [{"name": f"owned{i}", "placement__muon": "owned", **keys} for i, keys in enumerate(placements)]
    return [train(tiny.recipe(folder, **shared, **run)) for run in ({}, *runs)]


PLACEMENTS = {
    "replicas": [{"placement__replicas": "each", "muon__expert__replicas": "split"}, {"placement__replicas": "one"}],
}


MARKS = {
    "experts": tiny.needs_torch_for("parallelism.expert_parallel_degree"),
    "more ranks than experts": tiny.needs_torch_for("parallelism.expert_parallel_degree"),
    "tensor parallel": pytest.mark.slow,
}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=MARKS.get(name, ())) for name in LAYOUTS])
def test_the_curves_of_owned_and_shard0_coincide(layout: str, tmp_path: Path) -> None:
    world_size, options, tolerance = LAYOUTS[layout]
    placements = PLACEMENTS.get(layout, [{}])
    tiny.write_recipe(tmp_path)
    sharded, *runs = run_ranks(under_all, world_size, tmp_path, options, placements)[0]
    losses = tiny.records(sharded, "loss")
    assert losses.keys() == set(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 0.5, "it must learn, or to coincide means nothing"
    for owned in runs:
        assert tiny.records(owned, "loss") == pytest.approx(losses, abs=tolerance)
        norms = tiny.records(sharded, "grad_norm")
        assert tiny.records(owned, "grad_norm") == pytest.approx(norms, rel=20 * tolerance)
        text = (Path(owned) / "optimizers.txt").read_text()
        assert "owned by rank" in text
        assert ("tensor parallelism cuts owned matrices" in text) == (layout == "tensor parallel")


RULES = """
[[placement.rule]]
match = "*_norm.weight"
placement = "owned"
owner = "layer"
[[placement.rule]]
match = "*.wo.weight"
placement = "owned"
owner = 1
[[placement.rule]]
match = "*.w1.weight"
placement = "shard0"
"""


def test_placement_rules_do_not_change_the_losses(tmp_path: Path) -> None:
    """Owned norms of AdamW, a matrix with a named owner, and a sharded matrix with a line on the console."""
    file = tiny.write_recipe(tmp_path)
    plain = file.read_text()
    file.write_text(plain + RULES)
    ruled = run_ranks(half, 2, tmp_path, "owned", 6, "")[0]
    file.write_text(plain)
    (tmp_path / "runs").rename(tmp_path / "ruled")
    sharded = run_ranks(half, 2, tmp_path, "shard0", 6, "")[0]
    folder = tmp_path / "ruled" / Path(ruled).relative_to(tmp_path / "runs")
    assert tiny.records(folder, "loss") == pytest.approx(tiny.records(sharded, "loss"), abs=1e-4)
    lines = (folder / "optimizers.txt").read_text().splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("layers.")}
    assert "adamw" in rows["layers.0.ffn_norm.weight"]
    assert "owned by rank" in rows["layers.0.ffn_norm.weight"]
    assert all("owned by rank 1" in row for name, row in rows.items() if name.endswith(".wo.weight"))
    assert all("S(0)" in row for name, row in rows.items() if name.endswith(".w1.weight"))
    index = lines.index("owned, and yet the step communicates:") + 1
    assert "w1.weight): sharded; " in lines[index]


def half(rank: int, world_size: int, folder: Path, placement: str, steps: int, load: str) -> str:
    batch = {"training__local_batch_size": 4 // world_size, "training__global_batch_size": 4}
    resume = {"checkpoint__load": load} if load else {}
    return train(
        tiny.recipe(folder, placement__muon=placement, training__steps=steps, **{**SHARED, **DENSE, **batch, **resume})
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    tiny.write_recipe(folder)
    return tiny.records(run_ranks(half, 2, folder, "shard0", 6, "")[0], "loss")


@pytest.mark.parametrize(
    ("first", "second"),
    [((4, "owned"), (2, "shard0")), ((2, "shard0"), (1, "owned"))],
    ids=lambda side: f"{side[1]}@{side[0]}",
)
def test_a_run_continues_under_a_different_placement(
    first: tuple[int, str], second: tuple[int, str], tmp_path: Path, uninterrupted: dict[int, float]
) -> None:
    """On another number of ranks too, with the losses of an uninterrupted run."""
    tiny.write_recipe(tmp_path)
    folder = run_ranks(half, first[0], tmp_path, first[1], 3, "")[0]
    assert run_ranks(half, second[0], tmp_path, second[1], 6, folder)[0] == folder
    assert tiny.records(folder, "loss") == pytest.approx(uninterrupted, abs=2e-4)


def exported_and_imported(rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    """A run with an export of safetensors, and a run under the other placement with the import."""
    hf = {"checkpoint__last_save_model_only": "true", "checkpoint__last_save_in_hf": "true"}
    small = {**SHARED, "training__steps": 2, "checkpoint__freq": 2}
    exported = train(tiny.recipe(folder, name="out", placement__muon="owned", **small, **hf))
    start = {
        "checkpoint__initial_load_path": str(Path(exported) / "checkpoint" / "step-2"),
        "checkpoint__initial_load_in_hf": "true",
    }
    imported = [
        train(tiny.recipe(folder, name=f"in_{name}", placement__muon=name, **small, **start))
        for name in ("owned", "shard0")
    ]
    return exported, imported[0], imported[1]


def test_hugging_face_weights_are_written_and_read(tmp_path: Path) -> None:
    from safetensors import safe_open

    tiny.write_recipe(tmp_path)
    exported, owned, sharded = run_ranks(exported_and_imported, 2, tmp_path)[0]
    folder = Path(exported) / "checkpoint" / "step-2"
    shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (256, 128)
    first = [tiny.records(run, "loss")[1] for run in (owned, sharded)]
    assert first[0] == pytest.approx(first[1], abs=1e-3)
    assert first[0] < tiny.records(exported, "loss")[2] + 0.1, "it starts where the other ended"
