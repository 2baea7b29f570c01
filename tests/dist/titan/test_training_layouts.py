"""A recipe trained at any parallel layout follows the losses of the same recipe on one rank."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import tiny
from tests.dist.harness import run_ranks

STEPS = 4
# Sums in another order differ in the last digits: by 2e-5 at most here. TorchTitan's experts compute in bfloat16 for
# every recipe, with 2e-4.
TOLERANCES = {"llama3/tiny": 1e-4, "qwen3/moe_tiny": 1e-3, "deepseek_v3/tiny": 1e-3}

RECIPE = """
[model]
name = "{family}"
flavor = "{flavor}"

[data]
source = "files"
files = ["{corpus}/*.txt"]
validation_fraction = 0.2
cache = "{corpus}/cache"

[training]
steps = {steps}
local_batch_size = 1
global_batch_size = 4
seq_len = 256
mixed_precision_param = "float32"

[lr_scheduler]
warmup_steps = 2

[metrics]
log_freq = 1
enable_tensorboard = false

[validator]
enable = false

[checkpoint]
enable = false
"""

LAYOUTS = {
    "fsdp4": ("llama3/tiny", {}),
    "fsdp2_tp2": ("llama3/tiny", {"tensor_parallel_degree": 2}),
    "fsdp2_cp2": ("llama3/tiny", {"context_parallel_degree": 2}),
    "ep2_efsdp2": ("qwen3/moe_tiny", {"expert_parallel_degree": 2}),
    # The defaults on GPUs, and the settings of large models.
    "tp2_ep2_as_on_gpus": (
        "qwen3/moe_tiny",
        {
            "tensor_parallel_degree": 2,
            "expert_parallel_degree": 2,
            "loss.chunks": 8,
            "activation_checkpoint.mode": "selective",
            "optimizer.implementation": "fused",
        },
    ),
    "mla_ep4": ("deepseek_v3/tiny", {"expert_parallel_degree": 4}),
}


def train(path: str, overrides: list[str]) -> Path:
    """The folder of a recipe's run on the available ranks."""
    from titan_muon.titan import compat

    compat.install()
    import models  # noqa: F401 (registers the families)
    from titan_muon.titan.recipe import load
    from titan_muon.titan.run import job

    return Path(job.train(load(path, overrides)))


def losses(rank: int, world_size: int, path: str, overrides: list[str]) -> list[float]:
    return list(tiny.records(train(path, overrides), "loss").values())


def curves(rank: int, world_size: int, path: str) -> list[dict[int, float]]:
    """Training losses, validation losses and tokens, by step."""
    folder = train(path, [])
    # The reporting rank may not have written its last record yet.
    dist.barrier()
    return [tiny.records(folder, key) for key in ("loss", "val_loss", "tokens")]


def write_corpus(folder: Path) -> Path:
    for index in range(40):
        words = " ".join(f"word{(index * 7 + i * i) % 53} means {i % 11};" for i in range(300))
        (folder / f"{index:02}.txt").write_text(words)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def train_on(folder: Path, world_size: int, model: str, degrees: dict[str, object], name: str) -> list[float]:
    family, flavor = model.split("/")
    path = folder / f"{name}.toml"
    path.write_text(RECIPE.format(family=family, flavor=flavor, corpus=folder, steps=STEPS))
    overrides = ["--dump_folder", str(folder / "runs")]
    for key, value in degrees.items():
        words = value if isinstance(value, tuple) else (value,)
        overrides += [f"--{key}" if "." in key else f"--parallelism.{key}", *map(str, words)]
    # Under pipeline parallelism the last stage writes the file, and rank 0 may read too early.
    return max(run_ranks(losses, world_size, str(path), overrides), key=len)


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Callable[[str], list[float]]:
    """Losses of a model on one rank, trained on first use."""
    return cache(lambda model: train_on(folder, 1, model, {}, f"one_{model.replace('/', '_')}"))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "fsdp2_tp2" else pytest.mark.slow) for name in LAYOUTS]
)
def test_four_ranks_train_as_a_single_rank(layout: str, folder: Path, one_rank: Callable[[str], list[float]]) -> None:
    model, degrees = LAYOUTS[layout]
    expected = one_rank(model)
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.5, "the reference must learn, or following it means nothing"
    assert train_on(folder, 4, model, degrees, layout) == pytest.approx(expected, abs=TOLERANCES[model])


# Newton-Schulz's own rounding: torch.optim.Muon's in bfloat16 against stacks and float16. Losses are 3 to 6.
METHOD_TOLERANCE = 0.02
METHODS = {"auto": {}, "gram": {"muon.orthogonalize": "gram", "muon.ns_dtype": "float16"}}


@pytest.mark.slow
def test_training_follows_the_reference_with_any_algorithm(folder: Path) -> None:
    options, model = {"training.steps": 6, "training.seq_len": 128}, "llama3/tiny"
    expected = train_on(folder, 2, model, {**options, "muon.orthogonalize": "reference"}, "reference")
    assert expected[-1] < expected[0] - 1, "the reference must learn, or following it means nothing"
    for name, method in METHODS.items():
        losses = train_on(folder, 2, model, {**options, **method}, name)
        assert losses == pytest.approx(expected, abs=METHOD_TOLERANCE), name
        assert losses != expected, "other arithmetic has other digits"


@pytest.mark.slow
def test_every_exchange_gives_the_same_curve(folder: Path) -> None:
    """The matrices are made whole with the same bits, so the losses have the same digits."""
    curves = {
        exchange: train_on(
            folder,
            4,
            "llama3/tiny",
            {"muon.exchange": exchange, "muon.orthogonalize": "reference"},
            f"exchange_{exchange}",
        )
        for exchange in ("all_gather", "all_to_all", "all_gather_reduce_scatter")
    }
    assert len(set(map(tuple, curves.values()))) == 1, curves


# Ranks, and lines below the base recipe: users switch strategies by editing the recipe, and compare curves.
STRATEGIES = {
    "fsdp2": (2, ""),
    "tp2": (2, "[parallelism]\ntensor_parallel_degree = 2\n"),
    "ep2": (2, "[parallelism]\nexpert_parallel_degree = 2\n"),
    "hsdp2x2": (4, "[parallelism]\ndata_parallel_replicate_degree = 2\n"),
    "owned": (2, '[placement]\nmuon = "owned"\n'),
}


def test_an_edited_recipe_has_the_same_curve_on_every_layout(folder: Path) -> None:
    """Training and validation losses at equal tokens, for any ranks."""
    path, tolerance = folder / "edited.toml", TOLERANCES["qwen3/moe_tiny"]
    base = RECIPE.format(family="qwen3", flavor="moe_tiny", corpus=folder, steps=3)
    base = base.replace("local_batch_size = 1", "local_batch_size = -1")
    base = base.replace("[validator]\nenable = false", "[validator]\nsteps = -1")
    base = base.replace("validation_fraction = 0.2", "validation_fraction = 0.05")
    base = base.replace("seq_len = 256", "seq_len = 128").replace("/*.txt", "/0?.txt")
    base = f'dump_folder = "{folder}/runs"\n{base}\n[muon]\nns_steps = 2\n'
    path.write_text(base)
    expected, validated, tokens = run_ranks(curves, 1, str(path))[0]
    assert validated.keys() == {3}
    assert expected[3] < expected[1] - 0.2, "the reference must learn, or following it means nothing"
    assert tokens == {step: step * 4 * 128 for step in (1, 2, 3)}
    for name, (ranks, edit) in STRATEGIES.items():
        path.write_text(base + edit)
        training, held_out, seen = run_ranks(curves, ranks, str(path))[0]
        assert training == pytest.approx(expected, abs=tolerance), name
        assert held_out == pytest.approx(validated, abs=tolerance), name
        assert seen == tokens, name
