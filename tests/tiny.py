"""A recipe small enough to train in a test: a few steps of the tiny MoE model on a corpus written by the test."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

import models  # noqa: F401 (registers the families)
from titan_muon.forecast.fake_world import forget_meshes
from titan_muon.trainer.recipe import Recipe, load
from titan_muon.trainer.recipe.degrees import has_torch_for

RECIPE = """
name = "tiny"
dump_folder = "{folder}/runs"
[model]
name = "qwen3"
flavor = "moe_tiny"
[data]
source = "files"
files = ["{folder}/corpus/*.txt"]
cache = "{folder}/cache"
validation_fraction = 0.2
[training]
steps = 6
local_batch_size = 2
seq_len = 64
mixed_precision_param = "float32"
[validator]
freq = 2
steps = 2
[checkpoint]
freq = 3
[metrics]
log_freq = 1
[lr_scheduler]
warmup_steps = 2
total_steps = 6
"""
WORDS = ("rank", "matrix", "piece", "owner", "route", "bucket", "plan", "step", "momentum", "gather", "update")


def needs_torch_for(key: str) -> pytest.MarkDecorator:
    """A mark that skips a test of a recipe key that needs a newer torch."""
    return pytest.mark.skipif(not has_torch_for(key), reason=f"{key} needs a newer torch")


def write_recipe(folder: Path) -> Path:
    """Write the recipe and the corpus into a folder. Returns the recipe's file."""
    corpus = folder / "corpus"
    corpus.mkdir()
    draw = random.Random(0)
    for number in range(30):
        text = " ".join(draw.choice(WORDS) for _ in range(200))
        (corpus / f"{number:02}.txt").write_text(text)
    file = folder / "tiny.toml"
    file.write_text(RECIPE.format(folder=folder))
    return file


def small_words(folder: Path) -> list[str]:
    """Write documents into a folder. Returns the words of a command line that trains on short sequences of them."""
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"document {index} " * 200)
    keys = "--training.seq_len 64 --validator.steps 1 --metrics.log_freq 1 --data.validation_fraction 0.3"
    return [*keys.split(), "--data.source=files", f"--data.files={folder}/*.txt", f"--data.cache={folder}/cache"]


def recipe(folder: Path, **values: object) -> Recipe:
    """The recipe in `folder`, written if need be; a key such as `training__steps` overrides training.steps."""
    file = folder / "tiny.toml"
    if not file.exists():
        write_recipe(folder)
    words = (
        (f"--{key.replace('__', '.')}", value if isinstance(value, str) else json.dumps(value))
        for key, value in values.items()
    )
    return load(file, [word for pair in words for word in pair])


def train(what: Recipe | str, overrides: Sequence[str] = ()) -> Path:
    """The folder of the run of a recipe, or of a recipe's file, on the ranks of this world."""
    from titan_muon.trainer.run import job

    forget_meshes()
    folder = Path(job.train(load(what, overrides) if isinstance(what, str) else what))
    # The reporting rank may not have written its last record yet.
    dist.barrier()
    return folder


def records(folder: str | Path, key: str) -> dict[int, float]:
    """A run's records under a key, by step."""
    lines = (json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}
