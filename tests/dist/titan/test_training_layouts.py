"""A recipe trained at any parallel layout follows the curves of the same recipe on one rank."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

import models
from tests import tiny
from tests.dist.harness import run_ranks
from titan_muon.trainer.recipe.toml import value_text
from titan_muon.trainer.torchtitan import compat

STEPS, SEQUENCE, BATCH = 4, 256, 4
# Sums in another order differ in the last digits: by 2e-5 at most here. TorchTitan's experts compute in bfloat16 for
# every recipe, with 2e-4.
TOLERANCES = {"llama3/tiny": 1e-4, "qwen3/moe_tiny": 1e-3, "deepseek_v3/tiny": 1e-3}
DENSE, EXPERTS, LATENT = TOLERANCES
NORM_TOLERANCE = 0.02

RECIPE: Mapping[str, object] = {
    "data.source": "files",
    "data.validation_fraction": 0.05,
    "training.steps": STEPS,
    "training.local_batch_size": -1,
    "training.global_batch_size": BATCH,
    "training.seq_len": SEQUENCE,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.total_steps": STEPS,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "validator.steps": -1,
    "checkpoint.enable": False,
}

TP2 = {"parallelism.tensor_parallel_degree": 2}
EP2 = {"parallelism.expert_parallel_degree": 2}
CP2 = {"parallelism.context_parallel_degree": 2}
HSDP2 = {"parallelism.data_parallel_replicate_degree": 2}
OWNED = {"placement.muon": "owned"}
STAGES = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 2, "training.steps": 3}
STAGES |= {"validator.enable": False}
SCHEDULE = "parallelism.pipeline_parallel_schedule"
BLOCKS, ENDS = ["tok_embeddings", *(f"layers.{index}" for index in range(6))], ["norm", "lm_head"]
AS_ON_GPUS = {"loss.chunks": 8, "activation_checkpoint.mode": "selective", "optimizer.implementation": "fused"}
"""The defaults on GPUs, and the settings of large models."""
LAYOUTS: Mapping[str, tuple[int, str, Mapping[str, object]]] = {
    "fsdp2_tp2": (4, DENSE, TP2),
    "owned": (2, EXPERTS, OWNED),
    "fsdp4": (4, DENSE, {}),
    "fsdp2_cp2": (4, DENSE, CP2),
    "hsdp2x2": (4, EXPERTS, HSDP2),
    "ep2_efsdp2": (4, EXPERTS, EP2),
    "tp2_ep2_as_on_gpus": (4, EXPERTS, {**TP2, **EP2, **AS_ON_GPUS}),
    "mla_ep4": (4, LATENT, {"parallelism.expert_parallel_degree": 4}),
    "mla_cp2": (2, LATENT, {**CP2, "parallelism.context_parallel_load_balancer": "none"}),
    "tp2_cp2": (4, DENSE, {**TP2, **CP2}),
    "tp2_owned": (4, DENSE, {**TP2, **OWNED}),
    "hsdp2_one_owner": (2, EXPERTS, {**HSDP2, **OWNED, "placement.replicas": "one"}),
    "pp2": (2, DENSE, STAGES),
    "pp2_tp2": (4, DENSE, {**STAGES, **TP2}),
    "pp2_tp2_owned": (4, DENSE, {**STAGES, **TP2, **OWNED}),
    "pp2_fsdp2": (4, DENSE, STAGES),
    "pp2_fsdp2_owned": (4, DENSE, {**STAGES, **OWNED}),
    "pp2_ep2": (4, EXPERTS, {**STAGES, **EP2}),
    # The last stage has no Muon matrix, and takes part in agreements.
    "no_matrices": (2, DENSE, {**STAGES, "parallelism.module_fqns_per_model_part": [BLOCKS, ENDS]}),
    "interleaved": (2, DENSE, {**STAGES, SCHEDULE: "Interleaved1F1B"}),
    "zero_bubble": (2, DENSE, {**STAGES, SCHEDULE: "ZBVZeroBubble", "training.local_batch_size": 4}),
}


@dataclass(frozen=True)
class Curves:
    """A run's records by step, and the printed lines about the optimizers."""

    losses: dict[int, float]
    norms: dict[int, float]
    held_out: dict[int, float]
    tokens: dict[int, float]
    optimizers: str


def shrink_experts() -> None:
    """Make moe_tiny smaller in this process."""
    flavors = models._family("qwen3").FLAVORS
    flavors["moe_tiny"] = replace(flavors["moe_tiny"], layers=2, dim=64, hidden=64, heads=4, kv_heads=2, experts=4)


def write_corpus(folder: Path) -> Path:
    for index in range(10):
        words = " ".join(f"word{(index * 7 + i * i) % 53} means {i % 11};" for i in range(300))
        (folder / f"{index:02}.txt").write_text(words)
    return folder


def write_recipe(folder: Path, model: str, name: str, values: Mapping[str, object]) -> str:
    """The path of a recipe with other values, for the corpus in `folder`."""
    family, flavor = model.split("/")
    places = {"dump_folder": f"{folder}/runs", "data.files": [f"{folder}/*.txt"], "data.cache": f"{folder}/cache"}
    recipe = {**RECIPE, **places, "model.name": family, "model.flavor": flavor, **values}
    path = folder / f"{name}.toml"
    path.write_text("".join(f"{key} = {value_text(value)}\n" for key, value in recipe.items()))
    return str(path)


def train(path: str, overrides: Sequence[str] = ()) -> Path:
    """The folder of a recipe's run on the available ranks."""
    compat.install()
    from titan_muon.trainer.recipe import load
    from titan_muon.trainer.run import job

    folder = Path(job.train(load(path, overrides)))
    # The reporting rank may not have written its last record yet.
    dist.barrier()
    return folder


def curves(rank: int, world_size: int, path: str) -> Curves:
    folder = train(path)
    records = (tiny.records(folder, key) for key in ("loss", "grad_norm", "val_loss", "tokens"))
    return Curves(*records, (folder / "optimizers.txt").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Curves]:
    """`trained(ranks, model, name, values)`: the curves of a recipe, edited for each layout."""
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    return lambda ranks, *recipe: run_ranks(curves, ranks, write_recipe(folder, *recipe))[0]


@pytest.fixture(scope="module")
def one_rank(trained: Callable[..., Curves]) -> Callable[[str], Curves]:
    """Curves of a model on one rank, trained on first use."""
    return cache(lambda model: trained(1, model, f"one_{model.replace('/', '_')}", {}))


def layout_marks(name: str) -> list[pytest.MarkDecorator]:
    if LAYOUTS[name][2].get("parallelism.pipeline_parallel_degree"):
        return [tiny.needs_torch_for("parallelism.pipeline_parallel_degree")]
    return [] if name in ("fsdp2_tp2", "owned") else [pytest.mark.slow]


@pytest.mark.parametrize("layout", [pytest.param(name, marks=layout_marks(name)) for name in LAYOUTS])
def test_every_layout_trains_as_a_single_rank(
    layout: str, trained: Callable[..., Curves], one_rank: Callable[[str], Curves]
) -> None:
    """Training and validation losses at equal tokens, and stages that start as the whole model does."""
    ranks, model, values = LAYOUTS[layout]
    expected, found = one_rank(model), trained(ranks, model, layout, values)
    assert expected.losses[STEPS] < expected.losses[1] - 0.5, "the reference must learn, or following it means nothing"
    steps = values.get("training.steps", STEPS)
    assert found.tokens == {step: step * BATCH * SEQUENCE for step in range(1, steps + 1)}
    assert found.losses == pytest.approx({s: expected.losses[s] for s in found.tokens}, abs=TOLERANCES[model])
    # Muon and AdamW normalize, so that losses do not show gradients that are wrong by a factor.
    assert found.norms == pytest.approx({s: expected.norms[s] for s in found.tokens}, rel=NORM_TOLERANCE)
    assert found.losses[1] == pytest.approx(expected.losses[1], abs=1e-5 if model == DENSE else TOLERANCES[model])
    assert assigned(found) == assigned(expected), "the counts are of the whole model"
    if "parallelism.pipeline_parallel_degree" not in values:
        assert expected.held_out.keys() == {STEPS}
        assert found.held_out == pytest.approx(expected.held_out, abs=TOLERANCES[model])
        return
    size = ranks // 2
    for rank in range(2):
        where = f"rank {rank}" if size == 1 else f"ranks {rank * size} to {rank * size + size - 1}"
        assert f"pipeline rank {rank} of 2, {where}: " in found.optimizers


def assigned(run: Curves) -> list[str]:
    return re.findall(r"^\w+: .* of parameters$", run.optimizers, re.MULTILINE)


@tiny.needs_torch_for("parallelism.pipeline_parallel_degree")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_continues_with_a_different_number_of_stages(
    before: int, after: int, trained: Callable[..., Curves], one_rank: Callable[[str], Curves]
) -> None:
    kept = {**STAGES, "checkpoint.enable": True, "name": f"stages_{before}_{after}"}
    degree = "parallelism.pipeline_parallel_degree"
    trained(before, DENSE, "before", {**kept, degree: before, "training.steps": 2})
    found = trained(after, DENSE, "after", {**kept, degree: after, "checkpoint.load": "latest"})
    assert found.losses == pytest.approx({s: one_rank(DENSE).losses[s] for s in (1, 2, 3)}, abs=TOLERANCES[DENSE])
